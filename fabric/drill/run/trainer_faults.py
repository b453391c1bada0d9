"""Faults that a trainer itself plays: in a gradient, at a micro-batch, in the snapshots, of the clock."""

import contextlib
import time

from fabric.drill.injection.point_order import SentOrder
from fabric.drill.run.active_fault import ActiveFault, DrillScene
from fabric.drill.run.process_faults import KillTrainers
from fabric.drill.schedule.drill_schedule import ScheduledFault
from fabric.errors import FabricError, Refused
from fabric.runtime.drill_orders import MOST_SECONDS, PointOrder

# Two deaths at one micro-batch are poison.
_DEATHS = 2
# The deadly micro-batch is of a step so far ahead; the number doubles while the job is faster than the drill.
_STEPS_AHEAD = 5
# A trainer has two slots for its snapshots. With so many flipped ones, it serves no other.
_FLIPPED = 2


class TrainerFault(ActiveFault):
    """The trainer changes its gradient or its clock: ``point`` and ``action`` are those of the order."""

    def __init__(self, scene: DrillScene, fault: ScheduledFault, action: str, point: str) -> None:
        super().__init__(scene, fault)
        self.targets = (fault.target,)
        self._action, self._point = action, point
        self._sent: SentOrder | None = None

    def inject(self) -> None:
        self._sent = send_order(self.scene, self.fault, self.fault.target, self._action, self._point)

    def seen(self) -> str:
        if self._sent is None:
            return ""
        self._sent.look()
        if self._sent.hit_step < 0:
            return ""
        self.began = self.began or time.time()
        step = "" if self.kind_lasts else f"at step {self._sent.hit_step}: "
        return f"{step}{self._sent.about}"

    @property
    def kind_lasts(self) -> bool:
        return bool(self.fault.duration_s)

    def end(self) -> None:
        if self._sent is not None:
            self._sent.end()

    def undone(self) -> str:
        if self._sent is None:
            raise Refused(f"{self.fault.target} has taken no order")
        self._sent.look()
        return f"{self.fault.target} has ended it" if self._sent.is_over else ""


class FlipSnapshots(KillTrainers):
    """A bit flips in all snapshots in memory, and the target dies: its next process must refuse them."""

    def __init__(self, scene: DrillScene, fault: ScheduledFault) -> None:
        super().__init__(scene, fault, (fault.target,))
        self._sent: dict[str, SentOrder] = {}
        self._log_bytes = 0

    def inject(self) -> None:
        for name in self.scene.replicas:
            self._sent[name] = send_order(self.scene, self.fault, name, "flip", "publish")

    def seen(self) -> str:
        for sent in self._sent.values():
            sent.look()
        if not self.pids:
            if all(sent.hits >= _FLIPPED for sent in self._sent.values()):
                super().inject()
            return ""
        name = self.fault.target
        refusal = self.scene.watch.replicas[name].refusal
        return f"{super().seen()}; its next process refused: {refusal}" if super().seen() and refusal else ""

    def end(self) -> None:
        for sent in self._sent.values():
            sent.end()
        super().end()

    def undone(self) -> str:
        with contextlib.suppress(FabricError):
            for sent in self._sent.values():
                sent.look()
        others = [sent for name, sent in self._sent.items() if name != self.fault.target]
        back = super().undone()
        return f"{back}; later snapshots are whole" if back and all(s.is_over for s in others) else ""


class KillMicroBatch(KillTrainers):
    """Micro-batch 0 of one step kills each trainer that computes it, until the lighthouse calls it poison."""

    def __init__(self, scene: DrillScene, fault: ScheduledFault) -> None:
        super().__init__(scene, fault, scene.replicas)
        self._sent: list[SentOrder] = []
        self._ahead, self._step = _STEPS_AHEAD, 0

    def inject(self) -> None:
        names = self.scene.replicas
        self._processes = {name: self.scene.processes.trainer(name) for name in names}
        self._starts = {name: self.scene.watch.replicas[name].starts for name in names}
        self._send()

    def _send(self) -> None:
        for sent in self._sent:
            sent.close()
        self._step = self._newest_step() + self._ahead
        order = PointOrder(self.scene.job.title, "forward", "kill", step=self._step, micro_batch=0)
        self._sent = [SentOrder(self.scene.job.run_dir(name), order) for name in self.scene.replicas]

    def _newest_step(self) -> int:
        return max(view.step for view in self.scene.watch.replicas.values())

    def seen(self) -> str:
        gone = [name for name, process in self._processes.items() if process.is_gone]
        if not gone and self._newest_step() > self._step:
            self._ahead *= 2
            self._send()
        if len(gone) < _DEATHS:
            return ""
        self.began = self.began or time.time()
        self.targets, self.pids = tuple(gone), {name: self._processes[name].pid for name in gone}
        dead = "; ".join(f"process {pid} of {name} is gone" for name, pid in self.pids.items())
        return f"{dead}, both at micro-batch 0 of step {self._step}"

    def end(self) -> None:
        for sent in self._sent:
            sent.close()
        super().end()


def send_order(scene: DrillScene, fault: ScheduledFault, replica: str, action: str, point: str) -> SentOrder:
    """Send an order to the trainer of ``replica``. Raises Refused where no trainer takes it."""
    seconds = fault.duration_s or MOST_SECONDS
    order = PointOrder(scene.job.title, point, action, seconds, fault.step or 0)
    return SentOrder(scene.job.run_dir(replica), order)
