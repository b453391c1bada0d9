"""One process of a replica leaves a note of the job's end for the next process."""

import pytest

from fabric.client.process.last_notes import find_job_end, leave_job_end
from fabric.model import Fence, JobEnd

WORD = JobEnd(Fence("s", 1, 3), 40, 1795)


def test_the_next_process_reads_the_note_of_its_predecessor(tmp_path):
    assert find_job_end(tmp_path) is None
    leave_job_end(tmp_path, WORD)
    assert find_job_end(tmp_path) == WORD
    assert [x.name for x in tmp_path.iterdir()] == ["ended.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"fence": 3}', '{"step": 1, "incarnation": 2}', "\0"])
def test_an_unreadable_note_is_ignored(tmp_path, text):
    (tmp_path / "ended.json").write_text(text)
    assert find_job_end(tmp_path) is None


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path):
    leave_job_end(tmp_path / "missing", WORD)
    assert find_job_end(tmp_path / "missing") is None
