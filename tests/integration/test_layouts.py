"""A job that is killed and started again in another layout of ranks goes on without help: from the old
checkpoint servers' memory where they live, else from durable storage. The job's losses equal those of one
process that trains alone.
"""

import os
import signal
import urllib.error
from contextlib import contextmanager
from pathlib import Path

import pytest
from alone import losses_alone
from layout_trainer import GLOBAL_BATCH, build
from long_runs import first_here
from rank_job import RankJob

from fabric.ckpt_server.durable.reader import list_checkpoints
from fabric.ckpt_server.durable.storage import Storage

STEPS, STOP = 14, 8


def recoverable(job: RankJob) -> int:
    """Return the step of the newest state in memory, as the lighthouse says; -1 before the first state."""
    try:
        found = job.status()["recoverable"]
    except urllib.error.HTTPError as error:
        assert error.code == 404, error  # the lighthouse does not know the job yet
        return -1
    return -1 if found is None else found["step"]


@contextmanager
def killed(zygote, folder: Path, layout: str, ranks: int, replicas: int, **environment: str):
    """A job whose trainers were all killed at step STOP, and whose checkpoint servers live."""
    common = {
        "TEST_TRAINER": "layout_trainer",
        "TINY_STEPS": str(STEPS),
        "FABRIC_SNAPSHOT_EVERY": "3",
        "SHARDED": layout,
        **environment,
    }
    with RankJob(zygote, folder, replicas=replicas, ranks=ranks, environment=common) as job:
        for i in range(replicas):
            job.start(f"r{i}", f"optimizer@{STOP}=wait:{folder / 'never'}")
        storage = (
            Storage(environment["FABRIC_DURABLE"]).at("test") if "FABRIC_DURABLE" in environment else None
        )

        def there() -> bool:
            assert all(job.ended(name) is None for name in job.pids), job.logs()
            if storage is None:
                return recoverable(job) == 6
            return [c.state.step for c in list_checkpoints(storage, "test").complete] == [6]

        job.wait_for(there, "the state of step 6, in memory or storage", 120)
        for pid in job.pids.values():
            os.kill(pid, signal.SIGKILL)
        job.wait_for(lambda: all(job.has_ended(f"r{i}") for i in range(replicas)), "the trainers' end")
        job.pids.clear()
        yield job


def start_again(job: RankJob, layout: str, ranks: int, **environment: str) -> None:
    job.ranks = ranks
    job.environment |= {"SHARDED": layout, **environment}
    for i in range(job.replicas):
        job.start(f"r{i}")
    job.finish(deadline_s=120)


def check(job: RankJob, scheme: str) -> None:
    """Check that all ranks took their slices of step 6 from these sources, and trained on as one process
    would.
    """
    assert set(job.codes.values()) == {0}, job.logs()
    expected = losses_alone(build(), STEPS, GLOBAL_BATCH)
    for i in range(job.replicas):
        for rank in range(job.ranks):
            joined = job.rank_events(f"r{i}", rank, "join")
            assert [(e["step"], e["resharded"]) for e in joined] == [(6, True)], job.logs()
            assert all(url.startswith(scheme) for url in joined[0]["sources"]), joined
        said = (job.folder / f"r{i}.0.log").read_text().splitlines()
        losses = [(int(n), float(v)) for _, n, v in (x.split() for x in said if x.startswith("loss "))]
        assert [n for n, _ in losses[-(STEPS - 6) :]] == list(range(6, STEPS)), losses
        for number, value in losses:
            assert value == pytest.approx(expected[number], rel=1e-4), number
    ends = [
        [job.rank_events(f"r{i}", rank, "state")[-1]["digest"] for rank in range(job.ranks)]
        for i in range(job.replicas)
    ]
    assert all(end == ends[0] for end in ends)


@pytest.mark.parametrize(
    ("old", "new", "replicas"),
    first_here(
        "ckpt_server/test_reshard.py",
        [(("fsdp", 2), ("fsdp", 4), 1), (("tp", 2), ("plain", 1), 2), (("plain", 1), ("fsdp", 2), 1)],
    ),
    ids=lambda x: "".join(map(str, x)) if isinstance(x, tuple) else f"{x} replicas",
)
def test_a_job_in_another_layout_goes_on_from_memory(zygote, tmp_path, old, new, replicas):
    with killed(zygote, tmp_path, *old, replicas) as job:
        start_again(job, *new)
        check(job, "http://")


def test_a_job_in_another_layout_goes_on_from_durable_storage(zygote, tmp_path):
    """The new layout has as many ranks as the old one, but shards the model differently."""
    environment = {"FABRIC_DURABLE": str(tmp_path / "durable"), "FABRIC_DURABLE_EVERY": "6"}
    with killed(zygote, tmp_path / "job", "fsdp", 2, 1, **environment) as job:
        for pid in job.server_pids():
            os.kill(pid, signal.SIGKILL)
        job.wait_for(lambda: not job.server_pids(), "the servers' end")
        start_again(job, "tp", 2, FABRIC_DURABLE_EVERY="100")
        check(job, str(tmp_path / "durable"))
        job.wait_for(lambda: not job.server_pids(), "the servers' end, which let the writer finish")
        final = list_checkpoints(Storage(environment["FABRIC_DURABLE"]).at("test"), "test").complete[-1]
        assert (final.state.step, final.ranks) == (STEPS, 2)


def test_the_state_of_another_model_is_refused_by_the_tensors_name(zygote, tmp_path):
    with killed(zygote, tmp_path, "fsdp", 2, 1) as job:
        start_again(job, "tp", 2, LAYOUT_WIDTH="32")
        assert set(job.codes.values()) == {1}, job.logs()
        said = (tmp_path / "r0.0.log").read_text()
        assert "model.0.bias has shape (30,) in the snapshot and (32,) here: run the same model" in said, said
        assert recoverable(job) == 6, "what was there is still there"
