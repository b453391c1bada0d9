"""FabricAccelerator with the real accelerate: killed and joined, resumed, and disabled."""

import json
from pathlib import Path

import pytest
from job import DEADLINE_S, Job
from test_failures import check, finals

STEPS = 30  # three passes of ten steps
KILLED_AT = 13
# For the job that the killed replica must find when it comes back, whenever that is.
PATIENT = {"TEST_PATIENT": "1", "TINY_PATIENT_STEPS": "15"}


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {
        "TEST_TRAINER": "watched_trainer",
        "TEST_EXAMPLE": "accelerate_loop",
        "EXAMPLE_STEPS": str(STEPS),
        "EXAMPLE_PAUSE_S": "0.05",
        "EXAMPLE_OUTPUT": str(folder / "out"),
        **more,
    }


def logged(folder: Path) -> dict[int, float]:
    """Return the figure that the example logged after each pass, once per job."""
    lines = [line.partition(" ") for line in (folder / "out/log").read_text().splitlines()]
    assert len({number for number, _, _ in lines}) == len(lines), "two replicas have logged one pass"
    return {int(number): json.loads(rest.replace("'", '"'))["held_out"] for number, _, rest in lines}


def test_a_loop_survives_the_death_of_its_writer_and_resumes_from_its_checkpoints(
    transformers_zygote, tmp_path
):
    with Job(transformers_zygote, tmp_path / "job", environment=environment(tmp_path, **PATIENT)) as job:
        job.start("r0", f"ring@{KILLED_AT}=kill")
        job.start("r1")
        job.start("r2")
        job.wait_for(lambda: job.ended("r0") is not None, "r0 to kill itself")
        job.start("r0")
        job.finish(restart=False)
        assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
        check(job, STEPS)
        assert len(set(finals(job).values())) == 1, "the replicas ended with different states"
        [joined] = job.events("r0", "joined")
        assert KILLED_AT < joined["step"] < STEPS
    undisturbed = environment(tmp_path / "again", EXAMPLE_CHECKPOINT=str(tmp_path / "out/pass-0"))
    with Job(transformers_zygote, tmp_path / "resumed", environment=undisturbed) as job:
        for i in range(3):
            job.start(f"r{i}")
        job.finish(restart=False)
        assert set(job.codes.values()) == {0}, job.logs()
        assert job.events("r0", "commit")[0]["step"] == 10
        assert len(set(finals(job).values())) == 1
    curve = logged(tmp_path)
    assert sorted(curve) == [0, 1, 2]
    assert logged(tmp_path / "again") == pytest.approx({1: curve[1], 2: curve[2]}, rel=1e-5)


def test_disabled_it_is_the_accelerator_of_accelerate_bit_by_bit(transformers_zygote, tmp_path):
    runs = {"fabric": {"FABRIC_DISABLE": "1"}, "plain": {"TEST_PLAIN": "1"}}
    started = {}
    for name, more in runs.items():
        (tmp_path / name).mkdir()
        given = {**environment(tmp_path / name, EXAMPLE_PAUSE_S="0"), **more}
        started[name] = transformers_zygote.start(given, tmp_path / name / "log")
    for name, process in started.items():
        with transformers_zygote.changed:
            transformers_zygote.changed.wait_for(
                lambda process=process: transformers_zygote.status_of(process) is not None, timeout=DEADLINE_S
            )
        assert transformers_zygote.status_of(process) == 0, (tmp_path / name / "log").read_text()
    assert logged(tmp_path / "fabric") == logged(tmp_path / "plain")
    saved = [(tmp_path / name / "out/pass-2/model.safetensors").read_bytes() for name in runs]
    assert saved[0] == saved[1]
