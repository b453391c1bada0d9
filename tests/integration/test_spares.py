"""A real spare keeps up with the state, and takes a dead member's place without the start of a process."""

import contextlib

from job import Job
from test_failures import check

HELD_STEP = 30


def stands_by(job: Job, replica: str) -> bool:
    """Return whether the spare is outside the roster with the state of the members' step."""
    with contextlib.suppress(OSError):
        found = job.status()
        return any(
            x["replica"] == replica and "stands by" in x["verdict"] and x["step"] == found["step"]
            for x in found["joiners"]
        )
    return False


def test_a_spare_takes_the_place_of_a_member_that_is_killed_and_the_killed_one_stands_by_then(
    zygote, tmp_path
):
    environment = {"FABRIC_REPLICAS": "1:2", "TINY_STEPS": "40"}
    with Job(zygote, tmp_path, environment=environment) as job:
        job.start("r2", FABRIC_SPARE="1")
        for replica in ("r0", "r1"):
            job.start(replica, f"forward@{HELD_STEP}=wait:{tmp_path / 'go-on'}")
        job.wait_for(lambda: stands_by(job, "r2"), "the spare to have the state")
        first = job.status()["roster"]
        assert first == ["r0", "r1"], "it came first, and is a spare all the same"
        job.kill("r1")
        job.wait_for(lambda: job.ended("r1") is not None, "the death")
        (tmp_path / "go-on").touch()
        job.wait_for(
            lambda: any(e["contributed"] for e in job.events("r2", "commit")), "the spare's part in a step"
        )
        assert job.events("r2", "epoch")[-1]["roster"] == ["r0", "r2"]
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
        assert job.starts == {"r0": 1, "r1": 2, "r2": 1}
        assert "r2 waits: the job has its 2 members" in (tmp_path / "r2.log").read_text()
        assert job.events("r0", "epoch")[-1]["roster"] == ["r0", "r2"], "the killed one is the spare now"
        check(job, 40)
