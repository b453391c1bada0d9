"""The control store is replaced by an empty one or an older copy while a job runs: the trainers go on in
their processes.
"""

import shutil
import signal
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest
from etcd_process import require_etcd, running_etcd
from job import Job
from long_runs import first_here
from test_failures import PATIENT, finals, finish_and_check

from fabric.audit.journal import read_run
from fabric.audit.summary import judge

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


def newest_epoch(job: Job) -> int:
    """The newest epoch in which r0 has committed a step."""
    return max((e["epoch"] for e in job.events("r0", "commit")), default=0)


def run_past_a_copy(job: Job, save: Callable[[], None], restore: Callable[[], None]) -> None:
    """Save a copy of the store in the first epoch, let two epochs pass, and restore the copy. Kill a member
    in the epochs that the copy lacks, and one more after the restore. r0 waits in the middle of the job until
    the store is restored, so that the steps do not end before.
    """
    gate = job.folder / "gate"
    job.start_all({"r0": f"forward@{LONG * 6 // 10}=wait:{gate}"})
    job.wait_for(lambda: newest_epoch(job) == 1, "the first epoch")
    save()
    job.kill("r2")
    job.wait_for(lambda: newest_epoch(job) == 2, "an epoch without r2")
    job.start("r2")
    job.wait_for(lambda: newest_epoch(job) >= 3, "an epoch with r2")
    known = newest_epoch(job)
    restore()
    job.kill("r1")
    gate.touch()
    job.wait_for(lambda: newest_epoch(job) > known, "steps after the next death")
    finish_and_check(job, LONG)
    assert job.starts == {"r0": 1, "r1": 2, "r2": 2}
    assert [x for x in job.told("epoch") if "restored from an older copy" in x["why"]], job.logs()


# Few and slow steps: a lighthouse starts again while they go on.
LONG = 100
LONG_JOB = {**PATIENT, "TINY_STEPS": str(LONG), "TINY_STEP_S": "0.05"}


@pytest.mark.parametrize(
    "moment", first_here("sim/test_store_worlds.py", ["before the lighthouse leads", "after the first epoch"])
)
def test_steps_go_on_past_a_death_when_the_files_of_sqlite_are_put_back(zygote, tmp_path, moment):
    copy = tmp_path / "copy"
    with Job(zygote, tmp_path / "job", environment=LONG_JOB) as job:

        def put_back() -> None:
            port = int(job.url.rsplit(":", 1)[1])
            job.stop_lighthouse()
            move_files(copy, job.folder)
            job.start_lighthouse(port)
            if moment == "after the first epoch":
                job.wait_for(lambda: has_begun(job), "the epoch above the copy's")

        run_past_a_copy(job, lambda: move_files(job.folder, copy), put_back)


def move_files(source: Path, target: Path) -> None:
    """Copy the files of a SQLite store, in place of those that are there."""
    target.mkdir(exist_ok=True)
    for old in target.glob("lighthouse.db*"):
        old.unlink()
    for path in source.glob("lighthouse.db*"):
        shutil.copy(path, target)


@pytest.mark.etcd
@pytest.mark.parametrize("leader", first_here("sim/test_store_worlds.py", ["running", "stopped"]))
def test_steps_go_on_past_a_death_when_a_snapshot_of_etcd_is_restored(zygote, tmp_path, leader):
    require_etcd("etcdctl")
    snapshot = tmp_path / "snapshot"
    with running_etcd(tmp_path) as etcd:
        environment = {**LONG_JOB, "TEST_STORE": etcd.url}
        with Job(zygote, tmp_path / "job", environment=environment) as job:

            def restore() -> None:
                port = int(job.url.rsplit(":", 1)[1])
                if leader == "stopped":
                    job.stop_lighthouse()
                etcd.restore(snapshot)
                if leader == "stopped":
                    job.start_lighthouse(port)

            run_past_a_copy(job, lambda: etcd.save(snapshot), restore)
