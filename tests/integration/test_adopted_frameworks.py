"""``fabric run --adopt`` on scripts of frameworks: killed and joined without a changed line."""

import pytest
from job import Job
from plain_examples import plain
from test_failures import check, finals

STEPS = 30
KILLED_AT = 13


def survive(zygote, folder, example: str, adopted: str, **more: str) -> None:
    script = folder / "script.py"
    script.write_text(plain(example))
    environment = {
        "TEST_TRAINER": "adopted_framework",
        "TEST_SCRIPT": str(script),
        "EXAMPLE_STEPS": str(STEPS),
        "EXAMPLE_PAUSE_S": "0.02",
        "EXAMPLE_OUTPUT": str(folder / "out"),
        "HF_HUB_OFFLINE": "1",
        "TINY_PATIENT_STEPS": "15",
        **more,
    }
    with Job(zygote, folder / "job", environment=environment) as job:
        job.start("r0", f"ring@{KILLED_AT}=kill")
        job.start("r1")
        job.start("r2")
        job.wait_for(lambda: job.ended("r0") is not None, "r0 to kill itself")
        job.start("r0")
        job.finish(restart=False)
        assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
        check(job, STEPS)
        assert len(set(finals(job).values())) == 1, "the replicas ended with different states"
        assert job.events("r0", "joined"), "the killed replica never joined"
        for replica, processes in (("r0", 2), ("r1", 1), ("r2", 1)):
            log = (job.folder / f"{replica}.log").read_text()
            assert log.count(f"fabric: {replica}: adopted the script's {adopted};") == processes


@pytest.mark.parametrize(
    ("example", "adopted"),
    [
        ("transformers_trainer", "transformers.Trainer as FabricTrainer"),
        ("accelerate_loop", "accelerate.Accelerator as FabricAccelerator"),
    ],
)
def test_an_unchanged_script_survives_a_kill_and_a_join_on_hosts_with_a_device(
    transformers_zygote, tmp_path, example, adopted
):
    survive(transformers_zygote, tmp_path, example, adopted, TEST_DEVICE="1")


def test_an_unchanged_script_of_lightning_survives_a_kill_and_a_join(lightning_zygote, tmp_path):
    survive(lightning_zygote, tmp_path, "lightning_trainer", "pytorch_lightning.Trainer as FabricStrategy")
