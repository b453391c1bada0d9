"""The user's loop: waits for orders, computes micro-batches, runs the update, loads states; one at a time.

Gradients and states are symbols. The kept gradient is the tuple of micro-batches in the order in which they
were added; a state is its step and the hash chain of every gradient applied to it.
"""

import hashlib
from collections import deque
from typing import TYPE_CHECKING

from sim.server import Gradient

from fabric.model import SnapshotRef
from fabric.protocol import member_io as io

if TYPE_CHECKING:
    from sim.trainer import Trainer


def chain(digest: str, gradient: Gradient) -> str:
    return hashlib.blake2b(f"{digest}{gradient.digest}".encode(), digest_size=6).hexdigest()


class MainThread:
    """``step`` and ``digest`` are the state in memory, ``gradient`` the kept gradient."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.step = 0
        self.digest = trainer.world.initial_digest(trainer.host)
        self.gradient: tuple[int, ...] = ()
        self.closing = False
        self._orders: deque[io.Effect] = deque()
        self._busy = True
        self._digest_wanted = True

    def start(self) -> None:
        """What ``attach`` and the first ``_ready`` do."""
        if not self.trainer.server.memory.snapshots:
            self.snapshot(0)
        self._ready()

    def order(self, order: io.Effect) -> None:
        self._orders.append(order)
        self._obey()

    def _obey(self) -> None:
        while not self._busy and self._orders and self.trainer.alive:
            order = self._orders.popleft()
            if isinstance(order, io.Finish):
                self.trainer.exit(0, "finished")
            elif isinstance(order, io.Stop):
                self.trainer.exit(order.code, order.reason)
            elif isinstance(order, io.DropGradient):
                self.gradient = ()
            elif isinstance(order, io.TakeSnapshot):
                self.snapshot(self.trainer.core.state.generation)
            elif isinstance(order, io.Install):
                self._install(order)
            elif isinstance(order, io.Compute):
                self._compute(order)
            elif isinstance(order, io.Apply):
                self._apply(order)

    def _work(self, seconds: float, then: "object") -> None:
        self._busy = True

        def done() -> None:
            self._busy = False
            then()  # type: ignore[operator]
            self._obey()

        self.trainer.after(seconds, done)

    # --- orders ------------------------------------------------------------------------------------

    def _compute(self, order: io.Compute) -> None:
        assert not self.closing, "told to compute after the loop has ended"
        assert order.step == self.step, f"compute for step {order.step} with the state at {self.step}"
        clockwork, speed = self.trainer.clockwork, self.trainer.world.settings.compute_s

        def computed() -> None:
            self.gradient += order.micro_batches
            event = io.Computed(order.step, order.micro_batches, float(len(order.micro_batches)))
            self.trainer.feed(event)

        self._work(sum(speed * clockwork.between(0.7, 1.5) for _ in order.micro_batches), computed)

    def _apply(self, order: io.Apply) -> None:
        assert not self.closing, "told to apply after the loop has ended"
        generation = self.trainer.core.state.generation
        # The buffer is read some time after the order was given, while other threads go on.
        self._work(self.trainer.clockwork.between(0.0, 0.003), lambda: self._scatter(order, generation))

    def _scatter(self, order: io.Apply, generation: int) -> None:
        trainer = self.trainer
        if order.held is not None:
            gradient = trainer.exchange.slots[order.step]
        else:
            assert trainer.transfer.gradient is not None
            gradient = trainer.transfer.gradient
            trainer.clockwork.counts["path: replay"] += 1
        trainer.world.checks.applied(trainer, order, gradient, generation)
        self._digest_wanted = order.digest
        self.gradient = ()

        def updated() -> None:
            self.step += 1
            self.digest = chain(self.digest, gradient)
            trainer.world.checks.state(trainer, generation, self.step, self.digest)
            self._ready()

        self._work(trainer.clockwork.between(0.002, 0.02), updated)

    def _ready(self) -> None:
        trainer = self.trainer
        self._busy = False
        generation = trainer.core.state.generation
        if generation > 0 and trainer.clockwork.chance(0.15):
            self.snapshot(generation)
        if self.step >= trainer.world.until:
            self.closing = True
            trainer.feed(io.Closing())
            return
        digest = self.digest if self._digest_wanted else ""
        self._digest_wanted = False
        trainer.feed(io.Ready(self.step, digest))

    def _install(self, order: io.Install) -> None:
        arrived = self.trainer.transfer.state
        assert arrived is not None and arrived.step == order.step
        self.gradient = ()

        def loaded() -> None:
            assert arrived.digest == order.digest, "the fetched state is not the one that was wanted"
            self.step, self.digest = arrived.step, arrived.digest
            if self.trainer.server.alive:
                self.trainer.server.publish_snapshot(arrived)
            self.trainer.world.happened("install", self.trainer.host)
            self.trainer.clockwork.counts["installed"] += 1
            self.closing = self.step >= self.trainer.world.until
            self.trainer.feed(io.Installed(order.step, order.digest, last=self.closing))

        self._work(self.trainer.clockwork.between(0.005, 0.05), loaded)

    def snapshot(self, generation: int) -> None:
        """Copied while the user's code goes on; the server serves it when it is complete."""
        trainer, step, digest = self.trainer, self.step, self.digest
        server = trainer.server
        if not server.alive:
            trainer.server = trainer.world.ensure_server(trainer)
            trainer.feed(io.Snapshotted(step, ""))
            return
        server.take_slot()

        def copied() -> None:
            if server.alive:
                server.publish_snapshot(SnapshotRef(generation, step, digest))
            trainer.feed(io.Snapshotted(step, digest if server.alive else ""))

        trainer.after(trainer.clockwork.between(0.002, 0.04), copied)
