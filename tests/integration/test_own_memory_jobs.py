"""A killed replica begins from its own host's memory, while the others train on and stand steps ahead."""

from pathlib import Path

import pytest
from job import Job

from fabric.audit.journal import read_run
from fabric.audit.summary import judge

KILLED_AT = 6


@pytest.mark.parametrize(("ahead", "begins"), [(2, True), (5, False)])
def test_a_killed_replica_begins_from_its_own_hosts_memory_unless_too_many_steps_are_missing(
    zygote, tmp_path, ahead, begins
):
    """r0 stands in a step until r1 joins, or until r1 has asked for a newer state."""
    held, gate = tmp_path / "held", tmp_path / "gate"
    environment = {"TINY_STEPS": "24", "FABRIC_SNAPSHOT_EVERY": str(KILLED_AT)}
    with Job(zygote, tmp_path, replicas=2, environment=environment) as job:
        job.start("r0", f"forward@{KILLED_AT + ahead}=wait:{gate}", TINY_PATIENT_STEPS="15")
        job.start("r1", f"before-ring@{KILLED_AT}=wait:{held}")
        job.wait_for(Path(f"{held}.awaited").exists, f"step {KILLED_AT} of r1")
        job.wait_for(lambda: len(holders(job)) == 2, f"snapshots of step {KILLED_AT}")
        job.kill("r1")
        job.wait_for(Path(f"{gate}.awaited").exists, "r0 to stand in its step")
        job.start("r1")
        kind, why = ("epoch", "r1 joins") if begins else ("needs state", "")
        job.wait_for(lambda: any(why in e["why"] for e in job.told(kind)), "r1 to join, or to ask")
        gate.touch()
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0}, job.logs()
        (served,), (join,) = job.told("serves"), job.events("r1", "join")
        if begins:
            assert served["why"] == f"step {KILLED_AT} from its own hosts' memory, and {ahead} gradients"
            assert (join["step"], list(join["sources"])) == (KILLED_AT, ["own memory"])
            assert job.events("r1", "joined")[-1]["replayed"] >= ahead
        else:
            assert join["step"] > KILLED_AT + ahead and list(join["sources"]) != ["own memory"], join
        verdict = judge(read_run(job.folder))
        assert not verdict.broken, "\n".join(verdict.broken[:5])
        assert (verdict.summary.steps, verdict.summary.steps_lost) == (24, 0)


def holders(job: Job) -> list[str]:
    """Return the replicas whose servers hold the snapshot of the step in which r1 dies."""
    return [
        x["replica"]
        for x in job.status()["checkpoint_servers"]
        if any(snapshot["step"] == KILLED_AT for snapshot in x["snapshots"])
    ]
