"""The Slurm scripts under a real Slurm of several nodes on this host, one of which is killed."""

from pathlib import Path

import pytest
from job import HERE, Job
from slurm_cluster import SlurmCluster
from test_failures import finals

from fabric.audit.journal import read_run
from fabric.audit.summary import judge

ROOT = HERE.parent.parent
STEPS, HELD_STEP = 20, 5

pytestmark = pytest.mark.long("cli/test_launch.py")

# Slurm's nodes have an address of their own; here it is that of the host.
_HOSTNAME = "#!/bin/sh\necho 127.0.0.1\n"
_TRAIN = """import os
os.environ["FABRIC_JOURNAL"] = os.environ["JOURNALS"] + "/" + os.environ["FABRIC_REPLICA"] + ".jsonl"
import tiny_trainer

tiny_trainer.main()
"""


@pytest.fixture
def slurm(tmp_path):
    with SlurmCluster(tmp_path / "slurm", nodes=3) as cluster:
        yield cluster


def prepare(folder: Path, slurm: SlurmCluster) -> None:
    """Make the programs and the training script that the nodes find."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    (programs / "hostname").write_text(_HOSTNAME)
    (programs / "hostname").chmod(0o755)
    (folder / "train.py").write_text(_TRAIN)
    slurm.environment["PATH"] = f"{programs}:{ROOT}/.venv/bin:{slurm.environment['PATH']}"


def test_the_job_goes_on_when_a_node_is_killed(zygote, slurm, tmp_path):
    with Job(zygote, tmp_path / "job") as job:
        prepare(job.folder, slurm)
        gate = job.folder / "gate"
        settings = {
            "FABRIC_LIGHTHOUSE": job.url,
            "FABRIC_JOB": "gpt-7",
            "FABRIC_TOKEN_FILE": str(job.token),
            "FABRIC_TEST_POINTS": f"forward@{HELD_STEP}=wait:{gate}",
            "FABRIC_DIGEST_EVERY": "1",
            "JOURNALS": str(job.folder / "journal"),
            "TINY_STEPS": str(STEPS),
            "PYTHONPATH": str(HERE),
        }
        words = ["sbatch", "--parsable", "--nodes=3", f"--chdir={job.folder}", "--output=out.log"]
        number = slurm.run(*words, str(ROOT / "ops/slurm/train.sbatch"), **settings).strip()
        job.wait_for(gate.with_name("gate.awaited").exists, f"step {HELD_STEP}")
        job.wait_for(lambda: job.events("r2", "commit"), "a step of r2")
        slurm.kill_node("node3")
        gate.touch()
        job.wait_for(
            lambda: slurm.field(number, "JobState") not in ("RUNNING", "COMPLETING"), "the job's end"
        )
        output = (job.folder / "out.log").read_text()
        assert slurm.field(number, "JobState") == "COMPLETED", output
        assert slurm.field(number, "ExitCode") == "0:0"
        assert "replica r2 was lost with its node" in output
        assert "replica r0 has finished" in output and "replica r1 has finished" in output
        ends = finals(job)
        assert ends["r0"] == ends["r1"]
        verdict = judge(read_run(job.folder))
        assert list(verdict.broken) == ["r2 did not finish."]
        assert (verdict.summary.steps, verdict.summary.steps_lost) == (STEPS, 0)
