"""A real Slurm for a test: a controller and several nodes on this host, on loopback, in a folder of the test.

No daemon is a service of the host: each is a child of the test, and ends with it. A node is the daemon of the
node and all processes that it has started.
"""

import getpass
import os
import secrets
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from etcd_process import die_with_parent, free_ports, wait_until

HOW_TO_GET_ONE = (
    "no slurmctld, slurmd, sbatch or munged on PATH: install your distribution's packages slurmctld, slurmd, "
    "slurm-client and munge (on Debian, as root: ops/dev/ensure-slurm.sh)"
)

_CONFIGURATION = """\
ClusterName=fabric
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/prolog
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdTimeout=5
MailProg=/bin/true
"""
# Each node has a temporary folder of its own, as nodes of a real cluster have.
_PROLOG = """#!/bin/sh
mkdir -p {folder}/tmp/$SLURMD_NODENAME
echo export TMPDIR={folder}/tmp/$SLURMD_NODENAME
"""


def require_slurm() -> None:
    """Without Slurm skip the test, or fail it under ``CI=true``."""
    if not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "munged"))):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(HOW_TO_GET_ONE)


class SlurmCluster:
    """A controller, and nodes named node1, node2 and so on, each with a GPU that does not exist."""

    def __init__(self, folder: Path, nodes: int) -> None:
        require_slurm()
        self.folder = folder
        self.nodes = [f"node{i + 1}" for i in range(nodes)]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "SlurmCluster":
        for name in ("", "state", "tmp", *self.nodes):
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        self._configure()
        key, socket = self.folder / "munge.key", self.folder / "munge"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        files = [f"--{name}-file={self.folder}/munged.{name}" for name in ("pid", "log", "seed")]
        # --force: the folder of a test is no folder of the system
        self._start("munged", "--foreground", "--force", f"--socket={socket}", f"--key-file={key}", *files)
        wait_until(socket.exists, "munged's socket")
        self._start("slurmctld", "-D")
        for node in self.nodes:
            self._start(node, "-D", "-N", node, program="slurmd")
        wait_until(lambda: self.idle() == self.nodes, "all nodes to be idle")
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            self.kill_node(node)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()

    def run(self, *command: str, **more: str) -> str:
        """Run one of Slurm's programs; return its output."""
        done = subprocess.run(
            command, env=self.environment | more, capture_output=True, text=True, cwd=self.folder
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def idle(self) -> list[str]:
        """Return the nodes that are ready for a job."""
        listed = subprocess.run(
            ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        return sorted(listed.stdout.split())

    def field(self, job: str, name: str) -> str:
        """Return a field of `scontrol show job`."""
        words = dict(word.partition("=")[::2] for word in self.run("scontrol", "show", "job", job).split())
        return words[name]

    def kill_node(self, node: str) -> None:
        """Kill every process of the node."""
        daemon = self._daemons[node]
        daemon.kill()
        daemon.wait()
        for pid in self._processes(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))

    def _processes(self, node: str) -> list[int]:
        """Return the processes of the node in an order in which none can act when another has been killed.

        The second process of each srun ends its step when the first one dies. Then follow the daemons of the
        steps.
        """
        mark, tasks, steps, seconds = f"SLURMD_NODENAME={node}".encode(), [], [], []
        conf = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (path / "environ").read_bytes().split(b"\0")
                if mark in words and conf in words:
                    parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                    name = Path(f"/proc/{parent}/comm").read_text().strip()
                    (seconds if name == "srun" else tasks).append(int(path.name))
                    if name == "slurmstepd":
                        steps.append(parent)
        return seconds + steps + tasks

    def _configure(self) -> None:
        port, *ports = free_ports(1 + len(self.nodes))
        lines = [_CONFIGURATION.format(user=getpass.getuser(), folder=self.folder, port=port)]
        for node, its_port in zip(self.nodes, ports, strict=True):
            place = f"NodeHostname=localhost NodeAddr=127.0.0.1 Port={its_port}"
            lines.append(f"NodeName={node} {place} CPUs=1 Gres=gpu:1\n")
        lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
        (self.folder / "slurm.conf").write_text("".join(lines))
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        prolog = self.folder / "prolog"
        prolog.write_text(_PROLOG.format(folder=self.folder))
        prolog.chmod(0o755)

    def _start(self, name: str, *options: str, program: str = "") -> None:
        command = [*die_with_parent(), program or name, *options]
        with (self.folder / f"{name}.log").open("wb") as log:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
