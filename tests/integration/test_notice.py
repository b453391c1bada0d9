"""SIGTERM is a notice: a replica leaves at a step boundary. If all must go, one of them saves the state."""

import os
import signal

import pytest
from forked_processes import start_supervisor
from job import EXAMPLES, HERE, Job
from long_runs import first_here
from rank_job import RankJob

from fabric.ckpt_server.durable.reader import list_checkpoints
from fabric.ckpt_server.durable.storage import Storage

MANY = 100_000  # steps that no test waits for


@pytest.fixture
def job(zygote, tmp_path):
    environment = {
        "FABRIC_DURABLE": str(tmp_path / "durable"),
        "FABRIC_DURABLE_EVERY": "1h",
        "TINY_STEPS": str(MANY),
        "TINY_STEP_S": "0.1",
    }
    with Job(zygote, tmp_path / "job", environment=environment) as started:
        yield started


def saved(job):
    """Return the complete durable checkpoints."""
    return [
        c.state
        for c in list_checkpoints(Storage(job.environment["FABRIC_DURABLE"]).at("test"), "test").complete
    ]


def committed(job):
    """Return the newest step that any replica has committed: the state after it has the next number."""
    return max(e["step"] + 1 for r in job.pids for e in job.events(r, "commit"))


def train_some(job, step=5, replicas=()):
    """Wait until each of these replicas, or each of all, has committed this step."""

    def trained():
        return all(any(e["step"] >= step for e in job.events(r, "commit")) for r in replicas or job.pids)

    job.wait_for(trained, f"step {step}")


def give_notice(job, replicas, everybody=False):
    """Send SIGTERM to these trainers; ``everybody``: to each process of the job but the lighthouse, twice."""
    for pid in [*(job.pids[r] for r in replicas), *(job.server_pids() if everybody else ())]:
        os.kill(pid, signal.SIGTERM)
    for replica in replicas if everybody else ():
        os.kill(job.pids[replica], signal.SIGTERM)


def await_ends(job, replicas):
    job.wait_for(lambda: all(job.ended(r) is not None for r in replicas), f"the end of {replicas}")
    return [job.ended(r) for r in replicas]


# That a notice to the trainers alone saves the state is also seen where replicas have two ranks.
@pytest.mark.parametrize("everybody", first_here("integration/test_notice.py", [True, False]))
def test_after_sigterm_to_all_no_committed_step_is_lost(job, everybody):
    job.start_all()
    train_some(job)
    give_notice(job, list(job.pids), everybody)
    assert await_ends(job, list(job.pids)) == [75, 75, 75], job.logs()
    (newest,) = saved(job)
    assert newest.step == committed(job), job.logs()
    for pid in job.server_pids():
        os.kill(pid, signal.SIGKILL)
    job.wait_for(lambda: not job.server_pids(), "the loss of all memory")
    job.start_all()
    job.wait_for(lambda: all(job.events(r, "join") for r in job.pids), "the state from storage")
    assert [job.events(r, "join")[-1]["step"] for r in job.pids] == [newest.step] * 3


@pytest.mark.parametrize("ranks", first_here("integration/test_notice.py", [(1,), ((0, 1),)]))
def test_replicas_of_two_ranks_save_their_state_whichever_rank_the_platform_signals(zygote, tmp_path, ranks):
    environment = {
        "FABRIC_DURABLE": str(tmp_path / "durable"),
        "FABRIC_DURABLE_EVERY": "1h",
        "SHARDED": "fsdp2",
        "TINY_STEPS": str(MANY),
        "TINY_STEP_S": "0.1",
    }
    with RankJob(zygote, tmp_path / "job", replicas=2, ranks=2, environment=environment) as job:
        job.start_all()
        train_some(job, replicas=list(job.groups))
        for replica in job.groups:
            for rank in ranks:
                os.kill(job.pids[f"{replica}.{rank}"], signal.SIGTERM)
        assert await_ends(job, list(job.pids)) == [75] * 4, job.logs()
        (newest,) = saved(job)
        assert newest.step == max(e["step"] + 1 for r in job.groups for e in job.events(r, "commit"))


def test_a_replica_with_notice_leaves_alone_and_the_last_one_saves_the_state(job):
    job.start_all()
    train_some(job)
    give_notice(job, ["r0", "r1"])
    assert await_ends(job, ["r0", "r1"]) == [75, 75], job.logs()
    assert not saved(job)
    before = committed(job)
    train_some(job, before + 3, ["r2"])
    assert job.ended("r2") is None
    assert {e["generation"] for e in job.events("r2", "commit")} == {1}
    give_notice(job, ["r2"])
    assert await_ends(job, ["r2"]) == [75], job.logs()
    assert saved(job)[-1].step == committed(job)


def test_where_storage_is_too_slow_the_checkpoint_before_stays_whole(job):
    job.environment |= {"FABRIC_DURABLE_EVERY": "10", "FABRIC_LAUNCH_STOP_S": "8"}
    gate = job.folder / "gate"
    # The notice comes in step 14 or before, and a step or two may follow before the leader's answer.
    points = ",".join(f"durable-marker@{n}=wait:{job.folder}/never" for n in range(11, 20))
    for replica in ("r0", "r1", "r2"):
        job.start(replica, f"optimizer@14=wait:{gate},{points}")
    job.wait_for(lambda: any(x.step == 10 for x in saved(job)), "a durable checkpoint")
    give_notice(job, list(job.pids))
    gate.touch()
    codes = await_ends(job, list(job.pids))
    # A member whose notice the leader heard before those of others may be drained before them.
    killed = [replica for replica, code in zip(job.pids, codes, strict=True) if code == 143]
    assert killed and set(codes) <= {75, 143}, job.logs()
    assert saved(job)[-1].step == 10
    for replica in killed:
        said = (job.folder / f"{replica}.log").read_text()
        assert "the durable checkpoint before it stays whole" in said


def test_where_storage_is_away_at_the_notice_the_state_is_saved_once_it_is_back(job, tmp_path):
    job.environment |= {"FABRIC_LAUNCH_STOP_S": "170"}  # each try starts a writer, which imports torch
    job.start_all()
    train_some(job)
    (tmp_path / "durable").rename(tmp_path / "kept")
    (tmp_path / "durable").symlink_to(tmp_path / "durable")  # each access fails
    give_notice(job, list(job.pids))
    logs = [job.folder / f"run/{replica}/ckpt-server.log" for replica in job.pids]  # any of them may write
    failed = "the durable checkpoint of step"
    job.wait_for(lambda: any(failed in log.read_text() for log in logs), "a failed try")
    (tmp_path / "durable").unlink()
    (tmp_path / "kept").rename(tmp_path / "durable")
    assert await_ends(job, list(job.pids)) == [75, 75, 75], job.logs()
    assert [state.step for state in saved(job)] == [committed(job)], job.logs()


def test_launchers_pass_the_notice_on_and_wait_for_the_saved_state(job):
    job.pids = dict.fromkeys(("r0", "r1", "r2"), 0)
    launchers = []
    for replica in job.pids:
        environment = os.environ | job.trainer_environment(replica, PYTHONPATH=f"{HERE}:{EXAMPLES}")
        with (job.folder / f"{replica}.log").open("wb") as log:
            command = ("launch", str(HERE / "tiny_trainer.py"))
            launchers.append(start_supervisor(*command, log=log, environment=environment))
    try:
        train_some(job)
        for launcher in launchers:
            launcher.terminate()
        assert [launcher.wait(60) for launcher in launchers] == [143, 143, 143], job.logs()
        assert saved(job)[-1].step == committed(job), job.logs()
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
        job.pids = {}
