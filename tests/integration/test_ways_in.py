"""Every way in, by its example: a replica is killed and joins again, and all replicas end bitwise equal."""

import math
from pathlib import Path

import pytest
from job import Job
from long_runs import first_here
from test_failures import check, finals

from fabric.audit.journal import read_run
from fabric.drill.judge.drill_record import DrillRecord
from fabric.drill.judge.drill_verdict import judge_drill

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
KILLED_AT, STEPS = 6, 24


def run(zygote, folder: Path, trainer: str, steps: int = STEPS, **environment: str) -> Job:
    """Two replicas; r1 kills itself in mid-forward or mid-ring, is restarted, and both finish."""
    point = environment.pop("POINT", f"ring@{KILLED_AT}=kill")
    is_example = (EXAMPLES / f"{trainer}.py").exists()
    shared = {
        "TEST_TRAINER": "patient_example" if is_example else trainer,
        "TEST_EXAMPLE": trainer,
        "EXAMPLE_STEPS": str(steps),
        "TINY_STEPS": str(steps),
        "TINY_PATIENT_STEPS": str(steps - KILLED_AT - 1),
        **environment,
    }
    with Job(zygote, folder, replicas=2, environment=shared) as job:
        job.start_all({"r1": point})
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0}, job.logs()
        assert job.starts == {"r0": 1, "r1": 2}, job.logs()
        assert len(set(finals(job).values())) == 1, "the replicas ended with different states"
        joined = [e for e in job.events("r1", "commit") if e["contributed"] and e["step"] > KILLED_AT]
        assert joined, f"the killed replica never contributed again\n{job.logs()}"
        assert [e["step"] for e in job.events("r0", "commit")] == list(range(steps))
    return job


def said(job: Job, replica: str, word: str) -> dict[int, str]:
    """Return the ``step N: word VALUE`` lines of one replica by step, from its newest process."""
    lines = (job.folder / f"{replica}.log").read_text().splitlines()
    found = {}
    for line in lines:
        if line.startswith("step ") and f": {word} " in line:
            number, _, value = line.removeprefix("step ").partition(f": {word} ")
            found[int(number)] = value
    return found


@pytest.mark.parametrize(
    "example", ["own_loop", "ddp", "accumulation", "ema", "several_optimizers", "collectives"]
)
def test_an_example_survives_a_kill_and_a_join(zygote, tmp_path, example):
    job = run(zygote, tmp_path, example)
    check(job, STEPS)


def test_a_loop_that_others_own_survives_a_kill_and_a_join(zygote, tmp_path):
    # With ``exchange`` no replica inherits work: the job skips the dead replica's part.
    job = run(zygote, tmp_path, "exchange")
    commits = job.events("r0", "commit")
    assert all(e["skipped"] == [] for e in commits), "without a sampler no micro-batch has a sample to skip"
    check(job, STEPS)
    drilled = judge_drill(DrillRecord(read_run(job.folder), ended=math.inf))
    assert not drilled.broken
    # The kill is no fault of a drill here, and the times depend on the machine.
    assert {x.expectation for x in drilled.outcomes if not x.holds and "<=" not in x.expectation} == {
        "restarts==0"
    }


def test_all_clip_the_same_average(zygote, tmp_path):
    job = run(zygote, tmp_path, "clipping")
    check(job, STEPS)
    ours, theirs = said(job, "r0", "norm"), said(job, "r1", "norm")
    assert set(ours) == set(range(STEPS)) and len(set(ours.values())) > 20
    assert {step: ours[step] for step in theirs} == theirs


def test_an_overflow_on_one_replica_is_skipped_by_all_together(zygote, tmp_path):
    job = run(zygote, tmp_path, "mixed_precision", steps=40, EXAMPLE_OVERFLOW_AT="3")
    check(job, 40)
    ours, theirs = said(job, "r0", "scale"), said(job, "r1", "scale")
    # The overflow halves the scale, and 25 finite steps double it, also at the newcomer.
    assert (ours[2], ours[3], ours[27], ours[28]) == ("1024", "512", "512", "1024")
    assert {step: ours[step] for step in theirs} == theirs
    assert theirs[39] == "1024"


# --- the exchange and backward at once ----------------------------------------------------------------


ON_DEVICE = {"OVERLAP_DEVICE": "1"}


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("ddp", {}),
        ("averaged", {}),
        ("plain", ON_DEVICE),
        *(
            pytest.param(*case, marks=pytest.mark.long("integration/test_ways_in.py"))
            for case in (("plain", {}), ("ddp", ON_DEVICE))
        ),
    ],
)
def test_buckets_go_out_while_backward_runs_through_a_kill_and_a_join(zygote, tmp_path, how, where):
    job = run(zygote, tmp_path, "overlap_trainer", OVERLAP=how, **where)
    check(job, STEPS)
    for replica in ("r0", "r1"):
        lines = (job.folder / f"{replica}.log").read_text().splitlines()
        overlapped = [line for line in lines if line.startswith("overlapped")]
        assert len(overlapped) > 10 and set(overlapped) == {"overlapped True"}, replica


def computed(job: Job, step: int) -> int:
    lines = (job.folder / "r0.log").read_text().splitlines()
    return lines.count(f"computes {step}")


@pytest.mark.parametrize(("on_abort", "times"), [("retry", 12), ("recompute", 18)])
def test_a_retry_redoes_the_exchange_and_computes_again_only_what_was_not_retained(
    zygote, tmp_path, on_abort, times
):
    """12 micro-batches, half of them r0's own: with the gradients retained it adds those of the dead one,
    without it computes its own a second time too."""
    job = run(
        zygote,
        tmp_path,
        "overlap_trainer",
        OVERLAP="plain",
        FABRIC_ON_ABORT=on_abort,
    )
    check(job, STEPS)
    assert computed(job, KILLED_AT) == times
    assert computed(job, KILLED_AT - 1) == 6


@pytest.mark.parametrize("where", first_here("integration/test_ways_in.py", [{}, ON_DEVICE]))
def test_a_gradient_that_is_changed_on_its_way_is_exchanged_again_as_it_is(zygote, tmp_path, where):
    environment = {"TEST_TRAINER": "overlap_trainer", "OVERLAP": "changed", "TINY_STEPS": "20", **where}
    with Job(zygote, tmp_path, replicas=2, environment=environment) as job:
        job.start_all()
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0}, job.logs()
        assert len(set(finals(job).values())) == 1
        check(job, 20)
        (abort,) = job.events("r0", "abort")
        assert abort["step"] == 9 and "changed after the last backward" in abort["why"]
        lines = (job.folder / "r0.log").read_text().splitlines()
        assert "overlapped True" in lines[: lines.index("computes 9")]
        assert "overlapped True" not in lines[lines.index("computes 10") :]


def test_averaged_buffers_end_with_equal_bits_with_and_without_overlap(zygote, tmp_path):
    ends = {}
    for how in ("averaged", "after"):
        environment = {"TEST_TRAINER": "overlap_trainer", "OVERLAP": how, "TINY_STEPS": "8"}
        with Job(zygote, tmp_path / how, replicas=2, environment=environment) as job:
            job.start_all()
            job.finish()
            assert job.codes == {"r0": 0, "r1": 0}, job.logs()
            ends[how] = set(finals(job).values())
        overlapped = "overlapped True" in (job.folder / "r0.log").read_text()
        assert overlapped == (how == "averaged")
    assert ends["averaged"] == ends["after"] and len(ends["after"]) == 1


def test_examples_are_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 66, f"{path.name} is no short example any more"
