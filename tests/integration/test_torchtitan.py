"""TitanTrainer with the real torchtitan: killed and joined, compared with a calm job, and disabled.

These tests need torchtitan and triton, whose packages take over a gigabyte, so ``make test`` skips them.
``make torchtitan`` installs the packages into an environment of their own and runs these tests.
"""

import json
from pathlib import Path

import pytest
from job import Job, Zygote
from test_failures import finals

from fabric.audit.journal import read_run
from fabric.audit.summary import judge

pytest.importorskip("torchtitan", reason="torchtitan is not installed: run make torchtitan")
STEPS = 24
KILLED_AT = 9


@pytest.fixture(scope="module")
def titan_zygote():
    parent = Zygote(("cpu_titan", "fabric.integrations.torchtitan"))
    yield parent
    parent.close()


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {
        "TEST_TRAINER": "titan_watched",
        "EXAMPLE_STEPS": str(STEPS),
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


def test_a_trainer_survives_a_kill_and_a_join(titan_zygote, tmp_path):
    with Job(titan_zygote, tmp_path / "calm", environment=environment(tmp_path / "calm")) as calm:
        run_all(calm)
    with Job(titan_zygote, tmp_path / "job", environment=environment(tmp_path)) as job:
        start(job, "r0", f"ring@{KILLED_AT}=kill")
        start(job, "r1")
        start(job, "r2")
        job.wait_for(lambda: job.ended("r0") is not None, "r0 to kill itself")
        start(job, "r0")
        job.finish(restart=False)
        assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
        verdict = judge(read_run(job.folder))
        assert not verdict.broken, "\n".join(verdict.broken[:10])
        assert verdict.summary.steps == STEPS and verdict.summary.samples_repeated == 0
        assert verdict.summary.samples_skipped > 0, "the dead replica's part is skipped until it is back"
        assert len(set(finals(job).values())) == 1, "the replicas ended with different states"
    curve, came_back = notes(job, "r1", 0), notes(job, "r0", 1)
    assert list(curve) == list(range(1, STEPS + 1)) and curve == notes(job, "r2", 0)
    assert came_back and max(came_back) == STEPS
    assert came_back == {step: curve[step] for step in came_back}, "all counters are right after a join"
    undisturbed = notes(calm, "r2", 0)
    assert {s: n for s, n in curve.items() if s <= KILLED_AT} == {
        s: n for s, n in undisturbed.items() if s <= KILLED_AT
    }
    assert undisturbed[STEPS]["tokens"] == STEPS * 3 * 64
    assert [note["lr"] for note in curve.values()] == [note["lr"] for note in undisturbed.values()]
    saved = sorted(path.name for path in (tmp_path / "out" / "checkpoint").iterdir())
    assert saved == ["step-10", "step-20", f"step-{STEPS}"], "one replica has written each checkpoint"


def test_disabled_the_trainer_is_torchtitans(titan_zygote, tmp_path):
    ends = []
    for name, more in (("disabled", {"FABRIC_DISABLE": "1"}), ("alone", {"TEST_WITHOUT_FABRIC": "1"})):
        folder = tmp_path / name
        with Job(titan_zygote, folder, replicas=1, environment=environment(folder, **more)) as job:
            run_all(job)
        ends.append(notes(job, "r0", 0))
    assert ends[0] == ends[1] and list(ends[0]) == list(range(1, STEPS + 1))
