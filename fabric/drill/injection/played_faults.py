"""The faults that an injector plays on its own trainer: signals, orders by the drill socket, memory."""

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from fabric.drill.injection.drilled_processes import DrilledProcesses, ProcessTarget
from fabric.drill.injection.duty_cycle import DutyCycle
from fabric.drill.injection.memory_ballast import Ballast
from fabric.drill.injection.point_order import SentOrder
from fabric.drill.injection.undo_guard import UndoGuard
from fabric.errors import Refused
from fabric.runtime.drill_orders import CLOCK, LINKS, MOST_SECONDS, PointOrder


class OrderedFault(msgspec.Struct, frozen=True):
    """One fault in an answer of the lighthouse."""

    number: int
    fault: str
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
    point: str = ""


@dataclass(frozen=True, slots=True)
class DrilledTrainer:
    """The trainer that the faults hit, and the guard that continues it if the injector dies."""

    job: str
    replica: str
    target: ProcessTarget
    guard: UndoGuard


class PlayedFault(ABC):
    """One fault of the trainer. ``seen`` and ``undone`` return evidence or an empty string."""

    @abstractmethod
    def inject(self, run_dir: Path) -> None:
        """Begin the fault. Raises FabricError."""

    @abstractmethod
    def seen(self) -> str:
        """Return the evidence that the fault has happened."""

    @abstractmethod
    def end(self) -> None:
        """End the fault; nothing happens if it has not begun."""

    @abstractmethod
    def undone(self) -> str:
        """Return the evidence that the fault is over."""


class _Kill(PlayedFault):
    """SIGKILL. The lighthouse sees the next process, so there is no ``undone`` here."""

    def __init__(self, target: ProcessTarget) -> None:
        self._target = target

    def inject(self, run_dir: Path) -> None:
        self._target.send(signal.SIGKILL)

    def seen(self) -> str:
        return f"process {self._target.pid} is gone" if self._target.is_gone else ""

    def end(self) -> None:
        """Leave the start of another process to the launcher."""

    def undone(self) -> str:
        return ""


class _KillServer(PlayedFault):
    """SIGKILL to the replica's checkpoint server, which its trainer then starts again."""

    def __init__(self, job: str, replica: str) -> None:
        self._processes, self._replica = DrilledProcesses(job), replica
        self._server: ProcessTarget | None = None

    def inject(self, run_dir: Path) -> None:
        self._server = self._processes.server(self._replica)
        self._server.send(signal.SIGKILL)

    def seen(self) -> str:
        server = self._server
        return f"process {server.pid} is gone" if server is not None and server.is_gone else ""

    def end(self) -> None:
        """Leave the start of another server to the trainer."""

    def undone(self) -> str:
        try:
            successor = self._processes.server(self._replica)
        except Refused:
            return ""
        successor.close()
        is_other = self._server is not None and successor.pid != self._server.pid
        return f"process {successor.pid} has taken its place" if is_other else ""


class _Stop(PlayedFault):
    """SIGSTOP, later SIGCONT."""

    def __init__(self, target: ProcessTarget, guard: UndoGuard) -> None:
        self._target, self._guard = target, guard

    def inject(self, run_dir: Path) -> None:
        self._guard.note_stop(self._target.pid)
        self._target.send(signal.SIGSTOP)

    def seen(self) -> str:
        return f"process {self._target.pid} is stopped" if self._target.is_stopped else ""

    def end(self) -> None:
        self._target.send(signal.SIGCONT)
        self._guard.note_continue(self._target.pid)

    def undone(self) -> str:
        if self._target.is_stopped:
            return ""
        return f"process {self._target.pid} {'is gone' if self._target.is_gone else 'runs'}"


class _Slow(_Stop):
    """SIGSTOP for three quarters of the time."""

    def __init__(self, target: ProcessTarget, guard: UndoGuard) -> None:
        super().__init__(target, guard)
        self._cycle = DutyCycle(target)

    def inject(self, run_dir: Path) -> None:
        super().inject(run_dir)
        self._cycle.start()

    def seen(self) -> str:
        return self._cycle.evidence

    def end(self) -> None:
        self._cycle.close()
        super().end()


class _Order(PlayedFault):
    """An order by the trainer's drill socket, whose connection is the order's lease."""

    def __init__(self, target: ProcessTarget, order: PointOrder) -> None:
        self._target, self._order = target, order
        self._sent: SentOrder | None = None

    def inject(self, run_dir: Path) -> None:
        self._sent = SentOrder(run_dir, self._order)

    def seen(self) -> str:
        if self._sent is None:
            return ""
        self._sent.look()
        is_kill = self._order.action == "kill"
        if self._sent.hit_step < 0 or (is_kill and not self._target.is_gone):
            return ""
        what = self._sent.about or ("is gone" if is_kill else "stands still")
        if self._order.point in (CLOCK, LINKS):
            return f"process {self._target.pid}: {what}"
        return f"process {self._target.pid} {what} at {self._order.point} of step {self._sent.hit_step}"

    def end(self) -> None:
        if self._sent is not None:
            self._sent.end()

    def undone(self) -> str:
        if self._order.action == "kill" or self._sent is None:
            return ""
        self._sent.look()
        if self._target.is_gone:
            return f"process {self._target.pid} is gone"
        return f"process {self._target.pid} has ended it" if self._sent.is_over else ""


class _Memory(PlayedFault):
    """A process that holds a quarter of the free memory, 1 GB at most."""

    def __init__(self) -> None:
        self._ballast: Ballast | None = None

    def inject(self, run_dir: Path) -> None:
        self._ballast = Ballast()

    def seen(self) -> str:
        return self._ballast.evidence if self._ballast is not None else ""

    def end(self) -> None:
        if self._ballast is not None:
            self._ballast.close()

    def undone(self) -> str:
        return f"process {self._ballast.pid} has ended" if self._ballast is not None else ""


# The faults by orders: action and point.
_ORDERS: Mapping[str, tuple[str, str]] = {
    "hang": ("hold", "ring"),
    "flip-gradient": ("flip", "gather"),
    "poison": ("nan", "gather"),
    "clock": ("leap", CLOCK),
    "cut-in": ("cut", LINKS),
    "lossy-link": ("lose", LINKS),
}


def make_played(order: OrderedFault, drill: str, trainer: DrilledTrainer) -> PlayedFault:
    """Return the fault, not yet injected. Raises Refused for a fault of another version."""
    target, guard = trainer.target, trainer.guard

    def ordered(action: str, point: str) -> PlayedFault:
        return _Order(target, PointOrder(drill, point, action, order.seconds or MOST_SECONDS))

    if order.fault in _ORDERS:
        action, point = _ORDERS[order.fault]
        return ordered(action, order.point or point)
    makers: Mapping[str, Callable[[], PlayedFault]] = {
        "kill": lambda: ordered("kill", order.point) if order.point else _Kill(target),
        "stop": lambda: _Stop(target, guard),
        "slow": lambda: _Slow(target, guard),
        "kill-server": lambda: _KillServer(trainer.job, trainer.replica),
        "memory": _Memory,
    }
    if order.fault not in makers:
        raise Refused(f"this injector plays no {order.fault[:40]}: use a drill of its version")
    return makers[order.fault]()
