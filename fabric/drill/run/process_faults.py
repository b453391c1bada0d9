"""Faults of processes: killed, stopped, slowed."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from fabric.drill.injection.drilled_processes import ProcessTarget
from fabric.drill.injection.duty_cycle import DutyCycle
from fabric.drill.judge.drill_record import InjectedFault
from fabric.drill.run.active_fault import ActiveFault, DrillScene
from fabric.drill.run.journal_watch import WatchedReplica
from fabric.drill.schedule.drill_schedule import ScheduledFault
from fabric.errors import Refused


class KillTrainers(ActiveFault):
    """SIGKILL to the trainers of ``replicas``, all in one moment."""

    def __init__(self, scene: DrillScene, fault: ScheduledFault, replicas: Sequence[str]) -> None:
        super().__init__(scene, fault)
        self.targets, self.kills = tuple(replicas), True
        self._processes: dict[str, ProcessTarget] = {}
        self._starts: dict[str, int] = {}

    def inject(self) -> None:
        self._processes = {name: self.scene.processes.trainer(name) for name in self.targets}
        self.pids = {name: process.pid for name, process in self._processes.items()}
        self._starts = {name: self.scene.watch.replicas[name].starts for name in self.targets}
        self.began = time.time()
        for process in self._processes.values():
            process.send(signal.SIGKILL)

    def seen(self) -> str:
        if not all(process.is_gone for process in self._processes.values()):
            return ""
        return "; ".join(f"process {pid} of {name} is gone" for name, pid in self.pids.items())

    def end(self) -> None:
        for process in self._processes.values():
            process.close()

    def undone(self) -> str:
        views = [self.scene.watch.replicas[name] for name in self.targets]
        if any(view.starts <= self._starts.get(view.replica, view.starts) for view in views):
            return ""
        return "; ".join(f"process {view.pid} of {view.replica} started" for view in views)


class KillJoining(KillTrainers):
    """SIGKILL to a trainer, and to its next process before that process has committed a step."""

    def __init__(self, scene: DrillScene, fault: ScheduledFault, replicas: Sequence[str]) -> None:
        super().__init__(scene, fault, replicas)
        self._name = replicas[0]
        self._earlier: list[InjectedFault] = []
        self._second: ProcessTarget | None = None

    def seen(self) -> str:
        view = self.scene.watch.replicas[self._name]
        if self._second is None and view.starts > self._starts[self._name]:
            self._note_first(view.pid)
            self._second = ProcessTarget(view.pid)
            self.began = time.time()
            self._second.send(signal.SIGKILL)
        elif self._second is not None and self._second.is_gone:
            self.scene.watch.look()
            if view.pid == self._second.pid and not view.commits:
                return f"process {view.pid} of {self._name} is gone, and its journal has no commit"
            # The process had joined already: this death counts as a kill, and its next process is due.
            self._starts[self._name] = view.starts - (view.pid != self._second.pid)
            self.pids = {self._name: self._second.pid}
            self._second.close()
            self._second = None
        return ""

    def end(self) -> None:
        super().end()
        if self._second is not None:
            self._starts[self._name] += 1
            self.pids = {self._name: self._second.pid}
            self._second.close()

    def earlier(self) -> list[InjectedFault]:
        return self._earlier

    def _note_first(self, started: int) -> None:
        pid = self.pids[self._name]
        self._earlier.append(
            InjectedFault(
                "kill",
                (self._name,),
                self.began,
                self.began,
                observed=f"process {pid} of {self._name} is gone",
                undone=f"process {started} of {self._name} started",
                pids=dict(self.pids),
                kills=True,
            )
        )


class KillRecovering(KillTrainers):
    """SIGKILL to a second trainer while the others recover from the death of the first.

    The second trainer is stopped before the first dies. No recovery ends without its report, so the second
    kill surely hits a recovery.
    """

    def __init__(self, scene: DrillScene, fault: ScheduledFault, replicas: Sequence[str]) -> None:
        super().__init__(scene, fault, replicas)
        self._first, self._second = replicas
        self._first_record: InjectedFault | None = None
        self._undone = ""
        self._unrest: dict[str, int] = {}
        self._unrest_t: dict[str, float] = {}

    def inject(self) -> None:
        scene = self.scene
        self._processes = {name: scene.processes.trainer(name) for name in self.targets}
        self._starts = {name: scene.watch.replicas[name].starts for name in self.targets}
        first, second = (self._processes[name] for name in self.targets)
        scene.guard.note_stop(second.pid)
        second.send(signal.SIGSTOP)
        scene.watch.look()
        self._unrest = {name: view.unrest for name, view in self._survivors().items()}
        began = time.time()
        first.send(signal.SIGKILL)
        self._first_record = InjectedFault(
            "kill",
            (self._first,),
            began,
            began,
            observed=f"process {first.pid} of {self._first} is gone",
            pids={self._first: first.pid},
            kills=True,
        )
        self.targets = (self._second,)

    def seen(self) -> str:
        second = self._processes[self._second]
        survivors = self._survivors()
        if not self.pids:
            if any(view.unrest > self._unrest[name] for name, view in survivors.items()):
                self._unrest_t = {
                    name: view.unrest_t
                    for name, view in survivors.items()
                    if view.unrest > self._unrest[name]
                }
                self.pids, self.began = {self._second: second.pid}, time.time()
                second.send(signal.SIGKILL)
            return ""
        if not (second.is_gone and self._processes[self._first].is_gone):
            return ""
        # The journals tell, also when the recovery has ended meanwhile.
        name = next((x for x, t in self._unrest_t.items() if self._recovers(survivors[x], t)), "")
        return f"process {second.pid} of {self._second} is gone while {name} recovers" if name else ""

    def end(self) -> None:
        second = self._processes.get(self._second)
        if second is not None:
            second.send(signal.SIGCONT)
            self.scene.guard.note_continue(second.pid)
        super().end()

    def undone(self) -> str:
        self.targets = (self._first, self._second)
        self._undone = super().undone()
        self.targets = (self._second,)
        return self._undone

    def earlier(self) -> list[InjectedFault]:
        first = self._first_record
        return [replace(first, undone=self._undone)] if first is not None else []

    def _recovers(self, view: WatchedReplica, unrest_t: float) -> bool:
        """Whether a survivor committed nothing from its abort to the second kill."""
        return not any(unrest_t < t <= self.began for t in view.commit_times)

    def _survivors(self) -> dict[str, WatchedReplica]:
        return {
            name: view
            for name, view in self.scene.watch.replicas.items()
            if name not in (self._first, self._second)
        }


class StopProcess(ActiveFault):
    """SIGSTOP to one process, later SIGCONT."""

    def __init__(
        self, scene: DrillScene, fault: ScheduledFault, find: Callable[[], ProcessTarget], replica: str = ""
    ) -> None:
        super().__init__(scene, fault)
        self._find = find
        self.targets = (replica,) if replica else ()
        self._process: ProcessTarget | None = None

    def inject(self) -> None:
        self._process = self._find()
        self.about = self.about or ("" if self.targets else f"process {self._process.pid}")
        self.scene.guard.note_stop(self._process.pid)
        self._process.send(signal.SIGSTOP)

    def seen(self) -> str:
        process = self._process
        return f"process {process.pid} is stopped" if process is not None and process.is_stopped else ""

    def end(self) -> None:
        if self._process is not None:
            self._process.send(signal.SIGCONT)
            self.scene.guard.note_continue(self._process.pid)

    def undone(self) -> str:
        process = self._process
        if process is None or process.is_stopped:
            return ""
        return f"process {process.pid} {'is gone' if process.is_gone else 'runs'}"


class SlowProcess(StopProcess):
    """A duty cycle of SIGSTOP and SIGCONT."""

    def __init__(
        self, scene: DrillScene, fault: ScheduledFault, find: Callable[[], ProcessTarget], replica: str = ""
    ) -> None:
        super().__init__(scene, fault, find, replica)
        self._cycle: DutyCycle | None = None

    def inject(self) -> None:
        super().inject()
        assert self._process is not None
        self._cycle = DutyCycle(self._process)
        self._cycle.start()

    def seen(self) -> str:
        return self._cycle.evidence if self._cycle is not None else ""

    def end(self) -> None:
        if self._cycle is not None:
            self._cycle.close()
        super().end()


class KillServer(ActiveFault):
    """SIGKILL to a replica's checkpoint server, which its trainer then starts again."""

    def __init__(self, scene: DrillScene, fault: ScheduledFault) -> None:
        super().__init__(scene, fault)
        self.about = f"the checkpoint server of {fault.target}"
        self._process: ProcessTarget | None = None

    def inject(self) -> None:
        self._process = self.scene.processes.server(self.fault.target)
        self._process.send(signal.SIGKILL)

    def seen(self) -> str:
        process = self._process
        return f"process {process.pid} is gone" if process is not None and process.is_gone else ""

    def end(self) -> None:
        """Leave the start of another server to the trainer."""

    def undone(self) -> str:
        try:
            successor = self.scene.processes.server(self.fault.target)
        except Refused:
            return ""
        successor.close()
        is_other = self._process is not None and successor.pid != self._process.pid
        return f"process {successor.pid} has taken its place" if is_other else ""
