"""The processes of a job that allow a drill: those that were started with ``FABRIC_DRILL=1``.

A process is identified by its environment, which its descendants inherit: FABRIC_DRILL, FABRIC_JOB and
FABRIC_REPLICA. A signal goes through a pidfd, opened before the environment is checked, so that no signal
hits another process to which the kernel has given the pid meanwhile.
"""

import contextlib
import os
import select
import signal
import weakref
from pathlib import Path

from fabric.errors import Refused
from fabric.model import Value
from fabric.runtime.guarded_processes import MARK
from fabric.runtime.process_environment import is_standby

ALLOWED = "FABRIC_DRILL=1"


class ProcessTarget:
    """One process that a fault hits."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise Refused(f"process {pid} is gone: look at its log, and drill again") from error
        self.close = weakref.finalize(self, os.close, self._pidfd)

    def send(self, number: int) -> None:
        """Send a signal; nothing happens if the process is gone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    @property
    def descriptor(self) -> int:
        """The pidfd, which is readable once the process has ended."""
        return self._pidfd

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; its parent need not have read its exit code."""
        return bool(select.select([self._pidfd], [], [], 0)[0])

    @property
    def is_stopped(self) -> bool:
        """Whether the kernel says that the process is stopped."""
        return not self.is_gone and _stat(self.pid)[:1] == ["T"]


class FoundProcess(Value):
    """One process whose environment allows a drill."""

    pid: int
    parent: int
    replica: str
    words: tuple[str, ...]  # its command line

    @property
    def is_server(self) -> bool:
        return "fabric.ckpt_server" in self.words

    @property
    def is_helper(self) -> bool:
        return any(word.startswith(("fabric.ckpt_server", "fabric.drill")) for word in self.words)

    @property
    def is_launcher(self) -> bool:
        return "launch" in self.words and any("fabric" in word for word in self.words[:4])


class DrilledProcesses:
    """The processes of one job on this host.

    ``mark``: only those with this value of the guard's mark, because two drills may run on one host.
    """

    def __init__(self, job: str, mark: str = "") -> None:
        self._needed = {"FABRIC_JOB": job} | ({MARK: mark} if mark else {})

    def trainer(self, replica: str) -> ProcessTarget:
        """Return the trainer of ``replica``. Raises Refused with one sentence where there is none."""
        candidates = [x for x in self._living(replica) if not (x.is_launcher or x.is_helper)]
        pids = {x.pid for x in candidates}
        return self._target([x for x in candidates if x.parent not in pids], replica, "trainer")

    def server(self, replica: str) -> ProcessTarget:
        """Return the checkpoint server of ``replica``. Raises Refused with one sentence."""
        servers = [x for x in self._living(replica) if x.is_server]
        return self._target(servers, replica, "checkpoint server")

    def _target(self, processes: list[FoundProcess], replica: str, what: str) -> ProcessTarget:
        if len(processes) > 1 and what == "trainer":
            raise Refused(
                f"{replica} has {len(processes)} ranks on this host: drill a job of one rank per replica"
            )
        # The newest one: the kernel reuses numbers, so they give no order.
        for process in sorted(processes, key=lambda x: int(start_time(x.pid) or 0), reverse=True):
            with contextlib.suppress(Refused):
                target = ProcessTarget(process.pid)
                if self._read(process.pid) is not None:
                    return target
                target.close()
        raise Refused(
            f"{replica} has no {what} on this host that was started with {ALLOWED}: "
            "start it so, or drill on its own host"
        )

    def _living(self, replica: str) -> list[FoundProcess]:
        processes = [self._read(int(x.name)) for x in Path("/proc").iterdir() if x.name.isdecimal()]
        return [x for x in processes if x is not None and x.replica == replica]

    def _read(self, pid: int) -> FoundProcess | None:
        """Return the process if its environment allows a drill of this job."""
        try:
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return None
        variables = dict(entry.decode(errors="replace").partition("=")[::2] for entry in entries)
        is_allowed = variables.get("FABRIC_DRILL") not in (None, "", "0")
        if not is_allowed or any(variables.get(name) != value for name, value in self._needed.items()):
            return None
        stat = _stat(pid)
        if not stat or stat[0] in "ZX" or not variables.get("FABRIC_REPLICA") or is_standby(pid, variables):
            return None
        return FoundProcess(pid, int(stat[1]), variables["FABRIC_REPLICA"], tuple(words))


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; empty where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def start_time(pid: int) -> str:
    """Return the start time of a process, which with the pid identifies the process; empty: it is gone."""
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else ""
