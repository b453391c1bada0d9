"""Plays faults, for a drill on the job that it starts, and for an injector on its trainer.

Each kind of fault is a script: a generator that begins the fault at its first look, and yields at each look
the evidence that the fault happened, or an empty text. Once the fault is to end, the script undoes it, and
yields the evidence that it is over.
"""

import contextlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import field

from fabric.drill.injection.drilled_processes import DrilledProcesses, ProcessTarget
from fabric.drill.injection.undo_guard import UndoGuard
from fabric.drill.judge.drill_record import InjectedFault
from fabric.drill.schedule.drill_schedule import ScheduledFault
from fabric.errors import ProtocolError, Refused
from fabric.protocol.messages.wire import decode_line
from fabric.runtime.drill_orders import (
    ADVICE,
    CLOCK,
    DRILL_SOCKET_NAME,
    LINKS,
    MOST_SECONDS,
    PointOrder,
)
from fabric.runtime.private_folder import socket_path
from fabric.runtime.system_calls import available_bytes, bytes_of

_ANSWER_S = 10.0
_MAX_BYTES = 1 << 16
_MOST_MEMORY_BYTES = 1 << 30
_SHARE = 4
# The ballast writes to each page, then waits for the end of its input.
_BALLAST = "import sys; held = b'1' * int(sys.argv[1]); print(len(held), flush=True); sys.stdin.read()"


class SentOrder:
    """An order that a trainer has taken. Close it to end the order."""

    def __init__(self, run_dir: Path, order: PointOrder) -> None:
        self._data = b""
        self.hit_step = -1  # the step at which the trainer obeyed; -1: not yet
        self.hits = 0  # how often the trainer obeyed
        self.about = ""  # what the trainer changed at its first hit
        self.is_over = False  # the trainer goes on
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.close = self._socket.close
        try:
            self._socket.settimeout(_ANSWER_S)
            with socket_path(run_dir, DRILL_SOCKET_NAME) as path:
                self._socket.connect(path)
            self._socket.sendall(order.line())
            while b"\n" not in self._data:
                received = self._socket.recv(_MAX_BYTES)
                if not received:
                    raise OSError("the connection ended")
                self._data += received
        except OSError as error:
            self._socket.close()
            raise Refused(
                f"no trainer takes orders of a drill in {run_dir} ({error}): start it with FABRIC_DRILL=1"
            ) from error
        answer, _, self._data = self._data.partition(b"\n")
        body = decode_line(answer, ADVICE)
        if body.get("ok") is not True:
            self._socket.close()
            raise Refused(str(body.get("error"))[:300])

    def look(self) -> None:
        """Read the reports that have come. Raises ProtocolError for a malformed report."""
        with contextlib.suppress(OSError):
            while select.select([self._socket], [], [], 0)[0]:
                received = self._socket.recv(_MAX_BYTES)
                if not received:
                    break
                self._data += received
                if len(self._data) > _MAX_BYTES:
                    raise ProtocolError("the trainer's reports are too long: use a trainer of this version")
        *lines, self._data = self._data.split(b"\n")
        for body in (decode_line(line, ADVICE) for line in lines):
            if "hit" in body:
                self.hit_step, self.hits = int(body.get("step") or 0), self.hits + 1
                self.about = self.about or str(body.get("about") or "")[:200]
            self.is_over = self.is_over or "over" in body

    def end(self) -> None:
        """End the order, and go on reading the reports."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


_CYCLE_S, _RUNS_S = 0.1, 0.025
_STOPS_SEEN = 3

Script = Iterator[str]
Evidence = Callable[[], str]

# The faults that the trainer itself plays: the action and the point of the order.
ORDERS: Mapping[str, tuple[str, str]] = {
    "hang": ("hold", "ring"),  # the exchange thread is inside the ring here, with its sockets open
    "flip-gradient": ("flip", "gather"),
    "poison": ("nan", "gather"),
    "clock": ("leap", CLOCK),
    "cut-in": ("cut", LINKS),
    "lossy-link": ("lose", LINKS),
}


class PlayedFault(InjectedFault):
    """One fault, from its beginning to the evidence that it is over."""

    problem: str = ""  # why it cannot be played
    has_begun: bool = False
    is_ended: bool = False  # the script undoes it, or has undone it
    earlier: list["PlayedFault"] = field(default_factory=list)  # those that it has played before its own
    script: Script = field(default_factory=lambda: iter(()))

    @property
    def is_over(self) -> bool:
        return bool(self.undone or self.problem)

    def look(self) -> None:
        """Take the evidence of this moment. Raises FabricError where the target is gone."""
        self.has_begun = True
        text = next(self.script, "")
        if self.is_ended:
            self.undone = self.undone or text
        else:
            self.observed = text or self.observed

    def end(self) -> None:
        """Undo the fault; nothing happens if it has ended, or if it has not begun."""
        if not self.is_ended:
            self.is_ended = True
            if self.has_begun:
                self.look()

    def until_end(self, seen: Evidence) -> Script:
        """Yield the evidence until the fault is to end."""
        while not self.is_ended:
            yield seen()


def always(evidence: Evidence) -> Script:
    while True:
        yield evidence()


class FaultScene(Protocol):
    """The things that a fault of trainers may touch."""

    @property
    def processes(self) -> DrilledProcesses: ...

    @property
    def guard(self) -> UndoGuard: ...

    def run_dir(self, replica: str) -> Path: ...

    @property
    def drill(self) -> str:
        """The name of the drill in the logs of its trainers."""

    def restarted(self, names: Sequence[str]) -> Evidence:
        """Return the evidence, from now on, that each of the replicas has another process."""


def kill(scene: FaultScene, fault: PlayedFault, names: Sequence[str]) -> Script:
    """SIGKILL to trainers, all at once."""
    processes, started = {name: scene.processes.trainer(name) for name in names}, scene.restarted(names)
    fault.targets, fault.pids = tuple(processes), {name: x.pid for name, x in processes.items()}
    fault.began = time.time()
    for process in processes.values():
        process.send(signal.SIGKILL)
    yield from fault.until_end(lambda: gone(processes))
    yield from always(started)


def kill_server(scene: FaultScene, fault: PlayedFault, wanted: ScheduledFault) -> Script:
    """SIGKILL to the replica's checkpoint server, which its trainer then starts again."""
    server, fault.about = scene.processes.server(wanted.target), f"the checkpoint server of {wanted.target}"
    server.send(signal.SIGKILL)
    yield from fault.until_end(lambda: f"process {server.pid} is gone" if server.is_gone else "")

    def successor() -> str:
        with contextlib.suppress(Refused):
            pid = scene.processes.server(wanted.target).pid
            return f"process {pid} has taken its place" if pid != server.pid else ""
        return ""

    yield from always(successor)


def stop_process(fault: PlayedFault, process: ProcessTarget, guard: UndoGuard) -> Script:
    """SIGSTOP, later SIGCONT."""
    with continued(process, guard):
        process.send(signal.SIGSTOP)
        yield from fault.until_end(lambda: f"process {process.pid} is stopped" if process.is_stopped else "")
    yield from always(lambda: _runs(process))


def stop(scene: FaultScene, fault: PlayedFault, wanted: ScheduledFault) -> Script:
    """SIGSTOP to a trainer, later SIGCONT."""
    fault.targets = (wanted.target,)
    yield from stop_process(fault, scene.processes.trainer(wanted.target), scene.guard)


def slow(scene: FaultScene, fault: PlayedFault, wanted: ScheduledFault) -> Script:
    """SIGSTOP to a trainer for three quarters of the time, later SIGCONT."""
    fault.targets, process = (wanted.target,), scene.processes.trainer(wanted.target)
    stops, over = 0, threading.Event()

    def take_turns() -> None:
        nonlocal stops
        while not over.is_set():
            process.send(signal.SIGSTOP)
            over.wait(_CYCLE_S - _RUNS_S)
            stops += process.is_stopped
            process.send(signal.SIGCONT)
            over.wait(_RUNS_S)

    thread = threading.Thread(target=take_turns, name="fabric-drill-slow", daemon=True)
    with continued(process, scene.guard):
        thread.start()
        try:
            yield from fault.until_end(
                lambda: f"process {process.pid} was stopped {stops} times" if stops >= _STOPS_SEEN else ""
            )
        finally:
            over.set()
            thread.join()
    yield from always(lambda: _runs(process))


def memory(_: FaultScene, fault: PlayedFault, __: ScheduledFault) -> Script:
    """A process that holds a quarter of the free memory until the fault's end, or until the player dies."""
    fault.about = "this host's memory"
    wanted = min(_MOST_MEMORY_BYTES, available_bytes() // _SHARE)
    command = [sys.executable, "-S", "-c", _BALLAST, str(wanted)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:

        def evidence() -> str:
            held = bytes_of(Path(f"/proc/{process.pid}/status"), "VmRSS") or 0  # the kernel's count
            return f"process {process.pid} holds {held >> 20} MB" if held >= wanted else ""

        yield from fault.until_end(evidence)
    yield from always(lambda: f"process {process.pid} has ended")


def obey(scene: FaultScene, fault: PlayedFault, wanted: ScheduledFault) -> Script:
    """The trainer stands still or dies at a point, or changes its gradient or its clock.

    The connection to its drill socket is the order's lease.
    """
    name = wanted.target
    action, point = ORDERS.get(wanted.fault, (wanted.fault, wanted.point))
    order = order_of(scene, wanted, action, wanted.point or point)
    process, started = scene.processes.trainer(name), scene.restarted((name,))
    is_kill = action == "kill"
    fault.targets, fault.pids = (name,), {name: process.pid} if is_kill else {}
    sent = SentOrder(scene.run_dir(name), order)

    def obeyed() -> str:
        sent.look()
        if sent.hit_step < 0 or (is_kill and not process.is_gone):
            return ""
        fault.began = fault.began or time.time()
        what = sent.about or ("is gone" if is_kill else "stands still")
        if order.point in (CLOCK, LINKS):
            return f"process {process.pid}: {what}"
        return f"process {process.pid} {what} at {order.point} of step {sent.hit_step}"

    def is_over() -> str:
        sent.look()
        if process.is_gone:
            return f"process {process.pid} is gone"
        return f"process {process.pid} has ended it" if sent.is_over else ""

    try:
        yield from fault.until_end(obeyed)
    finally:
        sent.end()
    yield from always(started if is_kill else is_over)


def order_of(scene: FaultScene, fault: ScheduledFault, action: str, point: str) -> PointOrder:
    """Return an order to a trainer's drill socket."""
    return PointOrder(scene.drill, point, action, fault.duration_s or MOST_SECONDS, fault.step or 0)


def gone(processes: Mapping[str, ProcessTarget]) -> str:
    """Return the evidence that all of the processes, by replica, are gone."""
    if not all(process.is_gone for process in processes.values()):
        return ""
    return "; ".join(f"process {process.pid} of {name} is gone" for name, process in processes.items())


@contextlib.contextmanager
def continued(process: ProcessTarget, guard: UndoGuard) -> Iterator[None]:
    """List a process with the guard, and continue it at the end of the block."""
    guard.note_stop(process.pid)
    try:
        yield
    finally:
        process.send(signal.SIGCONT)
        guard.note_continue(process.pid)


def _runs(process: ProcessTarget) -> str:
    if process.is_stopped:
        return ""
    return f"process {process.pid} {'is gone' if process.is_gone else 'runs'}"


# The faults of one trainer, which an injector plays too.
PLAYERS: Mapping[str, Callable[[FaultScene, PlayedFault, ScheduledFault], Script]] = {
    "kill": lambda scene, fault, wanted: (
        obey(scene, fault, wanted) if wanted.point else kill(scene, fault, (wanted.target,))
    ),
    "stop": stop,
    "slow": slow,
    "kill-server": kill_server,
    "memory": memory,
    **dict.fromkeys(ORDERS, obey),
}
