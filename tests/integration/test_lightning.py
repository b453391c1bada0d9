"""FabricStrategy with the real Lightning: killed and joined, compared with a calm job, and disabled."""

import json
import os
import signal
from pathlib import Path

import pytest
from job import Job
from test_failures import check, finals

STEPS = 30
KILLED_AT = 13


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {
        "TEST_TRAINER": "lightning_watched",
        "EXAMPLE_STEPS": str(STEPS),
        "EXAMPLE_PAUSE_S": "0.01",
        "EXAMPLE_OUTPUT": str(folder / "out"),
        "TINY_PATIENT_STEPS": "12",
        **more,
    }


def start(job: Job, replica: str, point: str = "", **more: str) -> None:
    number = job.starts.get(replica, 0)
    job.start(replica, point, TEST_NOTES=str(job.folder / f"{replica}.{number}.notes"), **more)


def notes(job: Job, replica: str, number: int) -> dict[int, dict]:
    """What process ``number`` of ``replica`` counted, by step."""
    lines = (job.folder / f"{replica}.{number}.notes").read_text().splitlines()
    return {note["step"]: note for note in map(json.loads, lines)}


def run_all(job: Job, **more: str) -> None:
    for i in range(job.replicas):
        start(job, f"r{i}", **more)
    job.finish(restart=False)
    assert set(job.codes.values()) == {0}, job.logs()


@pytest.mark.parametrize("trainer", ["lightning_watched", "lightning_manual"])
def test_a_trainer_survives_a_kill_and_a_join_with_the_curve_of_an_undisturbed_job(
    lightning_zygote, tmp_path, trainer
):
    given = environment(tmp_path, TEST_TRAINER=trainer)
    with Job(lightning_zygote, tmp_path / "job", environment=given) as job:
        start(job, "r0", f"ring@{KILLED_AT}=kill")
        start(job, "r1")
        start(job, "r2")
        job.wait_for(lambda: job.ended("r0") is not None, "r0 to kill itself")
        start(job, "r0")
        job.finish(restart=False)
        assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
        check(job, STEPS)
        assert len(set(finals(job).values())) == 1, "the replicas ended with different states"
        [joined] = job.events("r0", "joined")
    given = environment(tmp_path / "calm", TEST_TRAINER=trainer)
    with Job(lightning_zygote, tmp_path / "calm", environment=given) as calm:
        run_all(calm)
    curve, came_back, undisturbed = notes(job, "r1", 0), notes(job, "r0", 1), notes(calm, "r1", 0)
    assert list(curve) == list(range(1, STEPS + 1)) and curve == notes(job, "r2", 0)
    assert came_back and max(came_back) == STEPS and joined["step"] + 1 in came_back
    assert came_back == {step: curve[step] for step in came_back}, "all counters are right after a join"
    for step, note in undisturbed.items():
        counts = ("epoch", "batch", "total", "lr")
        assert [note[x] for x in counts] == [curve[step][x] for x in counts]
        assert abs(note["weights"] - curve[step]["weights"]) < 1e-3  # sums in another order after the death
    saved = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert saved == [f"step={n}.ckpt" for n in (10, 20, 30)], "one replica has written each checkpoint"


def test_a_trainer_leaves_between_two_steps_after_sigterm_and_the_other_ends_the_job(
    lightning_zygote, tmp_path
):
    # r0 does not come back, so r1 waits for it at no step.
    given = environment(tmp_path, TINY_PATIENT_STEPS="0")
    with Job(lightning_zygote, tmp_path / "job", replicas=2, environment=given) as job:
        start(job, "r0")
        start(job, "r1")
        job.wait_for(lambda: any(e["step"] >= 3 for e in job.events("r0", "commit")), "step 3")
        os.kill(job.pids["r0"], signal.SIGTERM)
        job.wait_for(lambda: job.ended("r0") is not None and job.ended("r1") is not None, "both ends")
        assert (job.ended("r0"), job.ended("r1")) == (75, 0), job.logs()
        assert max(notes(job, "r1", 0)) == STEPS


def test_disabled_the_strategy_trains_as_lightning_alone(lightning_zygote, tmp_path):
    ends = []
    for name, more in (("disabled", {"FABRIC_DISABLE": "1"}), ("alone", {"TEST_WITHOUT_FABRIC": "1"})):
        folder = tmp_path / name
        with Job(lightning_zygote, folder, replicas=1, environment=environment(folder, **more)) as job:
            run_all(job)
        ends.append(notes(job, "r0", 0))
    assert ends[0] == ends[1] and list(ends[0]) == list(range(1, STEPS + 1))


def test_a_trainer_that_stops_alone_ends_the_job_and_the_other_says_why_in_the_words_of_lightning(
    lightning_zygote, tmp_path
):
    with Job(lightning_zygote, tmp_path / "job", replicas=2, environment=environment(tmp_path)) as job:
        start(job, "r0")
        start(job, "r1", TEST_STOP_AT="3")
        job.finish(restart=False)
        assert job.codes == {"r0": 1, "r1": 0}, job.logs()
        [sentence] = [line for line in job.said("r0").splitlines() if "r1 finished at step 3" in line]
        assert "this Trainer has more steps to do: let Trainer.should_stop follow a figure that" in sentence
        assert "session" not in sentence and "Traceback" not in job.said("r0"), job.said("r0")
        assert list(notes(job, "r0", 0)) == [1, 2, 3] and notes(job, "r0", 0) == notes(job, "r1", 0)
        assert not job.told("aborted") and not job.recoveries() and job.status()["complete"]
