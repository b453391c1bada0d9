"""A job in a real Ray cluster of two nodes on loopback: a killed actor, a killed raylet, a preempted node."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from etcd_process import die_with_parent, wait_until
from job import HERE, Job
from ray_cluster import ADDRESSES
from test_failures import check, finals

pytestmark = pytest.mark.long("integrations/test_ray_refusals.py")

STEPS = 40
# The members wait for a replica that is away, because Ray needs seconds to see that a node is gone.
PATIENT = {"TINY_STEPS": str(STEPS), "TINY_PATIENT_STEPS": str(STEPS - 4), "FABRIC_DIGEST_EVERY": "1"}
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
HEAD, FAR = ADDRESSES
# Each process of a replica imports torch, which takes minutes on a host with many other processes.
START_S = 600.0


def marked(folder: Path) -> dict[int, list[bytes]]:
    """Return the processes of the cluster and of its job, with their command lines.

    Their temporary folder is ``folder``.
    """
    processes = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}".encode() in (path / "environ").read_bytes().split(b"\0"):
                processes[int(path.name)] = (path / "cmdline").read_bytes().split(b"\0")
    return processes


@dataclass
class RayJob(Job):
    """A cluster, and a job whose replicas Ray starts; ``folder`` is the temporary folder of both."""

    lighthouse_is_actor: bool = True
    cluster: dict = field(init=False)
    cluster_process: subprocess.Popen = field(init=False)
    driver: subprocess.Popen | None = None

    def __enter__(self) -> "RayJob":
        super().__enter__()
        self.environment |= {**os.environ, **QUIET, **PATIENT, "TMPDIR": str(self.folder)}
        with (self.folder / "cluster.log").open("wb") as log:
            self.cluster_process = self.start_script("ray_cluster.py", stdin=-1, stdout=-1, stderr=log)
        line = self.cluster_process.stdout.readline()
        if not line:
            self.__exit__()
            pytest.fail(f"Ray has not started:\n{(self.folder / 'cluster.log').read_text()[-3000:]}")
        self.cluster = json.loads(line)
        return self

    def __exit__(self, *reason: object) -> None:
        if self.driver is not None:
            self.driver.terminate()
            self.driver.wait()
        self.cluster_process.communicate()
        super().__exit__(*reason)

    def start_lighthouse(self, port: int = 0, apart: int = 0) -> None:
        if not self.lighthouse_is_actor:
            super().start_lighthouse(port, apart)

    def start_script(self, *words: str, **streams: object) -> subprocess.Popen:
        command = [*die_with_parent(), sys.executable, str(HERE / words[0]), *words[1:]]
        return subprocess.Popen(command, env=self.environment, **streams)

    def start_driver(self, work: str, gates: tuple[int, ...]) -> None:
        """Start the job, with the work of ``ray_driver.py``. It waits in these steps until ``open_gate``."""
        points = ",".join(f"forward@{step}=wait:{self.folder}/gate{step}" for step in gates)
        self.environment["FABRIC_TEST_POINTS"] = points
        self.environment |= {"FABRIC_JOB": "test", "OMP_NUM_THREADS": "1"}
        self.environment |= {"TEST_NOTES": f"{self.folder}/notes", "TEST_JOURNALS": f"{self.folder}/journal"}
        if not self.lighthouse_is_actor:
            self.environment |= {"FABRIC_LIGHTHOUSE": self.url, "FABRIC_TOKEN_FILE": str(self.token)}
        with (self.folder / "driver.log").open("wb") as log:
            self.driver = self.start_script(
                "ray_driver.py", self.cluster["address"], work, stdout=log, stderr=log
            )

    def notes(self) -> list[list[str]]:
        """Return name, process and address of each start of a replica, or of a rank of several."""
        notes = self.folder / "notes"
        return [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []

    def lives(self, name: str) -> list[tuple[int, str]]:
        """Return the process, and the address of its node, of each life of a replica or rank."""
        return [(int(pid), address) for noted, pid, address in self.notes() if noted == name]

    def on(self, address: str) -> list[str]:
        """Return the replicas or ranks that started at this node, once the job makes steps."""
        names = [f"r{i}" for i in range(self.replicas)]
        self.wait_for(lambda: all(self.events(name, "commit") for name in names), "all replicas", START_S)
        return sorted({name for name, _, _ in self.notes() if self.lives(name)[-1][1] == address})

    def wait_at_gate(self, step: int) -> None:
        self.wait_for((self.folder / f"gate{step}.awaited").exists, f"a replica to be in step {step}")

    def open_gate(self, step: int) -> None:
        (self.folder / f"gate{step}").touch()

    def wait_for_join(self, replica: str) -> None:
        self.wait_for(lambda: self.events(replica, "joined"), f"{replica} to join", START_S)

    def kill_far_raylet(self) -> None:
        self.cluster_process.stdin.write(b"kill\n")
        self.cluster_process.stdin.flush()

    def restart_lighthouse(self) -> None:
        """Kill the process of the lighthouse in an actor, and wait for its successor."""

        def pids() -> list[int]:
            return [pid for pid, words in marked(self.folder).items() if b"lighthouse" in words]

        [old] = pids()
        os.kill(old, signal.SIGKILL)
        self.wait_for(lambda: set(pids()) - {old}, "the next lighthouse")

    def finish_driver(self) -> list[str]:
        """Wait for the driver's end; return what the replicas returned."""
        self.wait_for(lambda: self.driver.poll() is not None, "the driver's end")
        lines = (self.folder / "driver.log").read_text().splitlines()
        assert self.driver.returncode == 0, self.logs()
        [results] = [line for line in lines if line.startswith("results ")]
        return results.split()[1:]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, because those of pytest are too long for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="fabric-ray-", ignore_cleanup_errors=True) as path:
        yield Path(path)
        wait_until(lambda: not marked(Path(path)), "the end of the cluster's processes")


def test_a_killed_actor_and_a_killed_raylet_cost_no_step(zygote, folder):
    with RayJob(zygote, folder) as job:
        job.start_driver("function", gates=(5, 25))
        [far], [near, _] = job.on(FAR), job.on(HEAD)
        os.kill(job.lives(near)[0][0], signal.SIGKILL)
        job.open_gate(5)
        job.wait_for_join(near)
        job.wait_at_gate(25)
        job.restart_lighthouse()
        job.kill_far_raylet()
        dead = Path(f"/proc/{job.lives(far)[0][0]}")
        job.wait_for(lambda: not dead.exists(), "the end of the killed raylet's actor")
        job.open_gate(25)
        job.wait_for_join(far)
        assert [address for _, address in job.lives(far)] == [FAR, HEAD]
        assert job.finish_driver() == ["r0", "r1", "r2"]
        assert len(set(finals(job).values())) == 1, job.logs()
        check(job, STEPS)


@pytest.mark.parametrize(("work", "replicas"), [("command", 3), ("nodes", 2)])
def test_a_replica_leaves_a_preempted_node_in_order_and_comes_back_elsewhere(zygote, folder, work, replicas):
    with RayJob(zygote, folder, replicas=replicas, lighthouse_is_actor=False) as job:
        job.start_driver(work, gates=(5,))
        [far] = job.on(FAR)
        replica = far.partition(".")[0]
        order = ["drain-node", "--address", job.cluster["address"], "--node-id", job.cluster["node"]]
        order += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
        order += ["--deadline-remaining-seconds", "3600"]
        drain = [sys.executable, "-m", "ray.scripts.scripts", *order]
        subprocess.run(drain, env=job.environment, check=True, capture_output=True)
        job.wait_for(lambda: job.told("drain asked"), "the order to leave")
        assert "Ray drains node" in str(job.told("drain asked"))
        job.open_gate(5)
        job.wait_for(lambda: job.events(replica, "stop"), f"{replica} to leave")
        [left] = job.events(replica, "stop")
        assert left["code"] == 0 and "drained" in left["reason"]
        job.kill_far_raylet()
        job.wait_for_join(replica)
        assert [address for _, address in job.lives(far)] == [FAR, HEAD]
        assert job.finish_driver() == ["None"] * replicas
        assert len(set(finals(job).values())) == 1, job.logs()
        assert job.recoveries() == [], "a drain is no failure"
        check(job, STEPS)


def test_a_killed_raylet_takes_a_node_of_a_replica_that_comes_back_elsewhere(zygote, folder):
    with RayJob(zygote, folder, replicas=2) as job:
        job.start_driver("nodes", gates=(5,))
        job.wait_at_gate(5)
        [far] = job.on(FAR)
        replica, _, lost = far.partition(".")
        other = f"{replica}.{1 - int(lost)}"
        job.kill_far_raylet()
        dead = Path(f"/proc/{job.lives(far)[0][0]}")
        job.wait_for(lambda: not dead.exists(), "the end of the killed raylet's rank")
        job.open_gate(5)
        job.wait_for_join(replica)
        assert [address for _, address in job.lives(far)] == [FAR, HEAD]
        assert [address for _, address in job.lives(other)] == [HEAD, HEAD]
        assert job.finish_driver() == ["None"] * 2
        assert len(set(finals(job).values())) == 1, job.logs()
        assert len({job.events(f"rank1/r{i}", "state")[-1]["digest"] for i in (0, 1)}) == 1
        check(job, STEPS)
