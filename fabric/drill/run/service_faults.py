"""Faults of the services that a drill starts, lighthouses and etcd members, and of this host's memory."""

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Callable

from fabric.drill.injection.drilled_processes import ProcessTarget
from fabric.drill.injection.memory_ballast import Ballast
from fabric.drill.run.active_fault import ActiveFault, DrillScene
from fabric.drill.run.started_job import StartedJob
from fabric.drill.schedule.drill_schedule import ScheduledFault
from fabric.errors import Refused
from fabric.runtime.local_job import wait_for


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
        self._ballast: Ballast | None = None

    def inject(self) -> None:
        self._ballast = Ballast()

    def seen(self) -> str:
        return self._ballast.evidence if self._ballast is not None else ""

    def end(self) -> None:
        if self._ballast is not None:
            self._ballast.close()

    def undone(self) -> str:
        return f"process {self._ballast.pid} has ended" if self._ballast is not None else ""


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
