"""``fabric run --adopt``: plain scripts survive a SIGKILL and a join without a changed line."""

import re
from pathlib import Path

from job import HERE, Job
from test_failures import finals

DDP_EPOCHS, DDP_STEPS = 8, 40  # 480 samples, 3 replicas of 32: 5 steps a pass
GPT_STEPS = 40
KILLED_AT = 12


def start(
    zygote, folder: Path, script: str, steps: int, killed_at: int | None = KILLED_AT, **more: str
) -> Job:
    environment = {
        "TEST_TRAINER": "adopted_trainer",
        "ADOPTED_SCRIPT": script,
        "ADOPTED_STEPS": str(steps),
        "EXAMPLE_PAUSE_S": "0.01",
        "TINY_PATIENT_STEPS": "10",
        **more,
    }
    with Job(zygote, folder, environment=environment) as job:
        job.start_all({"r1": f"ring@{killed_at}=kill"} if killed_at is not None else None)
        job.finish()
    return job


def curve(job: Job, replica: str) -> dict[int, str]:
    """The losses that the newest process of a replica printed, by epoch or iteration."""
    lines = (job.folder / f"{replica}.log").read_text()
    newest = lines[max(lines.rfind("fabric: " + replica + ": adopted"), 0) :]
    return {int(n): loss for n, loss in re.findall(r"(?:epoch|iter) (\d+): .*loss (\S+)", newest)}


def check_ends(job: Job, steps: int) -> None:
    assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
    assert job.starts == {"r0": 1, "r1": 2, "r2": 1}, job.logs()
    assert len(set(finals(job).values())) == 1, "the replicas ended with different states"
    assert [e["step"] for e in job.events("r0", "commit")] == list(range(steps))
    joined = [e for e in job.events("r1", "commit") if e["contributed"] and e["step"] > KILLED_AT]
    assert joined, f"the killed replica never contributed again\n{job.logs()}"


def test_the_layout_of_the_ddp_tutorial_survives_a_kill_and_a_join(zygote, tmp_path):
    script = f"{HERE / 'plain_ddp.py'} {DDP_EPOCHS} {tmp_path / 'snapshot.pt'}"
    job = start(zygote, tmp_path, script, DDP_STEPS)
    check_ends(job, DDP_STEPS)
    said = (job.folder / "r0.log").read_text()
    assert said.count("adopted the model DistributedDataParallel(Sequential) with Adam") == 1
    order = "in the order of its DistributedSampler"
    assert f"the DataLoader over Pairs {order} (32 samples a step here, 96 in the job)" in said


def test_the_layout_of_nanogpt_survives_a_kill_and_a_join(zygote, tmp_path):
    job = start(zygote, tmp_path, f"{HERE / 'plain_gpt.py'} {GPT_STEPS} {tmp_path / 'out.pt'}", GPT_STEPS)
    check_ends(job, GPT_STEPS)


def test_a_loop_of_lightning_fabric_survives_a_kill_and_a_join(lightning_zygote, tmp_path):
    job = start(lightning_zygote, tmp_path, f"{HERE / 'plain_fabric.py'} {DDP_EPOCHS}", DDP_STEPS)
    check_ends(job, DDP_STEPS)
    log = (job.folder / "r0.log").read_text()
    assert log.count("adopted the model _FabricModule(Sequential) with AdamW, StepLR") == 1
