"""FabricTrainer with the real transformers: killed and joined, resumed, disabled, and refused."""

import json
from pathlib import Path

import pytest
from job import DEADLINE_S, Job
from test_failures import check, finals

STEPS = 30
KILLED_AT = 13
# For the job that the killed replica must find when it comes back, whenever that is.
PATIENT = {"TEST_PATIENT": "1", "TINY_PATIENT_STEPS": "15"}


def environment(folder: Path, name: str = "transformers_trainer", **more: str) -> dict[str, str]:
    return {
        "TEST_TRAINER": "watched_trainer",
        "TEST_EXAMPLE": name,
        "EXAMPLE_STEPS": str(STEPS),
        "EXAMPLE_PAUSE_S": "0.02",
        "EXAMPLE_OUTPUT": str(folder / "out"),
        "HF_HUB_OFFLINE": "1",
        **more,
    }


def start(job: Job, replica: str, point: str = "", **more: str) -> None:
    number = job.starts.get(replica, 0)
    job.start(replica, point, TEST_NOTES=str(job.folder / f"{replica}.{number}.notes"), **more)


def notes(job: Job, replica: str, number: int, key: str = "loss") -> dict[int, dict]:
    """Return what process ``number`` of ``replica`` logged about each step, where it has ``key``."""
    path = job.folder / f"{replica}.{number}.notes"
    logged = [json.loads(line) for line in path.read_text().splitlines()]
    return {x["step"]: x for x in logged if key in x}


def comparable(note: dict) -> dict:
    """Return a note without who wrote it and how long it took."""
    return {k: v for k, v in note.items() if k != "writes" and "runtime" not in k and "per_second" not in k}


def run_all(job: Job, **more: str) -> None:
    for i in range(job.replicas):
        start(job, f"r{i}", **more)
    job.finish(restart=False)
    assert set(job.codes.values()) == {0}, job.logs()


def test_a_trainer_survives_the_death_of_its_writer_and_resumes_from_its_checkpoints(
    transformers_zygote, tmp_path
):
    with Job(transformers_zygote, tmp_path / "job", environment=environment(tmp_path, **PATIENT)) as job:
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
        curve = {replica: notes(job, replica, 0) for replica in ("r1", "r2")}
        assert list(curve["r1"]) == list(range(1, STEPS + 1)) and [*curve["r2"]] == [*curve["r1"]]
        came_back = notes(job, "r0", 1)
        for step, note in curve["r1"].items():
            assert comparable(curve["r2"][step]) == comparable(note)
            if step in came_back:  # counters, loss, norm, rate and epoch from its first log on
                assert comparable(came_back[step]) == comparable(note)
        assert max(came_back) == STEPS and joined["step"] + 1 in came_back
        ends = [notes(job, replica, n, "train_loss")[STEPS] for replica, n in (("r0", 1), ("r1", 0))]
        assert (
            ends[0]["train_loss"] == ends[1]["train_loss"] and ends[0]["total_flos"] == ends[1]["total_flos"]
        )
        writers = [r for r in ("r1", "r2") if any(x["writes"] for x in notes(job, r, 0).values())]
        assert writers == ["r1"], "one replica writes, and another when that one dies"
    saved = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert saved == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]
    history = json.loads((tmp_path / "out/checkpoint-10/trainer_state.json").read_text())
    assert history["global_step"] == 10

    resumed = environment(tmp_path / "again", EXAMPLE_CHECKPOINT=str(tmp_path / "out/checkpoint-10"))
    with Job(transformers_zygote, tmp_path / "undisturbed", environment=resumed) as job:
        run_all(job)
        assert job.events("r0", "commit")[0]["step"] == 10
        again = notes(job, "r2", 0)
    assert list(again) == list(range(11, STEPS + 1))
    for step, note in again.items():
        undisturbed = curve["r1"][step]
        assert note["loss"] == pytest.approx(undisturbed["loss"], rel=1e-5)
        assert note["learning_rate"] == undisturbed["learning_rate"] and note["epoch"] == undisturbed["epoch"]


def test_an_evicted_trainer_goes_on_where_the_job_is(transformers_zygote, tmp_path):
    """r2's callback takes longer than the others wait: the job goes on, and r2 comes back in its process.

    The steps 10 and 20 are saved and not logged: the state stays equal there too.
    """
    patience = {**PATIENT, "FABRIC_USER_CODE_S": "3", "FABRIC_EXCHANGE_S": "3", "TEST_LOG_EVERY": "3"}
    with Job(transformers_zygote, tmp_path / "job", environment=environment(tmp_path, **patience)) as job:
        for replica in ("r0", "r1"):
            start(job, replica)
        start(job, "r2", TEST_GATE=str(tmp_path / "gate"), TEST_GATE_AT="5")
        job.wait_for(lambda: len(job.events("r0", "commit")) > 7, "the others to go on")
        (tmp_path / "gate").touch()
        job.finish(restart=False)
        assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
        check(job, STEPS)
        assert len(set(finals(job).values())) == 1
        assert any(e["replay"] for e in job.events("r2", "commit")), "r2 was never evicted"
        curve, own = notes(job, "r0", 0), notes(job, "r2", 0)
        assert list(curve) == list(range(3, STEPS + 1, 3)) and (tmp_path / "out/checkpoint-20").is_dir()
        assert max(own) == STEPS and set(own) <= set(curve)
        assert {step: comparable(curve[step]) for step in own} == {k: comparable(x) for k, x in own.items()}


def test_disabled_it_is_the_trainer_of_transformers_bit_by_bit(transformers_zygote, tmp_path):
    runs = {"fabric": {"FABRIC_DISABLE": "1"}, "plain": {"TEST_PLAIN": "1"}}
    started, logged = {}, {}
    for name, more in runs.items():
        folder = tmp_path / name
        folder.mkdir()
        given = {**environment(folder, EXAMPLE_PAUSE_S="0"), **more, "TEST_NOTES": str(folder / "notes")}
        started[name] = transformers_zygote.start(given, folder / "log")
    for name, process in started.items():
        with transformers_zygote.changed:
            transformers_zygote.changed.wait_for(
                lambda process=process: transformers_zygote.status_of(process) is not None, timeout=DEADLINE_S
            )
        assert transformers_zygote.status_of(process) == 0, (tmp_path / name / "log").read_text()
        lines = (tmp_path / name / "notes").read_text().splitlines()
        logged[name] = [comparable(json.loads(line)) for line in lines]
    assert logged["fabric"] == logged["plain"] and len(logged["plain"]) > STEPS
    models = [(tmp_path / name / "out/model.safetensors").read_bytes() for name in runs]
    assert models[0] == models[1]


def test_an_exception_in_a_callback_fails_the_job_and_names_it(transformers_zygote, tmp_path):
    with Job(transformers_zygote, tmp_path / "job", replicas=2, environment=environment(tmp_path)) as job:
        start(job, "r0")
        start(job, "r1", TEST_RAISE_AT="3")
        job.finish(restart=False)
        assert job.codes == {"r0": 1, "r1": 1}, job.logs()
        # The progress bar ends without a line break.
        [line] = [line for line in job.said("r0").splitlines() if "fabric: r0" in line]
        assert "r1" in line and "a callback that fails" in line
