"""Faults of the services that a drill starts, lighthouses and etcd members, and of this host's memory."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from fabric.drill.injection.drilled_processes import ProcessTarget
from fabric.drill.run.active_fault import ActiveFault, DrillScene
from fabric.drill.run.started_job import StartedJob, wait_for
from fabric.drill.schedule.drill_schedule import ScheduledFault
from fabric.errors import Refused

_MOST_BYTES = 1 << 30
_SHARE = 4
# The ballast writes to each page, then waits for the end of its input.
_BALLAST = "import sys; held = b'1' * int(sys.argv[1]); print(len(held), flush=True); sys.stdin.read()"


class KillService(ActiveFault):
    """SIGKILL to a service; at the fault's end the drill starts the service again."""

    def __init__(self, scene: DrillScene, fault: ScheduledFault, find: Callable[[], str]) -> None:
        super().__init__(scene, fault)
        self._find = find
        self._process: ProcessTarget | None = None

    def inject(self) -> None:
        self.about = self._find()
        self._process = ProcessTarget(self.scene.job.processes.pid_of(self.about))
        self._process.send(signal.SIGKILL)

    def seen(self) -> str:
        process = self._process
        return f"process {process.pid} is gone" if process is not None and process.is_gone else ""

    def end(self) -> None:
        if self._process is None:
            return
        job = self.scene.job
        if self.about in job.members.names:
            job.members.start_member(self.about)
            wait_for(lambda: job.members.is_healthy(self.about), lambda: f"{self.about} is not healthy")
        else:
            job.start_lighthouse(self.about)

    def undone(self) -> str:
        return f"{self.about} answers, process {self.scene.job.processes.pid_of(self.about)}"


class MemoryBallast(ActiveFault):
    """A process that holds memory until the fault's end, or until the drill dies."""

    def __init__(self, scene: DrillScene, fault: ScheduledFault) -> None:
        super().__init__(scene, fault)
        self.about = "this host's memory"
        self._bytes = min(_MOST_BYTES, _available_bytes() // _SHARE)
        self._process: subprocess.Popen[bytes] | None = None

    def inject(self) -> None:
        command = [sys.executable, "-S", "-c", _BALLAST, str(self._bytes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def seen(self) -> str:
        assert self._process is not None
        held = _memory_fields(Path(f"/proc/{self._process.pid}/status")).get("VmRSS", 0)
        if held < self._bytes:
            return ""
        return f"process {self._process.pid} holds {held >> 20} MB"

    def end(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()

    def undone(self) -> str:
        return f"process {self._process.pid} has ended" if self._process is not None else ""


def leading_lighthouse(job: StartedJob, *, leads: bool = True) -> str:
    """Return the name of the lighthouse that leads, or of one that does not. Raises Refused."""
    for name, url in job.urls.items():
        if _leads(url) is leads:
            return name
    what = "leads" if leads else "follows"
    raise Refused(f"no lighthouse of this drill {what} now: wait for the election")


def _leads(url: str) -> bool | None:
    """Whether the lighthouse leads; None where it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=2.0) as answer:  # noqa: S310  (our lighthouse)
            return bool(json.loads(answer.read(1 << 16)).get("is_leader"))
    except (urllib.error.URLError, OSError, ValueError):
        return None


def _available_bytes() -> int:
    return _memory_fields(Path("/proc/meminfo")).get("MemAvailable", 0)


def _memory_fields(path: Path) -> dict[str, int]:
    """Return the lines of a file in /proc that count kB, in bytes."""
    fields: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return fields
    for line in lines:
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            fields[name] = int(words[0]) * 1024
    return fields
