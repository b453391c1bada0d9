"""The Slurm scripts under a real Slurm of several nodes on this host, one of which is killed."""

import json
import os

import pytest
from job import HERE, SEARCH_PATH, Job
from slurm_cluster import SlurmCluster
from test_failures import finals

from fabric.audit.journal import read_run
from fabric.audit.summary import judge

ROOT = HERE.parent.parent
STEPS, HELD_STEP, LONG_STEPS = 20, 5, 60

pytestmark = pytest.mark.long("cli/test_launch.py")

# Slurm's nodes have an address of their own; here it is that of the host.
_HOSTNAME = "#!/bin/sh\necho 127.0.0.1\n"
_TRAIN = """import importlib, os
os.environ["FABRIC_JOURNAL"] = os.environ["JOURNALS"] + "/" + os.environ["FABRIC_REPLICA"] + ".jsonl"
importlib.import_module(os.environ["TRAINER"]).main()
"""


def begin(job: Job, slurm: SlurmCluster, trainer: str, *options: str, **more: str) -> str:
    """Submit the script with ``options`` on all nodes; return the job's number in its step HELD_STEP.

    It goes on when the file ``gate`` exists. ``more``: further variables of the job."""
    folder = job.folder
    programs = folder / "bin"
    programs.mkdir(parents=True)
    (programs / "hostname").write_text(_HOSTNAME)
    (programs / "hostname").chmod(0o755)
    (folder / "train.py").write_text(_TRAIN)
    slurm.environment["PATH"] = f"{programs}:{ROOT}/.venv/bin:{slurm.environment['PATH']}"
    settings = {
        "FABRIC_LIGHTHOUSE": job.url,
        "FABRIC_JOB": "gpt-7",
        "FABRIC_TOKEN_FILE": str(job.token),
        "FABRIC_TEST_POINTS": f"forward@{HELD_STEP}=wait:{folder}/gate",
        "FABRIC_DIGEST_EVERY": "1",
        "JOURNALS": str(folder / "journal"),
        "TINY_STEPS": str(STEPS),
        "PYTHONPATH": SEARCH_PATH,
        "TRAINER": trainer,
        **more,
    }
    words = ["sbatch", "--parsable", f"--nodes={len(slurm.nodes)}", f"--chdir={folder}", "--output=out.log"]
    number = slurm.run(*words, str(ROOT / "ops/slurm/train.sbatch"), *options, **settings).strip()
    job.wait_for((folder / "gate.awaited").exists, f"step {HELD_STEP}")
    return number


def end(job: Job, slurm: SlurmCluster, number: str, state: str = "COMPLETED") -> str:
    """Let the job go on; return its output, when Slurm says that it has ended in this state."""
    (job.folder / "gate").touch()
    job.wait_for(lambda: slurm.field(number, "JobState") not in ("RUNNING", "COMPLETING"), "the job's end")
    output = (job.folder / "out.log").read_text()
    assert slurm.field(number, "JobState") == state, output
    assert slurm.field(number, "ExitCode") == "0:0"
    return output


def test_the_job_goes_on_when_a_node_is_killed(zygote, tmp_path):
    with SlurmCluster(tmp_path / "slurm", nodes=3) as slurm, Job(zygote, tmp_path / "job") as job:
        number = begin(job, slurm, "tiny_trainer")
        job.wait_for(lambda: job.events("r2", "commit"), "a step of r2")
        slurm.kill_node("node3")
        output = end(job, slurm, number)
        assert "replica r2 was lost with its node" in output
        assert "replica r0 has finished" in output and "replica r1 has finished" in output
        ends = finals(job)
        assert ends["r0"] == ends["r1"]
        verdict = judge(read_run(job.folder))
        assert list(verdict.broken) == ["r2 did not finish."]
        assert (verdict.summary.steps, verdict.summary.steps_lost) == (STEPS, 0)


def test_a_replica_of_two_nodes_loses_one_and_the_other_replica_finishes(zygote, tmp_path):
    with SlurmCluster(tmp_path / "slurm", nodes=4) as slurm, Job(zygote, tmp_path / "job") as job:
        slurm.environment |= {"LAUNCHED_NOTES": os.devnull, "GLOO_SOCKET_IFNAME": "lo"}
        number = begin(job, slurm, "launched_trainer", "--nodes-per-replica", "2")
        job.wait_for(lambda: job.events("r1", "commit"), "a step of r1")
        slurm.kill_node("node4")
        output = end(job, slurm, number)
        assert "replica r1 on node4 was lost with its node" in output
        for node in ("node1", "node2"):
            assert f"replica r0 on {node} has finished" in output
        verdict = judge(read_run(job.folder))
        assert list(verdict.broken) == ["r1 did not finish."]
        assert (verdict.summary.steps, verdict.summary.steps_lost) == (STEPS, 0)


@pytest.mark.parametrize("killed", ["node4", "node1"])
def test_a_spare_node_takes_the_place_of_a_killed_one_and_both_replicas_finish(zygote, tmp_path, killed):
    """The script itself runs on node1, so without it node2 ends the job."""
    with SlurmCluster(tmp_path / "slurm", nodes=5) as slurm, Job(zygote, tmp_path / "job") as job:
        slurm.environment |= {"LAUNCHED_NOTES": os.devnull, "GLOO_SOCKET_IFNAME": "lo"}
        # The trainers leave an absent replica time to come back.
        steps = {"TINY_STEPS": str(LONG_STEPS), "TINY_PATIENT_STEPS": str(LONG_STEPS - HELD_STEP)}
        number = begin(job, slurm, "launched_trainer", "--nodes-per-replica", "2", **steps)
        job.wait_for(lambda: job.events("r1", "commit"), "a step of r1")
        log = job.folder / "out.log"
        job.wait_for(lambda: "node2 ends the job if node1 fails" in log.read_text(), "the guard")
        slurm.kill_node(killed)
        output = end(job, slurm, number, "CANCELLED" if killed == "node1" else "COMPLETED")
        verdict = judge(read_run(job.folder))
        assert not verdict.broken
        assert (verdict.summary.steps, verdict.summary.steps_lost) == (LONG_STEPS, 0)
        assert json.loads(job.ask("/v1/jobs/gpt-7"))["complete"]
        if killed == "node4":
            assert "replica r1 on node4 was lost with its node" in output
            for replica, node in (("r0", "node1"), ("r0", "node2"), ("r1", "node3")):
                assert f"replica {replica} on {node} has finished" in output
