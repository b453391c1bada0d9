"""The life of one fault: injected, seen to have happened, ended, and seen to be over."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fabric.drill.injection.drilled_processes import DrilledProcesses
from fabric.drill.injection.undo_guard import UndoGuard
from fabric.drill.judge.drill_record import InjectedFault
from fabric.drill.run.journal_watch import JournalWatch
from fabric.drill.run.started_job import StartedJob
from fabric.drill.schedule.drill_schedule import ScheduledFault
from fabric.errors import FabricError
from fabric.runtime.local_job import POLL_S

# The drill waits so long for the evidence that a fault happened, and for the evidence of its end.
SEEN_S = 120.0
UNDONE_S = 240.0


@dataclass(frozen=True, slots=True)
class DrillScene:
    """Everything that a fault may touch."""

    processes: DrilledProcesses
    watch: JournalWatch
    guard: UndoGuard
    job: StartedJob

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self.watch.replicas)

    def status(self) -> dict[str, Any]:
        """Return the lighthouse's status of the job; empty where no lighthouse answers."""
        client = self.job.client
        with contextlib.suppress(FabricError):
            status = client.ask(client.path())
            return status if isinstance(status, dict) else {}
        return {}

    def pause(self) -> None:
        """Wait a moment, then read the journals. Raises FabricError if a launcher has failed."""
        time.sleep(POLL_S)
        self.watch.look()
        self.job.is_over()


class ActiveFault(ABC):
    """One fault. ``seen`` and ``undone`` return evidence, or an empty string; both are asked again."""

    def __init__(self, scene: DrillScene, fault: ScheduledFault) -> None:
        self.scene, self.fault = scene, fault
        self.targets: tuple[str, ...] = ()
        self.about = ""
        self.pids: dict[str, int] = {}
        self.kills = False
        self.began = 0.0  # the time of the fault, if it is not that of ``inject``

    @abstractmethod
    def inject(self) -> None:
        """Begin the fault. Raises FabricError where its target is gone."""

    @abstractmethod
    def seen(self) -> str:
        """Return the evidence that the fault has happened."""

    @abstractmethod
    def end(self) -> None:
        """End the fault; called once, also after an exception."""

    @abstractmethod
    def undone(self) -> str:
        """Return the evidence that the fault is over."""

    def earlier(self) -> list[InjectedFault]:
        """Return the faults that this fault injected before its own."""
        return []


def play(fault: ActiveFault) -> list[InjectedFault]:
    """Play one fault from its injection to the evidence of its end; return its record.

    Raises FabricError where the target is gone or the job has failed.
    """
    began = time.time()
    evidence = ""
    deadline = time.monotonic() + max(SEEN_S, fault.fault.duration_s)
    until = time.monotonic() + fault.fault.duration_s
    try:
        fault.inject()
        while time.monotonic() < until or (not evidence and time.monotonic() < deadline):
            evidence = fault.seen() or evidence
            if evidence and time.monotonic() >= until:
                break
            fault.scene.pause()
    finally:
        fault.end()
    ended = time.time()
    began = fault.began or began
    undone = _poll(fault.undone, fault.scene)
    lasts = bool(fault.fault.duration_s)
    record = InjectedFault(
        name=fault.fault.fault,
        targets=fault.targets,
        began=began,
        ended=ended if lasts else began,
        about=fault.about,
        observed=evidence,
        undone=undone,
        pids=dict(fault.pids),
        kills=fault.kills,
    )
    return [*fault.earlier(), record]


def _poll(evidence: Callable[[], str], scene: DrillScene) -> str:
    deadline = time.monotonic() + UNDONE_S
    while not (text := evidence()) and time.monotonic() < deadline:
        scene.pause()
    return text
