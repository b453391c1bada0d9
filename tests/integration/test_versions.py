"""A member of a neighbouring protocol version takes part, and members of other versions are refused."""

import pytest
from job import Job
from long_runs import first_here
from test_failures import finish_and_check
from test_mistakes import pair, refused, waiting_pair  # noqa: F401  (fixtures)

from fabric.model import PROTOCOL_VERSION


def of(apart: int) -> dict[str, str]:
    return {"TEST_TRAINER": "version_trainer", "TEST_VERSION": str(apart)}


@pytest.mark.parametrize("apart", first_here("protocol/test_compatibility.py", [-1, 1]))
def test_a_neighbouring_version_takes_part(zygote, tmp_path, apart):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "20", "TINY_STEP_S": "0.005"}) as job:
        job.start("r0")
        job.start("r1", **of(apart))
        job.start("r2")
        finish_and_check(job, 20)
        assert any(len(e["contributions"]) == 3 for e in job.events("r0", "commit"))


@pytest.mark.parametrize("apart", first_here("protocol/test_compatibility.py", [-1, 1]))
def test_a_lighthouse_is_replaced_by_one_of_a_neighbouring_version(zygote, tmp_path, apart):
    """After a rolling upgrade, and after its rollback, the new leader reads the record and the members go
    on.
    """
    with Job(
        zygote,
        tmp_path,
        environment={"TINY_STEPS": "120", "TINY_STEP_S": "0.01", "TINY_PATIENT_STEPS": "100"},
    ) as job:
        job.start_all()
        job.wait_for(lambda: len(job.events("r0", "commit")) > 10, "ten steps under our lighthouse")
        port = int(job.url.rsplit(":", 1)[1])
        job.stop_lighthouse()
        job.start_lighthouse(port, apart)
        job.kill("r1")
        job.wait_for(lambda: job.ended("r1") is not None, "r1's end")
        job.start("r1")
        job.wait_for(lambda: job.events("r1", "joined"), "the other lighthouse to let r1 back in")
        job.stop_lighthouse()
        job.start_lighthouse(port)
        finish_and_check(job, 120)
        assert job.starts == {"r0": 1, "r1": 2, "r2": 1}


@pytest.mark.parametrize("apart", [-2, 2])
def test_a_version_further_away_is_refused_and_disturbs_no_member(pair, apart):  # noqa: F811
    said = refused(pair, "r2", **of(apart))
    ours, theirs = PROTOCOL_VERSION, PROTOCOL_VERSION + apart
    assert f"protocol version {theirs} cannot talk to version {ours}: upgrade one step at a time" in said
    pair.pids.pop("r2")
