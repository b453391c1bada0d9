"""A trainer's journal on a full disk."""

import json
import os
import resource
from contextlib import contextmanager

import pytest
from msgspec.structs import replace
from protocol.makers import record_of

from fabric.audit.journal import parse_journal
from fabric.client.control.engine import RoundJournal
from fabric.client.process.journal import Journal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "r0.jsonl"


@contextmanager
def full_disk(journal):
    """Make every write to the journal fail because the disk has no space."""
    kept, full = os.dup(journal._descriptor), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._descriptor)
    yield
    os.dup2(kept, journal._descriptor)
    os.close(kept)
    os.close(full)


def events(path):
    return [json.loads(line)["event"] for line in path.read_text().splitlines() if line]


def test_a_full_disk_is_reported_once_and_lost_lines_are_counted_when_there_is_room(path, caplog):
    journal = Journal(path, "r0", 7)
    journal.write("state", generation=1, step=0, digest="a")
    with full_disk(journal):
        for step in range(1, 4):
            journal.write("state", generation=1, step=step, digest="a")
        [warning] = [r.getMessage() for r in caplog.records if "journal" in r.getMessage()]
        assert warning.startswith(
            f"fabric: r0: the journal {path} cannot be written (No space left on device)"
        )
    journal.write("state", generation=1, step=4, digest="a")
    assert events(path) == ["state", "lost", "state"]
    found = parse_journal("r0", path.read_bytes())
    assert [line.integer("step") for line in found.lines if line.event == "state"] == [0, 4]
    assert found.broken == (
        "r0 incarnation 7 (line 2) says that 3 lines before it could not be written: their content is lost.",
    )
    with full_disk(journal):
        journal.write("state", generation=1, step=5, digest="a")
    assert len([r for r in caplog.records if "cannot be written" in r.getMessage()]) == 2
    journal.close()


def test_a_torn_line_is_not_glued_to_the_next_one(path):
    journal = Journal(path, "r0", 7)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    journal.write("state", generation=1, step=0, digest="a")
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
    try:
        journal.write("state", generation=1, step=1, digest="a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.write("state", generation=1, step=2, digest="a")
    lines = path.read_text().splitlines()
    assert [len(line) for line in lines][1] == 20 and len(lines) == 4
    found = parse_journal("r0", path.read_bytes())
    assert [line.event for line in found.lines] == ["state", "lost", "state"] and len(found.broken) == 1
    journal.close()


def test_each_later_epoch_gets_one_line_in_the_terminal():
    told = []
    journal = RoundJournal(Journal(None, "a", 1), told.append)
    journal.note_epoch(record_of("a b c", 1))
    died = replace(record_of("a b", 2), reason="c evicted: its process ended")
    journal.note_epoch(died)
    journal.note_epoch(died)
    many = record_of(" ".join(f"r{i}" for i in range(12)), 3)
    journal.note_epoch(replace(many, reason="r11 joins"))
    assert told[0] == "epoch 2 with a, b: c evicted: its process ended"
    assert told[1:] == ["epoch 3 with r0, r1, r2, r3, r4, r5, r6, r7 and 4 more: r11 joins"]
