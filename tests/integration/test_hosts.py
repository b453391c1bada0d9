"""A replica of two hosts with networks of their own, under ``fabric launch``: one host is lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from alone import losses_alone
from job import HERE, SEARCH_PATH
from layout_trainer import GLOBAL_BATCH, build
from namespaces import ADDRESSES, Cable
from test_launched_jobs import LaunchedJob

PROBLEM = Cable.problem()
STEPS = 60

pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)


class Hosts:
    """The hosts of replica r1, each with a launcher and a folder of its own, on one side of the cable."""

    def __init__(self, job: LaunchedJob, cable: Cable) -> None:
        self.job, self.cable = job, cable

    def start(self, host: str, side: int, *options: str) -> None:
        own = {
            "FABRIC_BIND": ADDRESSES[side],
            "FABRIC_RUN_DIR": str(self.job.folder / "run" / host),
            "GLOO_SOCKET_IFNAME": "cable",
            "LAUNCHED_NOTES": str(self.job.folder / "r1.notes"),
            "PYTHONPATH": SEARCH_PATH,
            "OMP_NUM_THREADS": "1",
        }
        program = ["launch", "--nodes", "2", "--ranks", "1", *options, str(HERE / self.job.trainer)]
        inside = ["ip", "netns", "exec", self.cable.names[side], sys.executable, "-m", "fabric.cli.main"]
        with (self.job.folder / f"{host}.log").open("ab") as log:
            self.job.launchers[host] = subprocess.Popen(
                [*inside, *program],
                env={**os.environ, **self.job.trainer_environment("r1", **own)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def lose(self, host: str) -> None:
        """Kill everything that runs on this host: its launcher, and its checkpoint server."""
        self.job.launchers[host].kill()
        folder = str(self.job.folder / "run" / host).encode()
        for pid in self.job.server_pids():
            if folder in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def test_a_spare_host_takes_the_place_of_a_lost_one_and_the_job_loses_no_step(zygote, tmp_path):
    environment = {"TINY_STEPS": str(STEPS), "TINY_PATIENT_STEPS": "50", "FABRIC_REPLICAS": "2"}
    with Cable() as cable:
        inside = ("ip", "netns", "exec", cable.names[0])
        with LaunchedJob(
            zygote, tmp_path, 2, ranks=2, environment=environment, bind=ADDRESSES[0], inside=inside
        ) as job:
            hosts = Hosts(job, cable)
            job.environment |= {"TEST_NETNS": cable.names[0], "FABRIC_BIND": ADDRESSES[0]}
            job.start_beside("r0")
            job.groups["r1"] = ["r1.0", "r1.1"]
            hosts.start("host-0", 0, "--node", "0")
            hosts.start("host-1", 1, "--node", "1")
            hosts.start("host-2", 1, "--spare-node")
            job.wait_for(lambda: any(e["step"] >= 6 for e in job.events("r1", "commit")), "step 6 of r1")
            hosts.lose("host-1")
            codes = job.end_codes()
            assert codes == {"r0.0": 0, "r0.1": 0, "host-0": 0, "host-1": -9, "host-2": 0}, job.logs()
            again = [e for e in job.events("r1", "commit") if e["contributed"] and e["step"] > 12]
            assert again, f"the replica never contributed again\n{job.logs()}"
            job.check_lanes(STEPS)
            assert job.losses("r0") == pytest.approx(
                dict(enumerate(losses_alone(build(), STEPS, GLOBAL_BATCH))), rel=1e-4
            )
