"""Scripts for torchft with changed import lines: killed and joined, and equal to fabric's own calls."""

from pathlib import Path

import pytest
import torch
from job import EXAMPLES, HERE, Job
from test_failures import check, finals
from torchft_trainer import with_changed_imports

from fabric.client import restore_values

STEPS = 26
KILLED_AT = 10


def for_torchft() -> str:
    """Return the example as it is for torchft."""
    text = (EXAMPLES / "torchft_ddp.py").read_text()
    return text.replace("from fabric.integrations.torchft import (", "from torchft import (")


def run(
    zygote, folder: Path, trainer: str, points: dict[str, str] | None = None, steps: int = STEPS, **more: str
) -> Job:
    """Run two replicas to their end, and check that they end equal."""
    environment = {
        "TEST_TRAINER": trainer,
        "TORCHFT_SCRIPT": str(folder / "torchft_ddp.py"),
        "EXAMPLE_STEPS": str(STEPS),
        "EXAMPLE_PAUSE_S": "0.02",
        "TINY_PATIENT_STEPS": "10",
        "FABRIC_DURABLE": str(folder / "durable"),
        **more,
    }
    folder.mkdir(exist_ok=True)
    (folder / "torchft_ddp.py").write_text(for_torchft())
    with Job(zygote, folder, replicas=2, environment=environment) as job:
        job.start_all(points)
        job.finish()
        complete = f"durable/test/step-{steps:010}-*/COMPLETE"
        job.wait_for(lambda: list(folder.glob(complete)), "the durable checkpoint of the end")
    assert job.codes == {"r0": 0, "r1": 0}, job.logs()
    assert len(set(finals(job).values())) == 1, "the replicas ended with different states"
    check(job, steps)
    return job


def end(job: Job, steps: int = STEPS) -> dict:
    """Return the values of the final state, from storage."""
    restored = restore_values(job.folder / "durable" / "test")
    assert restored.step == steps
    return restored.values


def assert_equal(a: object, b: object) -> None:
    """Nested values are equal, and tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert set(a) == set(b)
        for key in a:
            assert_equal(a[key], b[key])
    else:
        assert a == b


def test_a_ddp_script_survives_a_kill_and_a_join(zygote, tmp_path):
    job = run(zygote, tmp_path, "torchft_trainer", {"r1": f"ring@{KILLED_AT}=kill"})
    assert job.starts == {"r0": 1, "r1": 2}, job.logs()
    assert [e["step"] for e in job.events("r0", "commit")] == list(range(STEPS))
    joined = [e for e in job.events("r1", "commit") if e["contributed"] and e["step"] > KILLED_AT]
    assert joined, f"the killed replica never contributed again\n{job.logs()}"


def test_a_script_without_the_wrapped_optimizer_survives_a_kill_and_a_join(zygote, tmp_path):
    """The replicas begin with unequal weights, average running statistics, and one reports an error."""
    points = {"r1": f"ring@{KILLED_AT}=kill"}
    job = run(zygote, tmp_path, "torchft_trainer", points, TORCHFT_SCRIPT=str(HERE / "torchft_parts.py"))
    assert job.starts == {"r0": 1, "r1": 2}, job.logs()
    commits = {e["step"]: e for e in job.events("r0", "commit")}
    assert [commits[step]["weight"] for step in (4, 5, 6)] == [2.0, 1.0, 2.0]
    (ours,), (theirs,) = (
        [x for x in job.said(replica).splitlines() if x.startswith("positions")] for replica in ("r0", "r1")
    )
    assert ours == theirs and ours.split()[7:9] == ["11,", "13,"]
    assert "1.num_batches_tracked" in end(job)["model"]


def test_an_exit_code_between_two_steps_is_a_death_and_not_the_end_of_the_loop(zygote, tmp_path):
    mark = tmp_path / "left"
    leaves = f"""scheduler.step()
            if manager.current_step() == 7 and REPLICA == 1 and not os.path.exists({str(mark)!r}):
                os.mkdir({str(mark)!r})
                raise SystemExit(3)"""
    (tmp_path / "leaving.py").write_text(for_torchft().replace("scheduler.step()", leaves))
    with_exit = {"TORCHFT_SCRIPT": str(tmp_path / "leaving.py")}
    job = run(zygote, tmp_path, "torchft_trainer", **with_exit)
    assert job.starts == {"r0": 1, "r1": 2}, job.logs()
    assert [e["step"] for e in job.events("r0", "commit")] == list(range(STEPS))


@pytest.mark.parametrize("loop", ["local", "diloco"])
def test_local_sgd_and_diloco_survive_a_kill_and_a_join(zygote, tmp_path, loop):
    more = {"TORCHFT_SCRIPT": str(HERE / "torchft_diloco.py"), "TORCHFT_LOOP": loop, "EXAMPLE_STEPS": "16"}
    job = run(zygote, tmp_path, "torchft_trainer", {"r1": "ring@5=kill"}, steps=16, **more)
    assert job.starts == {"r0": 1, "r1": 2}, job.logs()
    assert [e["step"] for e in job.events("r0", "commit")] == list(range(16))
    assert [e for e in job.events("r1", "commit") if e["contributed"] and e["step"] > 5], job.logs()
    assert all("16 steps" in job.said(replica) for replica in ("r0", "r1"))
    names = {"0.weight", "0.bias", "2.weight", "2.bias"} if loop == "local" else {"0.weight", "0.bias"}
    assert names <= set(end(job, 16)["model"])


def test_an_undisturbed_script_ends_as_with_fabrics_own_calls(zygote, tmp_path):
    script = end(run(zygote, tmp_path / "script", "torchft_trainer"))
    native = end(run(zygote, tmp_path / "native", "torchft_native"))
    for name in ("model", "optimizer"):
        assert_equal(script[name], native[name])
    assert script["torchft"]["batches_committed"] == 2 * STEPS
    assert script["torchft"]["own"] == {"default": {"scheduler": native["scheduler"]}}


def test_the_example_is_a_script_for_torchft_but_for_its_import_line():
    text, lines = for_torchft(), (EXAMPLES / "torchft_ddp.py").read_text().splitlines()
    assert "fabric" not in text and len(lines) <= 60
    assert sum(a != b for a, b in zip(text.splitlines(), lines, strict=True)) == 1
    assert with_changed_imports(text).splitlines() == lines
