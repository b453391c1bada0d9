"""Members of another protocol version, with real processes: a neighbour takes part, others are told."""

import pytest
from job import Job
from test_failures import finish_and_check
from test_mistakes import pair, refused  # noqa: F401  (a fixture)

from fabric.model import PROTOCOL_VERSION


def of(apart: int) -> dict[str, str]:
    return {"TEST_TRAINER": "version_trainer", "TEST_VERSION": str(apart)}


@pytest.mark.parametrize("apart", [-1, 1])
def test_a_neighbouring_version_takes_part(zygote, tmp_path, apart):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "20", "TINY_STEP_S": "0.005"}) as job:
        job.start("r0")
        job.start("r1", **of(apart))
        job.start("r2")
        finish_and_check(job, 20)
        assert any(len(e["contributions"]) == 3 for e in job.events("r0", "commit"))


@pytest.mark.parametrize("apart", [-2, 2])
def test_a_version_further_away_is_refused_and_disturbs_nobody(pair, apart):  # noqa: F811
    said = refused(pair, "r2", **of(apart))
    ours, theirs = PROTOCOL_VERSION, PROTOCOL_VERSION + apart
    assert f"protocol version {theirs} cannot talk to version {ours}: upgrade one step at a time" in said
    pair.pids.pop("r2")
