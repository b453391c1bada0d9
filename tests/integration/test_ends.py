"""How jobs of real processes end: without a lighthouse, with loops of unequal lengths, and beside a newcomer
whose loop counts its own steps."""

import json
import signal

from job import Job

from fabric.ckpt_server.durable.reader import list_checkpoints
from fabric.ckpt_server.durable.storage import Storage


def start(job: Job, replica: str, end: int, **more: str) -> None:
    saved = str(job.folder / f"{replica}.saved")
    job.start(replica, TEST_TRAINER="ending_trainer", END_STEP=str(end), END_SAVED=saved, **more)


def saved(job: Job, replica: str) -> dict | None:
    """Return the state that this replica's script saved after ``close``."""
    path = job.folder / f"{replica}.saved"
    return json.loads(path.read_text()) if path.exists() else None


def stands_at(job: Job, step: int, *replicas: str) -> bool:
    return all(any(e["step"] == step - 1 for e in job.events(r, "commit")) for r in replicas)


def test_a_job_ends_without_a_lighthouse_and_the_next_lighthouse_learns_of_the_end(zygote, tmp_path):
    environment = {"FABRIC_DURABLE": str(tmp_path / "durable")}
    with Job(zygote, tmp_path / "job", replicas=2, environment=environment) as job:
        gate = job.folder / "gate"
        for replica in ("r0", "r1"):
            start(job, replica, 8, END_GATE=str(gate), END_GATE_STEP="4")
        job.wait_for(lambda: stands_at(job, 4, "r0", "r1"), "both to stand before the gate")
        port = int(job.url.rpartition(":")[2])
        job.stop_lighthouse(signal.SIGKILL)
        gate.touch()
        job.finish(restart=False)
        assert job.codes == {"r0": 0, "r1": 0}, job.logs()
        assert saved(job, "r0") == saved(job, "r1") and saved(job, "r0")["step"] == 8
        assert "all members (r0, r1) have finished at step 8" in job.said("r0")
        storage = Storage(environment["FABRIC_DURABLE"]).at("test")
        job.wait_for(
            lambda: [c for c in list_checkpoints(storage, "test").complete if c.state.step == 8],
            "the final state in storage",
        )
        job.start_lighthouse(port)
        job.wait_for(lambda: job.status().get("complete"), "the job to be marked complete")
        assert [e["why"] for e in job.told("complete")] == ["finished at step 8"]
        job.codes.clear()
        start(job, "r0", 8)
        job.finish(restart=False)
        assert job.codes["r0"] == 0 and "the job is complete at step 8" in job.said("r0")


def test_a_loop_with_more_steps_than_another_stops_with_it_and_exits_1(zygote, tmp_path):
    with Job(zygote, tmp_path, replicas=3) as job:
        for replica, end in (("r0", 6), ("r1", 12), ("r2", 6)):
            start(job, replica, end)
        job.finish(restart=False)
        assert job.codes == {"r0": 0, "r1": 1, "r2": 0}, job.logs()
        assert saved(job, "r0") == saved(job, "r2") and saved(job, "r0")["step"] == 6
        assert saved(job, "r1") is None
        [sentence] = [line for line in job.said("r1").splitlines() if "more steps to do" in line]
        assert (
            "finished at step 6, and this loop has more steps to do: let it count session.committed_step"
            in sentence
        )
        assert max(e["step"] for e in job.events("r1", "commit")) == 5, "nothing is trained beyond the end"
        assert not job.told("evicting") and not job.told("aborted") and not job.recoveries()
        assert job.status()["complete"]


def test_a_joining_replica_whose_loop_ends_early_says_so_and_stops_no_member(zygote, tmp_path):
    with Job(zygote, tmp_path, replicas=3) as job:
        hurry = job.folder / "hurry"
        for replica in ("r0", "r1", "r2"):
            start(job, replica, 300, END_PACE_S="0.1", END_HURRY=str(hurry))
        job.wait_for(lambda: stands_at(job, 4, "r0", "r1", "r2"), "the first steps")
        job.kill("r1")
        job.wait_for(lambda: job.ended("r1") is not None, "its end")
        start(job, "r1", 0, END_OWN="1")
        job.wait_for(lambda: job.ended("r1") is not None, "the newcomer's end")
        hurry.touch()
        job.finish(restart=False)
        assert job.codes == {"r0": 0, "r1": 1, "r2": 0}, job.logs()
        assert saved(job, "r0") == saved(job, "r2") and saved(job, "r0")["step"] == 300
        assert saved(job, "r1") is None
        assert "let it count session.committed_step" in job.said("r1")
