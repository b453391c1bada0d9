"""The user's loop: waits for effects, computes micro-batches, applies updates and loads states, one at a
time.

Gradients and states are symbols. The kept gradient is the tuple of micro-batches in the order in which they
were added; a state is its step and the hash chain of every gradient applied to it.
"""

import hashlib
from collections import deque
from typing import TYPE_CHECKING, cast

from sim.checkers import demand
from sim.server import FLIPPED, Gradient

from fabric.model import DataPlan, SnapshotRef
from fabric.protocol.messages import member_events as io

if TYPE_CHECKING:
    from sim.trainer import Trainer


def chain(digest: str, gradient: Gradient) -> str:
    following = hashlib.blake2b(f"{digest}{gradient.digest}".encode(), digest_size=6).hexdigest()
    return following + FLIPPED if FLIPPED in digest else following


class MainThread:
    """``step`` and ``digest`` are the state in memory, ``gradient`` the kept gradient."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.step = 0
        self.digest = trainer.world.initial_digest(trainer.host)
        self.said = ""  # the digest of the state; empty if it was not taken
        self.gradient: tuple[int, ...] = ()
        self.closing = False
        self.at: tuple[int, int] | None = None  # (step, micro-batch) under way, in worlds where that matters
        self._orders: deque[io.Effect] = deque()
        self._busy = True
        self._digest_wanted = True
        self._has_met = False  # another member
        self.streaming = False  # whether the last backward of an order runs
        # the step and the gradient that was reduced in place
        self.given: tuple[int, tuple[int, ...]] = (-1, ())

    @property
    def is_busy(self) -> bool:
        """Whether the main thread is in user code, or works for it."""
        return self._busy

    def start(self) -> None:
        """Do the work of ``attach``, then the first ``_ready``."""
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
                self.trainer.finish(order)
            elif isinstance(order, io.Stop):
                self.trainer.stop(order)
            elif isinstance(order, io.DropGradient):
                self.gradient = ()
            elif isinstance(order, io.TellDigest):
                self._tell_digest(order)
            elif isinstance(order, io.TakeSnapshot):
                self.take(order)
            elif isinstance(order, io.Install):
                self._install(order)
            elif isinstance(order, io.Compute):
                self._compute(order)
            elif isinstance(order, io.Apply):
                self._apply(order)

    @property
    def will_stop(self) -> bool:
        """Whether the core has stopped, but this thread has not yet taken the effect to stop."""
        return any(isinstance(order, io.Stop) for order in self._orders)

    def _work(self, seconds: float, then: "object") -> None:
        self._busy = True

        def done() -> None:
            if self.trainer.host in self.trainer.world.lingering:
                self.trainer.after(0.1, done)
                return
            self._busy = False
            then()  # type: ignore[operator]
            self._obey()

        self.trainer.after(seconds, done)

    # --- orders ------------------------------------------------------------------------------------

    def _compute(self, order: io.Compute) -> None:
        demand(not self.closing, "told to compute after the loop has ended")
        demand(order.step == self.step, f"compute for step {order.step} with the state at {self.step}")
        clockwork, speed = self.trainer.clockwork, self.trainer.world.settings.compute_s

        def computed() -> None:
            self.gradient += order.micro_batches
            self.streaming = False
            weight = float(len(order.micro_batches))
            redo = self._redo()
            self.trainer.feed(io.Computed(order.step, order.micro_batches, weight, redo=redo))
            self.trainer.ring.finished(order.step, changed=bool(redo))

        if order.step == self.given[0] and set(order.micro_batches) & set(self.given[1]):
            clockwork.counts["path: what was given away is computed again"] += 1
        seconds = [speed * clockwork.between(0.7, 1.5) for _ in order.micro_batches]
        self._stream(order, sum(seconds[:-1]))
        if self.trainer.world.settings.poison:
            self._walk_through(order, seconds)
        self._work(sum(seconds), computed)

    def _stream(self, order: io.Compute, seconds: float) -> None:
        """In some worlds, begin the exchange with the last backward."""
        if not self.trainer.world.settings.streaming or not order.micro_batches:
            return

        def begun() -> None:
            self.streaming = True
            self.trainer.feed(io.Streaming(order.step, float(len(order.micro_batches))))

        self.trainer.after(seconds, begun)

    def _redo(self) -> str:
        """In rare cases, let user code change a gradient that is already being exchanged."""
        clockwork, trainer = self.trainer.clockwork, self.trainer
        world = trainer.world
        if not trainer.ring.awaited or world.blackout or world.find_leader(trainer.host) is None:
            return ""  # a round is redone only while a lighthouse leads, or soon will
        if not clockwork.chance(0.005):
            return ""
        clockwork.counts["path: a streamed gradient was changed"] += 1
        return "a gradient was changed after the last backward"

    def _walk_through(self, order: io.Compute, seconds: list[float]) -> None:
        """Note the micro-batch under way, and die at a poison micro-batch."""
        trainer, begun = self.trainer, 0.0

        def reach(place: tuple[int, int] | None) -> None:
            self.at = place
            if place in trainer.world.settings.poison:
                trainer.world.killed_by(place, trainer)
                trainer.world.kill_trainer(trainer.host)

        for micro_batch, each in zip(order.micro_batches, seconds, strict=True):
            trainer.after(begun, lambda place=(order.step, micro_batch): reach(place))
            begun += each
        trainer.after(begun, lambda: reach(None))

    def _apply(self, order: io.Apply) -> None:
        demand(not self.closing, "told to apply after the loop has ended")
        # The main thread reads the buffer some time after the effect, while other threads go on.
        self._work(self.trainer.clockwork.between(0.0, 0.003), lambda: self._scatter(order))

    def _scatter(self, order: io.Apply) -> None:
        trainer, generation = self.trainer, order.generation
        if order.prepared is not None:
            gradient = trainer.ring.result(order.step)
        else:
            demand(trainer.transfer.gradient is not None, "told to replay a gradient that never arrived")
            gradient = cast(Gradient, trainer.transfer.gradient)
            trainer.clockwork.counts["path: replay"] += 1
        trainer.world.checks.applied(trainer, order, gradient, generation)
        if order.prepared is not None:
            newest = trainer.core.epochs.newest
            if (
                newest is not None
                and newest.epoch > order.prepared.epoch
                and any(x.joining for x in newest.roster)
            ):
                trainer.world.happened("commit beside a newcomer", trainer.host)
            trainer.world.happened("commit", trainer.host)
        self._digest_wanted = order.digest
        self.gradient = ()

        def updated() -> None:
            self.step += 1
            if self.is_skipped(order.step):
                skips = order.prepared is None or bool(order.prepared.nonfinite)
                demand(skips, "a skipped step was to be applied")
                trainer.clockwork.counts["late: update skipped"] += 1
            else:
                self.update(gradient)
            trainer.world.checks.state(trainer, generation, self.step, self.digest)
            self._ready()

        extra = trainer.world.settings.replay_s if order.prepared is None else 0.0
        extra += self._announce(order.step)
        self._work(extra + trainer.clockwork.between(0.002, 0.02), updated)

    def update(self, gradient: Gradient) -> None:
        """The optimizer's step."""
        self.digest = chain(self.digest, gradient)

    def _announce(self, step: int) -> float:
        """Sometimes let user code evaluate after its update, and announce this by ``busy``."""
        every = self.trainer.world.settings.busy_every
        if not every or step % every:
            return 0.0
        self.trainer.clockwork.counts["path: busy"] += 1
        self.trainer.feed(io.Busy("evaluation", 1.0))
        self.trainer.after(0.2, lambda: self.trainer.feed(io.Busy("", 0.0)))
        return 0.2

    def is_skipped(self, step: int) -> bool:
        every = self.trainer.world.settings.nan_every
        return bool(every) and step % every == every - 1

    def _ready(self) -> None:
        trainer = self.trainer
        self._busy = False
        generation = trainer.core.memory.state.generation
        if generation > 0 and trainer.clockwork.chance(trainer.world.settings.snapshots):
            self.snapshot(generation)
        if self.step >= trainer.world.until_of(trainer):
            self.closing = True
            trainer.world.checks.closed(trainer, generation)
            trainer.world.happened("closing", trainer.host)
            trainer.feed(io.Closing())
            return
        wanted, self._digest_wanted = self._digest_wanted and not self._is_alone(), False
        # At every second step the digest is taken while the user's code goes on.
        later = wanted and generation > 0 and self.step % 2 == 1
        self.said = self.digest if wanted else ""
        trainer.feed(io.Ready(self.step, "" if later else self.said, later=later, plan=self.news()))

    def _is_alone(self) -> bool:
        """Whether there is no state yet to compare this one with: no epoch so far has had another member."""
        current, newest = self.trainer.core.epochs.current, self.trainer.core.epochs.newest
        self._has_met = self._has_met or any(x is not None and len(x.roster) > 1 for x in (current, newest))
        return current is not None and not self._has_met

    def news(self) -> DataPlan | None:
        """Return the data of the steps from here on, where they are others than before."""
        return None

    def _tell_digest(self, order: io.TellDigest) -> None:
        demand(order.step == self.step, f"to tell the digest of {order.step} with the state at {self.step}")
        demand(bool(self.said), "to tell a digest that nobody wanted")
        self.trainer.clockwork.counts["path: a digest told later"] += 1

        def told() -> None:
            self.said = self.digest
            self.trainer.feed(io.Digested(order.step, self.said))

        self._work(self.trainer.clockwork.between(0.0, 0.01), told)

    def close_when_loaded(self) -> None:
        """End the loop where the loaded state is its last one."""
        trainer, checks = self.trainer, self.trainer.world.checks
        self.closing = self.step >= trainer.world.until_of(trainer)
        if self.closing:
            # The state of a cold start is of the generation before. A follower does not know its own.
            catch_up = getattr(trainer.core, "catch_up", None)
            checks.closed(trainer, catch_up.fetch.generation if catch_up else checks.records[-1].generation)

    def _install(self, order: io.Install) -> None:
        arrived = self.trainer.transfer.state
        demand(arrived is not None and arrived.step == order.step, "told to install what never arrived")
        assert arrived is not None
        self.gradient = ()

        def loaded() -> None:
            demand(arrived.digest == order.digest, "the fetched state is not the one that was wanted")
            self.step, self.digest = arrived.step, arrived.digest
            if self.trainer.server.alive:
                self.trainer.server.publish_snapshot(arrived)
            self.trainer.world.happened("install", self.trainer.host)
            self.trainer.clockwork.counts["installed"] += 1
            self.close_when_loaded()
            self.said = order.digest
            self.trainer.feed(io.Installed(order.step, order.digest, self.closing, self.news()))

        self._work(self.trainer.clockwork.between(0.005, 0.05), loaded)

    def take(self, order: io.TakeSnapshot) -> None:
        self.snapshot(self.trainer.core.memory.state.generation)

    def snapshot(self, generation: int) -> None:
        """Copy a snapshot while user code goes on; the server serves it when it is complete."""
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
