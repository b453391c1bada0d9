"""The control store is replaced by an empty one while a job runs: the trainers go on in their processes."""

import signal
import urllib.error

from job import Job
from test_failures import finals

from fabric.audit.journal import read_run
from fabric.audit.verify import judge

EVERY, STEPS = 4, 30


def has_begun(job: Job) -> bool:
    """Whether this lighthouse has written an epoch of the job, which it knows from its sessions alone."""
    try:
        return bool(job.told("epoch"))
    except urllib.error.HTTPError:
        return False


def test_a_job_goes_on_from_memory_when_its_store_is_replaced_by_an_empty_one(zygote, tmp_path):
    environment = {"FABRIC_SNAPSHOT_EVERY": str(EVERY), "TINY_STEPS": str(STEPS)}
    gate = tmp_path / "gate"
    with Job(zygote, tmp_path, environment=environment) as job:
        job.start_all({"r0": f"forward@15=wait:{gate}"})
        awaited = gate.with_name("gate.awaited")
        job.wait_for(awaited.exists, "step 15")
        port = int(job.url.rsplit(":", 1)[1])
        job.stop_lighthouse(signal.SIGKILL)
        for file in tmp_path.glob("lighthouse.db*"):
            file.unlink()
        job.start_lighthouse(port)
        job.wait_for(lambda: has_begun(job), "the first epoch in the empty store")
        gate.touch()
        job.finish()

        assert set(job.codes.values()) == {0}, job.logs()
        assert job.starts == {"r0": 1, "r1": 1, "r2": 1}, "nobody was started again"
        assert len(set(finals(job).values())) == 1
        commits = [e for r in job.pids for e in job.events(r, "commit") if e["generation"] == 2]
        base = min(e["step"] for e in commits)
        assert base in (8, 12), "it began from the newest snapshot that memory held"
        assert {e["step"] for e in commits} == set(range(base, STEPS))
        assert min(e["epoch"] for e in commits) == 2, "epochs only grow in the life of a process"
        verdict = judge(read_run(job.folder))
        assert not verdict.broken, verdict.broken[:5]
