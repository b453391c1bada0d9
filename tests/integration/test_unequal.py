"""Replicas of unequal layouts train together: FSDP2 or tensor parallel over two ranks, beside one process.

The losses equal those of one process that trains alone, and all layouts end in one state. Averaged buffers
are part of this state.
"""

import json
import os
import signal

import pytest
import torch
from alone import losses_alone
from layout_trainer import GLOBAL_BATCH, MOMENTUM, build, with_sometimes
from long_runs import first_here
from rank_job import RankJob
from sharded_trainer import MICRO_BATCH, example
from test_layouts import recoverable

from fabric.audit.journal import read_run
from fabric.audit.summary import judge
from fabric.ckpt_server.durable.reader import list_checkpoints
from fabric.ckpt_server.durable.storage import Storage
from fabric.client.data.sample_plan import SamplePlan

STEPS = 24


def losses(job: RankJob, replica: str) -> list[float]:
    lines = (job.folder / f"{replica}.0.log").read_text().splitlines()
    return [float(line.split()[2]) for line in lines if line.startswith("loss ")]


def unequal(zygote, folder, layouts: dict[str, tuple[str, int]], **environment: str) -> RankJob:
    common = {
        "TEST_TRAINER": "layout_trainer",
        "TINY_STEPS": str(STEPS),
        "TINY_PATIENT_STEPS": "16",
        "FABRIC_UNEQUAL": "1",
        "LAYOUT_BUCKET_BYTES": "200",
        **environment,
    }
    job = RankJob(zygote, folder, replicas=len(layouts), environment=common)
    job.layouts = {replica: layout for replica, (layout, _) in layouts.items()}
    job.sizes = {replica: ranks for replica, (_, ranks) in layouts.items()}
    return job


def check(job: RankJob, expected: list[float] | None = None) -> None:
    """All have ended in one state, with the losses of one process alone, and kept every promise."""
    expected = losses_alone(build(), STEPS, GLOBAL_BATCH) if expected is None else expected
    assert set(job.codes.values()) == {0}, job.logs()
    assert len({job.states(replica)[STEPS] for replica in job.sizes}) == 1, job.logs()
    survivor = next(replica for replica, starts in job.starts.items() if starts == 1)
    assert losses(job, survivor) == pytest.approx(expected, rel=1e-4)
    verdict = judge(read_run(job.folder))
    assert not verdict.broken, "\n".join(verdict.broken[:10])
    assert (verdict.summary.steps, verdict.summary.steps_lost) == (STEPS, 0)


def contributed(job: RankJob, replica: str, after: int) -> bool:
    return any(e["contributed"] and e["step"] > after for e in job.rank_events(replica, 0, "commit"))


@pytest.mark.parametrize(
    ("layouts", "victim", "point", "rank"),
    first_here(
        "sim/test_unequal_worlds.py",
        [
            ({"r0": ("plain", 1), "r1": ("fsdp", 2)}, "r1", "ring@6=kill", 1),
            ({"r0": ("plain", 1), "r1": ("fsdp", 2)}, "r0", "optimizer@6=kill", 0),
            ({"r0": ("tp", 2), "r1": ("plain", 1)}, "r0", "after-barrier@6=kill", 1),
            ({"r0": ("fsdp", 2), "r1": ("tp", 2)}, "r1", "forward@6=kill", 0),
            ({"r0": ("2+2", 2), "r1": ("3+1", 2)}, "r1", "ring@6=kill", 1),
            ({"r0": ("2+2", 2), "r1": ("plain", 1)}, "r1", "optimizer@6=kill", 0),
        ],
    ),
)
def test_a_killed_replica_catches_up_from_another_layout(zygote, tmp_path, layouts, victim, point, rank):
    with unequal(zygote, tmp_path, layouts) as job:
        for replica in layouts:
            job.start(replica, point if replica == victim else "", rank=rank if replica == victim else 0)
        job.finish(deadline_s=150)
        assert job.starts == {replica: 1 + (replica == victim) for replica in layouts}, job.logs()
        assert job.rank_events(victim, 0, "join")[-1]["resharded"], job.logs()
        assert all(contributed(job, replica, 8) for replica in layouts), job.logs()
        check(job)


@pytest.mark.parametrize(
    ("layouts", "victim", "point", "rank"),
    first_here(
        "sim/test_unequal_worlds.py",
        [
            ({"r0": ("plain", 1), "r1": ("fsdp", 2)}, "r1", "ring@6=kill", 1),
            ({"r0": ("plain", 1), "r1": ("fsdp", 2)}, "r0", "optimizer@7=kill", 0),
            ({"r0": ("tp", 2), "r1": ("plain", 1)}, "r0", "after-barrier@6=kill", 1),
        ],
    ),
)
def test_a_parameter_unused_in_half_of_the_steps_is_updated_in_the_others_alone(
    zygote, tmp_path, layouts, victim, point, rank
):
    """Its momentum and its decay stand still at every rank, as in one process without fabric."""
    alone = with_sometimes(build())
    expected = losses_alone(
        alone, STEPS, GLOBAL_BATCH, begin=lambda step: setattr(alone.sometimes, "step", step)
    )
    with unequal(zygote, tmp_path, layouts, LAYOUT_SOMETIMES="1") as job:
        for replica in layouts:
            job.start(replica, point if replica == victim else "", rank=rank if replica == victim else 0)
        job.finish(deadline_s=150)
        check(job, expected)
        for replica, (_, ranks) in layouts.items():
            for k in range(ranks):
                lines = (job.folder / f"{replica}.{k}.log").read_text().splitlines()
                assert [x for x in lines if x.startswith("updates ")] == [f"updates {STEPS // 2}"] * 2


def averaged(job: RankJob, replica: str) -> torch.Tensor:
    """The running mean of the input after the last step, from the journal's contributions alone.

    Each replica runs through its micro-batches from the mean before the step. The mean after the step is the
    average over the replicas, by their samples. It does not depend on the replicas' layouts.
    """
    data, plan = example("fsdp2").samples(64), SamplePlan(64, GLOBAL_BATCH, MICRO_BATCH, 3)
    mean = torch.zeros(16)
    for commit in sorted(job.rank_events(replica, 0, "commit"), key=lambda e: e["step"]):
        total = torch.zeros(16)
        for micro_batches in commit["contributions"].values():
            own = mean.clone()
            for micro_batch in micro_batches:
                rows = torch.stack([data[i][0] for i in plan.samples(commit["step"], micro_batch)])
                own.lerp_(rows.mean(0), MOMENTUM)
            total += own * len(micro_batches)
        mean = total / plan.micro_batches
    return mean


def buffers(job: RankJob, replica: str, rank: int) -> dict[str, list[float]]:
    lines = [x.split(" ", 2) for x in (job.folder / f"{replica}.{rank}.log").read_text().splitlines()]
    return {x[1]: json.loads(x[2]) for x in lines if x[0] == "buffer"}


@pytest.mark.parametrize(
    ("layouts", "victim", "point", "rank"),
    first_here(
        "sim/test_unequal_worlds.py",
        [
            ({"r0": ("plain", 1), "r1": ("fsdp", 2)}, "r1", "ring@6=kill", 1),
            ({"r0": ("tp", 2), "r1": ("plain", 1)}, "r1", "before-barrier@6=kill", 0),
            ({"r0": ("plain", 1), "r1": ("plain", 1)}, "r1", "forward@6=kill", 0),
        ],
    ),
)
def test_averaged_buffers_are_equal_at_every_rank_of_every_layout(
    zygote, tmp_path, layouts, victim, point, rank
):
    survives_a_kill_with_averaged_buffers(zygote, tmp_path, layouts, victim, point, rank)


@pytest.mark.parametrize(
    ("layouts", "victim", "point", "rank"),
    first_here(
        "sim/test_unequal_worlds.py",
        [
            ({"r0": ("plain", 1), "r1": ("fsdp", 2)}, "r1", "ring@6=kill", 1),
            ({"r0": ("tp", 2), "r1": ("plain", 1)}, "r1", "optimizer@6=kill", 0),
        ],
    ),
)
def test_lanes_of_gradients_on_a_device(zygote, tmp_path, layouts, victim, point, rank):
    trainer = {"TEST_TRAINER": "device_layout_trainer"}
    job = survives_a_kill_with_averaged_buffers(zygote, tmp_path, layouts, victim, point, rank, **trainer)
    processes = sum(job.starts[replica] * ranks for replica, (_, ranks) in layouts.items())
    assert job.logs().count("gradients on SimulatedDevice") == processes, job.logs()


def survives_a_kill_with_averaged_buffers(
    zygote, tmp_path, layouts, victim, point, rank, **environment
) -> RankJob:
    with unequal(zygote, tmp_path, layouts, LAYOUT_BUFFERS="1", **environment) as job:
        for replica in layouts:
            job.start(replica, point if replica == victim else "", rank=rank if replica == victim else 0)
        job.finish(deadline_s=150)
        assert job.starts == {replica: 1 + (replica == victim) for replica in layouts}, job.logs()
        assert all(contributed(job, replica, 8) for replica in layouts), job.logs()
        check(job)
        first, *others = [buffers(job, r, k) for r, (_, ranks) in layouts.items() for k in range(ranks)]
        assert all(other == first for other in others), job.logs()
        assert first["statistics.num_batches_tracked"] == STEPS * GLOBAL_BATCH // MICRO_BATCH
        survivor = next(replica for replica in layouts if replica != victim)
        expected = averaged(job, survivor)
        assert expected.abs().max() > 0.01
        assert first["statistics.running_mean"] == pytest.approx(expected.tolist(), abs=1e-6)
        return job


def test_a_replica_that_lost_a_rank_comes_back_as_one_process(zygote, tmp_path):
    with unequal(zygote, tmp_path, {"r0": ("fsdp", 2), "r1": ("fsdp", 2)}) as job:
        job.start("r0")
        job.start("r1", "ring@6=kill", rank=1)
        job.layouts["r1"], job.sizes["r1"] = "plain", 1
        job.finish(deadline_s=150)
        assert job.starts == {"r0": 1, "r1": 2}, job.logs()
        assert contributed(job, "r1", 8), job.logs()
        check(job)


@pytest.mark.parametrize(
    ("source", "old", "new"),
    first_here(
        "sim/test_unequal_worlds.py",
        [
            ("memory", {"r0": ("plain", 1), "r1": ("fsdp", 2)}, {"r0": ("tp", 2), "r1": ("plain", 1)}),
            ("memory", {"r0": ("3+1", 2), "r1": ("plain", 1)}, {"r0": ("fsdp", 2), "r1": ("2+2", 2)}),
            ("storage", {"r0": ("2+2", 2), "r1": ("fsdp", 2)}, {"r0": ("plain", 1), "r1": ("3+1", 2)}),
        ],
    ),
)
def test_a_whole_job_goes_on_in_other_layouts(zygote, tmp_path, source, old, new):
    environment = {"FABRIC_SNAPSHOT_EVERY": "3", "TINY_PATIENT_STEPS": "1"}
    if source == "storage":
        environment |= {"FABRIC_DURABLE": str(tmp_path / "durable"), "FABRIC_DURABLE_EVERY": "6"}
    with unequal(zygote, tmp_path / "job", old, **environment) as job:
        for replica in old:
            job.start(replica, f"optimizer@8=wait:{tmp_path / 'never'}")
        stored = Storage(environment.get("FABRIC_DURABLE", "")).at("test")
        kept = {"memory": lambda: recoverable(job) == 6, "storage": lambda: steps_of(stored) == [6]}[source]
        job.wait_for(kept, "the state of step 6", 120)
        for pid in job.pids.values():
            os.kill(pid, signal.SIGKILL)
        job.wait_for(lambda: all(job.has_ended(x) for x in old), "the trainers' end")
        if source == "storage":
            for pid in job.server_pids():
                os.kill(pid, signal.SIGKILL)
            job.wait_for(lambda: not job.server_pids(), "the servers' end")
        job.pids.clear()
        job.layouts = {replica: layout for replica, (layout, _) in new.items()}
        job.sizes = {replica: ranks for replica, (_, ranks) in new.items()}
        for replica in new:
            job.start(replica)
        job.finish(deadline_s=120)
        assert set(job.codes.values()) == {0}, job.logs()
        # On a crowded host a replica may be left out for a moment, and joins once more.
        assert job.rank_events("r0", 0, "join")[0]["step"] == 6, job.logs()
        assert job.states("r0")[STEPS] == job.states("r1")[STEPS], job.logs()
        alone = losses_alone(build(), STEPS, GLOBAL_BATCH)
        lines = [line.split() for line in (job.folder / "r1.0.log").read_text().splitlines()]
        by_step = {int(words[1]): float(words[2]) for words in lines if words[:1] == ["loss"]}
        assert STEPS - 1 in by_step, job.logs()
        assert by_step == pytest.approx({step: alone[step] for step in by_step}, rel=1e-4)


def steps_of(storage: Storage) -> list[int]:
    return [x.state.step for x in list_checkpoints(storage, "test").complete]
