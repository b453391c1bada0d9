"""Faults at a named point of a step, which the trainer itself plays: held there, or killed there."""

import time

from fabric.drill.injection.drilled_processes import ProcessTarget
from fabric.drill.injection.point_order import SentOrder
from fabric.drill.run.active_fault import ActiveFault, DrillScene
from fabric.drill.schedule.drill_schedule import ScheduledFault
from fabric.errors import Refused
from fabric.runtime.drill_orders import PointOrder

# The exchange thread is inside the ring here, with its sockets open.
IN_THE_EXCHANGE = "ring"


class PointFault(ActiveFault):
    """The trainer stands still at a point until the fault's end, or dies there."""

    def __init__(self, scene: DrillScene, fault: ScheduledFault, action: str) -> None:
        super().__init__(scene, fault)
        self.targets, self.kills = (fault.target,), action == "kill"
        self._action, self._point = action, fault.point or IN_THE_EXCHANGE
        self._sent: SentOrder | None = None
        self._process: ProcessTarget | None = None
        self._starts = 0

    def inject(self) -> None:
        name = self.fault.target
        self._process = self.scene.processes.trainer(name)
        self._starts = self.scene.watch.replicas[name].starts
        self.pids = {name: self._process.pid} if self.kills else {}
        seconds = self.fault.duration_s
        order = PointOrder(self.scene.job.title, self._point, self._action, seconds, self.fault.step or 0)
        self._sent = SentOrder(self.scene.job.run_dir(name), order)

    def seen(self) -> str:
        if self._sent is None or self._process is None:
            return ""
        self._sent.look()
        if self._sent.hit_step < 0 or (self.kills and not self._process.is_gone):
            return ""
        self.began = self.began or time.time()
        what = "is gone" if self.kills else "stands still"
        return f"process {self._process.pid} {what} at {self._point} of step {self._sent.hit_step}"

    def end(self) -> None:
        if self._sent is not None:
            self._sent.end()

    def undone(self) -> str:
        view = self.scene.watch.replicas[self.fault.target]
        if self.kills:
            return f"process {view.pid} of {view.replica} started" if view.starts > self._starts else ""
        if self._sent is None:
            raise Refused(f"{self.fault.target} has taken no order")
        self._sent.look()
        return f"{self.fault.target} went on" if self._sent.is_over else ""
