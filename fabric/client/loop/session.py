"""The session of a trainer: steps are the outer loop, micro-batches the inner one.

The main thread waits in one place only, ``_wait``. It posts its progress and obeys the core's orders: compute
these micro-batches, apply this committed gradient, load this state, stop. In a replay, in a joining replica's
first step and after an eviction, a step has no micro-batches and its averaged gradient is already in
``.grad``. So the user's loop has no special case.
"""

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import distributed, futures
from torch.nn.parallel import DistributedDataParallel

from fabric.ckpt_server.state.training_state import capture
from fabric.client.collectives.collectives import (
    Collectives,
    SessionCollectives,
    SoloCollectives,
    make_collectives,
)
from fabric.client.control.engine import EngineParts
from fabric.client.control.rank_engines import RankEngine
from fabric.client.data.loader import (
    Loader,
    SampleSlice,
    make_loader,
    parse_options,
)
from fabric.client.data.randomness import UpdateRandomness, seed_everything
from fabric.client.data.sampler import StepSampler
from fabric.client.gradients.bucket_stream import Overlap, StaleGradients
from fabric.client.gradients.gradient_backend import HostBackend
from fabric.client.loop.local_state import Handover, LocalState, LoopProgress, optimizers_in
from fabric.client.loop.loop_orders import FIRST_S, LoopOrder, LoopOrders, WaitLogger, describe_wait
from fabric.client.loop.loop_source import check_exchange_loop, check_source
from fabric.client.loop.model_watch import ModelWatch
from fabric.client.loop.replay import Replay
from fabric.client.loop.shutdown import Shutdown
from fabric.client.loop.start import TrainingSetup, begin, make_engine
from fabric.client.loop.step import Step, StepData, described_as, finite, restored
from fabric.client.process.excepthook import before_report
from fabric.client.process.rank_group import RankGroup
from fabric.client.process.step_clock import StepClock
from fabric.client.state.durable_policy import StorageUnavailable
from fabric.errors import ConfigError, FabricError
from fabric.health.work import WorkAmount
from fabric.model import EVERYTHING, DataPlan, Sharing, writer_of
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.rank_messages import replica_share
from fabric.runtime.config import Settings
from fabric.runtime.rank_layout import RankLayout, parse_layout

# A loop that calls ``exchange`` has no micro-batches: its members share this many tokens instead.
EXCHANGE_TOKENS = 64


class LoopCalls(SessionCollectives):
    """The calls of a training loop that are alike in a job and, with FABRIC_DISABLE=1, without one."""

    settings: Settings
    randomness: UpdateRandomness
    stale: StaleGradients
    _progress: LoopProgress
    _sampler: StepSampler | None = None

    @property
    def committed_step(self) -> int:
        """Committed optimizer steps that the state in memory has."""
        return self._progress.state_step

    def loader(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int = 0,
        collate_fn: Callable[[Sequence[Any]], Any] | None = None,
        num_workers: int = 0,
        mesh: Any = None,
        **options: Any,
    ) -> Loader:
        """Make the job's loader: every step is a fixed list of micro-batches. Raises ConfigError.

        ``dataset`` has ``len`` and an index, or is iterable. ``seed`` seeds the data order and each
        micro-batch. ``mesh``: one-dimensional; each of its ranks gets a slice of every micro-batch (FSDP2).
        Without it all ranks get all samples. ``options``: see ``fabric.client.data.loader.LoaderOptions``.
        """
        sizes = (global_batch_size, micro_batch_size, seed)
        chosen, part = parse_options(options), SampleSlice.of(mesh, self.randomness.draws)
        return make_loader(dataset, sizes, collate_fn, num_workers, chosen, self.settings, part)

    def sampler(self, size: int, *, global_batch_size: int, **options: Any) -> StepSampler:
        """Make the sampler of this replica's part of every step, for the DataLoader of a loop of your own.

        The loop takes ``sampler.per_step`` indices, then calls ``exchange``. ``options``: as for StepSampler.
        """
        drawn = StepSampler(size, global_batch_size=global_batch_size, settings=self.settings, **options)
        self.draw_from(drawn)
        return drawn

    def draw_from(self, sampler: StepSampler) -> None:
        """Let ``exchange`` count the samples that ``sampler`` draws."""
        sampler.bind(lambda: self._progress.state_step)
        self._sampler = sampler
        self.randomness.seed = sampler.seed

    def metrics(self, **values: float) -> None:
        """Add to the step's sums, e.g. ``metrics(loss=loss.item() * len(batch))``; the totals over the
        global batch are in ``step.metrics`` after the commit, at no extra collective."""
        metrics = self._progress.metrics
        for name, value in values.items():
            metrics[name] = metrics.get(name, 0.0) + float(value)


class Session(LoopCalls):
    """Made by ``fabric.client.attach``. Not thread-safe: call it from the training loop's thread."""

    def __init__(self, parts: EngineParts, watch: ModelWatch, step: int) -> None:
        settings, process, gradients = parts.settings, parts.process, parts.gradients
        self.settings = settings
        self._parts = parts
        self._watch = watch
        self._engine = make_engine(parts)
        if isinstance(self._engine, RankEngine):
            before_report(self._engine.await_explanation)
        self._progress = LoopProgress(state_step=step)
        self._state = LocalState(parts, self._engine, self._progress)
        self._replay = Replay(parts, self._engine, self._state, self._progress)
        self._shutdown = Shutdown(parts, self._engine, self._progress)
        self.overlap = Overlap(
            gradients,
            lambda step, weight: self._engine.post(io.Streaming(step, weight)),
            # On a device, overlap of several ranks and of averaged buffers is not tested.
            wanted=settings.retain_gradients
            and (
                isinstance(parts.exchange.backend, HostBackend)
                or (process.group is None and not (parts.buffers.stand_ins or parts.own_states.stand_ins))
            ),
            fewest_buckets=2 if process.group is None else 1,
        )
        self.overlap.may_begin = self._engine.may_be_asked
        self.overlap.stream_of_thread = parts.exchange.backend.stream_of_thread
        self._process = process
        self.handover = Handover(parts, self._state)
        self.randomness = self.handover.randomness
        self.stale = self.overlap.stale = self.handover.stale
        self._clock = StepClock()
        if process.group is not None and settings.adapt != "off":
            self._clock.waits.install()
        waits = WaitLogger(
            settings.replica,
            lambda: describe_wait(self._engine.describe(), parts.leader.waiting_for),
            math.inf if process.rank else FIRST_S,  # rank 0 logs for all ranks
        )
        self.orders = LoopOrders(
            self._engine,
            self._state,
            self._replay,
            self._shutdown,
            self._progress,
            self._clock,
            waits,
            process.rank,
        )
        self.collectives: Collectives = make_collectives(self._engine, parts, self._clock.pause)
        self._data = StepData(parts.describer.objects)
        self._plan = DataPlan(0)
        self._first_order: LoopOrder | None = None

    # --- reading ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The membership epoch in force here, 0 before the first."""
        return self._engine.epoch

    @property
    def committed_step(self) -> int:
        """Committed optimizer steps that this replica's state has, or will have once it is loaded."""
        return self.orders.held.step if self.orders.held is not None else self._progress.state_step

    @property
    def loads(self) -> int:
        """How often this process has replaced its state by one that it fetched."""
        return self._progress.loads

    @property
    def members(self) -> tuple[str, ...]:
        """Replica ids of the epoch in force, in ring order; in a joining replica, of the newest epoch."""
        current = self._engine.current or self._engine.newest
        return current.names if current is not None else ()

    @property
    def is_writer(self) -> bool:
        """Whether this replica writes files for all: of the members with the job's state, the one whose
        process is longest in the job, then the first by name.

        All ranks of a replica get the same value.
        """
        return self.orders.held is None and writer_of(self._engine.current) == self.settings.replica

    @property
    def layout(self) -> RankLayout:
        """How this replica's model is spread over its ranks, as ``FABRIC_LAYOUT`` says."""
        return parse_layout(self.settings.layout).over(self._process.size)

    def digest(self) -> str:
        """Return xxh3_128 of the shared state as it is now; equal on all members after the same step."""
        return self._state.digest()

    # --- the trainer's loop -------------------------------------------------------------------------

    def steps(self, data: Loader, until: int, first_step: int | None = None) -> Iterator[Step]:
        """Yield steps, from the job's committed step to committed step ``until``; see Step.

        Call it again for each epoch or stage; a call whose steps are over has none. ``first_step``: the step
        at which the order of ``data`` begins, by default the first one of its first call.
        """
        if not self._engine.is_running:
            check_source(inspect.currentframe(), self._state.describer.objects.values())
        self._begin_call(data, until, first_step)
        self.randomness.follow_steps(data.plan.seed)
        while self._progress.state_step < until and not self._progress.finished:
            step = Step(self, self._progress.state_step)
            order = self.orders.at_boundary(self._ready)
            if isinstance(order, io.Install):  # this state is of a later call
                self.collectives.members.leave("it catches up with the job, call after a step of its own")
                return
            if isinstance(order, io.Finish):
                if self._progress.state_step < until:
                    self.orders.too_late(order)
                return
            self._first_order = order
            self.collectives.members.begin_step(order)
            data.sit(self._engine.current, self.settings.replica)
            step.number, self._progress.bare = self._state.hand_over(), isinstance(order, io.Apply)
            data.begin_step(step.number)
            yield step
            step.check_ended()
            self._parts.points.hit("optimizer", step.number)

    def _begin_call(self, data: Loader, until: int, first_step: int | None) -> None:
        """Take the data of a call of ``steps``; the first call joins the job."""
        progress, steps = self._progress, self._data
        steps.enter(data, until, first_step)
        progress.begin, progress.until = steps.begin, until
        plan = steps.plan(self.settings.agreed)
        if not self._engine.is_running:
            self.orders.samples = steps.samples
            self._start(plan, steps.describe(), {"until": until}, data.sharing, data.data_slot)
        elif plan.described != self._plan.described:
            self._parts.journal.write("data", step=plan.begin, data=steps.describe())
        self._plan = progress.news = plan

    def run_step(self, step: Step) -> Iterator[Any]:
        """Yield the micro-batches of ``step``: own, then inherited ones. Only Step calls this."""
        loader, first = self._data.loader, self._data.first_step
        order, crash_marker, stale = self._first_order, self._parts.crash_marker, self.stale
        following = order.micro_batches if isinstance(order, io.Compute) else ()
        if following:
            self._watch.begin_step()
        self._clock.end_update()  # with user code before the micro-batches, such as an evaluation
        while isinstance(order, io.Compute):
            at = order.step - first
            loader.read_ahead(self._state.hand_over() - first, order.micro_batches)
            self._parts.buffers.watch.begin()  # after what the user's code has done since the boundary
            filled = loader.plan.with_samples(at, order.micro_batches)
            if order is self._first_order and not filled:
                # A loop that zeroes at its head has left the average of the step before.
                for _, parameter in self._state.gradients.parameters:
                    parameter.grad = None
            for left, micro_batch in enumerate(filled, 1 - len(filled)):
                self._progress.at = (order.step, micro_batch)
                crash_marker.at(order.step, micro_batch)
                self._parts.points.hit("forward", order.step, self._progress.micro_batch)
                samples = self._progress.samples[micro_batch] = loader.samples(at, micro_batch)
                batch = loader.fetch(at, micro_batch)
                seed_everything(loader.plan.seed, order.step, micro_batch, loader.slice.draws)
                self.handover.attributes.next_batch()
                step.weight.begin(loader.count(at, micro_batch))
                is_first = order is self._first_order and left == 1 - len(filled)
                watched = stale.micro_batch(is_first, len(filled) == 1, not self.settings.retain_gradients)
                with watched, self.overlap.micro_batch(step.number, last=left == 0):
                    yield batch
                self._watch.ranks.check()
                self._clock.count(micro_batch, step.weight.take_work(len(samples)))
                self._parts.snapshots.offer()
            crash_marker.clear()
            self._progress.at = None
            loader.expect(at + 1, following)
            self._post_computed(order, step.weight.take(p for _, p in self._state.gradients.parameters))
            order = self.orders.next()
        self._end_step(step, order)

    def run_backward(self, step: int, weight: float, run: Callable[[], None]) -> None:
        """Let ``run`` do one backward pass, which adds a gradient of this ``weight``; for Step."""
        self._watch.ranks.look()
        self.overlap.backward(step, weight, run)

    def exchange(self, weight: float = 1.0) -> Step:
        """Average ``.grad`` over the members, commit the step and return it, in a loop of your own.

        Call it between backward and clipping. The gradient must be that of a mean over ``weight`` samples or
        tokens. The part of a member that died is skipped (policy ``shrink``).
        """
        if not self._engine.is_running:
            check_exchange_loop(inspect.currentframe(), self._state.describer.objects.values())
            self.start_exchanges({"loop": "exchange"})
        has_data, handed_over = self.take_drawn(), self._parts.own_states.handed_over
        for _, parameter in self._state.gradients.parameters if weight != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(weight)
        order = self.reach_boundary()
        # A batch that was drawn before the job's state came is drawn again.
        has_data = has_data and self._parts.own_states.handed_over == handed_over
        while isinstance(order, io.Compute):
            # A gradient of data drawn for another step is not contributed.
            self.contribute(order, weight if has_data else 0.0)
            has_data = False
            order = self.orders.next()
        return self.end_step(order)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of ``loader``, of ``local_state``, pass after pass; for ``exchange``."""
        return self._parts.own_states.batches(loader)

    def start_exchanges(self, more: Mapping[str, Any], until: int = sys.maxsize) -> None:
        """Join the job with a loop of your own. ``more``: settings that must be equal on all members.

        Only ``exchange`` and ``fabric.client.outer`` call this and the four methods that follow.
        """
        self._progress.until = until
        sampler = self._sampler
        data = sampler.describe() if sampler is not None else {"micro_batches": EXCHANGE_TOKENS}
        data_slot = sampler.part.data_slot if sampler is not None else -1
        described = described_as({**data, **self.settings.agreed})
        self._plan = DataPlan(data["micro_batches"], described)
        self._start(self._plan, data, more, Sharing("shrink", data["micro_batches"]), data_slot)

    def take_drawn(self) -> bool:
        """Return whether the data that the loop drew are those of this step. Raises ConfigError."""
        return self._sampler is None or self._sampler.take(self._progress.state_step)

    def reach_boundary(self) -> LoopOrder:
        """Announce that the state is at a step boundary, and return the order for the next step."""
        self._engine.post(self._ready())
        return self.orders.next()

    def contribute(self, order: io.Compute, weight: float) -> None:
        """Hand over ``.grad`` with this weight, without a wait. Without a ``.grad`` the weight is 0."""
        held = weight > 0 and any(p.grad is not None for _, p in self._state.gradients.parameters)
        if held and self._sampler is not None:
            drawn = self._sampler.indices(order.step)
            self._progress.samples = dict.fromkeys(order.micro_batches, drawn)
        if held:
            self._clock.count(0, WorkAmount(weight, 0.0, weight))
        self._post_computed(order, weight if held else 0.0)

    def end_step(self, order: LoopOrder) -> Step:
        """Put the committed gradient into ``.grad``, and return the step."""
        step = Step(self, self._progress.state_step)
        self._end_step(step, order)
        return step

    def say_in(self, words: Mapping[str, str]) -> None:
        """Replace these words in the sentence that ends this process; for adapters."""
        self._shutdown.words |= words
        self._watch.say_in(words)

    @contextlib.contextmanager
    def busy(self, reason: str, at_most_s: float) -> Iterator[None]:
        """Announce, within this context, why this replica exchanges no gradients; ``fabric status`` shows it.

        Within the context ``at_most_s`` replaces ``user_code_s``. A replica that makes the others wait longer
        is evicted, and catches up later. Raises ConfigError where ``at_most_s`` is not above 0.
        """
        if not 0 < at_most_s < math.inf:
            raise ConfigError(f"session.busy has at_most_s={at_most_s:g}: give a finite number above 0")
        self._engine.post(io.Busy(f"{reason}, at most {at_most_s:g} s", at_most_s))
        try:
            with self._clock.pause():
                yield
        finally:
            self._engine.post(io.Busy("", 0.0))

    def close(self) -> None:
        """Wait until every member's loop has ended, then leave the job without a failure.

        On return this replica has the job's final state. A loop that ended before catching up ends the
        process. Where RoundsFailed was raised, this replica has left the job, and nothing is done.
        """
        self._watch.end()
        if self._progress.left is not None:
            return
        if self._engine.is_running and not self._progress.finished:
            if self._parts.journal.on and self._state.compares:
                self._state.note(self._state.digest())
            if self._parts.durable.is_due(self.committed_step, self._engine.current, last=True):
                self._state.snapshot_by_policy(True, "")
                self._parts.snapshot_worker.settle(within_s=60.0)
            if not self.orders.load_held():
                self._engine.post(io.Closing())
            self.orders.await_end()
        self._data.close()
        self._parts.journal.write("finish", step=self.committed_step)
        self.collectives.close()
        self._engine.close()
        self._shutdown.end(finished=True)

    # --- between the user's code and the engine ---------------------------------------------------------

    def _start(
        self,
        plan: DataPlan,
        data: Mapping[str, Any],
        more: Mapping[str, Any],
        sharing: Sharing = EVERYTHING,
        data_slot: int = -1,
    ) -> None:
        """Open the leader session. It declares the data, so it opens only when the loop has named them."""
        settings, parts = self.settings, self._parts
        self._watch.begin()
        parts.buffers.begin()
        self._shutdown.watch_uncaught()
        parts.journal.start(settings.job, self._state.gradients.layout, data, data_slot)
        self._engine.connect_loop(
            readiness=lambda: self.overlap.stream,
            samples=lambda _step, ids: {str(i): self._progress.samples.get(i, []) for i in ids},
        )
        digest = self._state.digest() if self._state.compares else ""
        if not parts.handle.snapshots and self._process.group is None:
            # If the replicas' initial states differ, a new job may begin from this snapshot.
            self._state.snapshot(generation=0)
        parts.snapshot_worker.submit(parts.slots.reserve)
        if parts.handle.snapshots:
            parts.snapshot_worker.submit(parts.snapshots.slots.map_next)
        is_sliced = self._data.until > 0  # else the loop calls ``exchange``
        part = self._data.loader.slice.index if is_sliced else self._process.rank
        if is_sliced:
            self._watch.ranks.begin(part, self._data.loader.slice.count)
        agreed = {**data, **more, **settings.agreed}  # settings that must be equal on all members
        described, step = described_as(agreed), self.committed_step
        try:
            begin(
                self._engine,
                parts,
                TrainingSetup(plan, described, digest, part, sharing, data_slot, step, not is_sliced),
            )
        except StorageUnavailable as error:
            self._shutdown.leave(str(error), 75)
        self._shutdown.notice.begin()

    def _ready(self) -> io.Ready:
        """Return the event that the state is at a step boundary: after an update, or at the start."""
        self._replay.end()
        self._clock.end_update()
        digest, later = self._state.reach_boundary()
        plan = self._progress.take_news()
        times = self._parts.exchange.take_times(self._clock)
        entries = self._state.entries(digest)
        return io.Ready(self._progress.state_step, digest, times, later, entries, plan)

    def _post_computed(self, order: io.Compute, weight: float) -> None:
        self._watch.check(order.step)
        self._state.gradients.settle()
        self._clock.end_compute()
        self._parts.buffers.contribute(weight, self._state.gradients.scale)
        if weight > 0:
            self._parts.own_states.contribute()
        metrics = finite(self._progress.metrics)
        self._progress.metrics.clear()
        redo = self.overlap.end_order(weight)
        self._parts.exchange.backend.mark_ready()
        self._engine.post(io.Computed(order.step, order.micro_batches, weight, metrics, redo))
        self._parts.snapshots.settle()

    def _end_step(self, step: Step, order: LoopOrder | None) -> None:
        """Put the committed gradient into ``.grad`` and hand over to the user's update code."""
        if isinstance(order, io.Finish):
            self.orders.too_late(order)
        assert isinstance(order, io.Apply)
        self.collectives.members.end_step(order)
        self._state.wait_changeable()
        if order.prepared is not None:
            held = order.prepared
            self._replay.note_joined(held)
        else:
            self._parts.points.hit("replay", order.step)
            held = self._parts.fetch_thread.as_prepared()
            self._replay.begin()
        if self._parts.journal.on:
            times = {name: getattr(self._clock, name) for name in ("compute_s", "optimizer_s", "wait_s")}
            times["exchange_s"] = self._parts.exchange.seconds
            has_samples = self._data.until > 0 or self._sampler is not None
            self._parts.journal.commit(order, held, self._plan.micro_batches if has_samples else 0, times)
        step.skipped = self.handover.give(order, held)
        self._data.present(order.step, [i for _, ids in held.contributions for i in ids])
        self._progress.state_step = order.step + 1
        self._state.digest_wanted = order.digest
        self._progress.samples.clear()
        step.number, step.contributed, step.replayed = order.step, order.contributed, order.prepared is None
        step.metrics, step.done = restored(held.metrics), True
        has_loss = "loss" in step.metrics and held.weight > 0
        self._clock.loss = f"{step.metrics['loss'] / held.weight:.4g}" if has_loss else ""
        self._clock.lap()


class SoloSession(LoopCalls):
    """As Session, with FABRIC_DISABLE=1: the same arithmetic, with one member and without any service.

    ``group``: the ranks of this replica.
    """

    epoch = 0
    members: tuple[str, ...] = ()
    is_writer = True

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        objects: Mapping[str, object],
        settings: Settings | None = None,
        group: RankGroup | None = None,
        step: int = 0,
    ) -> None:
        settings = settings or Settings(disable=True)
        # As data slot 0 this process computes all micro-batches, whatever the policy.
        self.settings = replace(settings, replica="replica0", rack="")
        self.layout = parse_layout(settings.layout).over(group.size if group is not None else 1)
        self._progress = LoopProgress(state_step=step)
        self._group = group
        self._objects = objects
        self._data = StepData({})
        self._parameters = parameters
        self.collectives = SoloCollectives("replica0")
        optimizers = optimizers_in(objects.values())
        self.randomness = UpdateRandomness(optimizers, group.draws if group is not None else 0)
        self.stale = StaleGradients(optimizers)

    def digest(self) -> str:
        return capture(self._objects, self.committed_step).digest()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        while True:
            yield from loader

    def steps(self, data: Loader, until: int, first_step: int | None = None) -> Iterator[Step]:
        if not self._data.until:  # the first call
            check_source(inspect.currentframe(), self._objects.values())
        self._data.enter(data, until, first_step)
        self.randomness.follow_steps(data.plan.seed)
        while self.committed_step < until:
            step = Step(self, self.committed_step)
            yield step
            step.check_ended()

    def run_step(self, step: Step) -> Iterator[Any]:
        loader, at = self._data.loader, step.number - self._data.first_step
        plan = loader.plan
        filled = plan.with_samples(at, range(plan.micro_batches))
        loader.read_ahead(at, filled)
        for number, micro_batch in enumerate(filled):
            batch = loader.fetch(at, micro_batch)
            step.weight.begin(loader.count(at, micro_batch))
            seed_everything(plan.seed, step.number, micro_batch, loader.slice.draws)
            with self.stale.micro_batch(number == 0, len(filled) == 1):
                yield batch
        weight = step.weight.take(self._parameters)
        self.randomness.begin(step.number)
        skipped = self._average(weight, loader.slice.index) or self._skips()
        self._end(step, skipped)

    def run_backward(self, step: int, weight: float, run: Callable[[], None]) -> None:
        self.stale.begin(step)
        run()
        self.stale.added()

    def exchange(self, weight: float = 1.0) -> Step:
        """As Session.exchange. With one member ``.grad`` is the average already (``weight`` cancels out)."""
        if self._sampler is not None:
            self._sampler.take(self.committed_step)
        step, skipped = Step(self, self.committed_step), self._skips()
        self.randomness.begin(step.number)
        self._end(step, skipped)
        return step

    @contextlib.contextmanager
    def busy(self, reason: str, at_most_s: float) -> Iterator[None]:
        """As Session.busy; no other member waits."""
        yield

    def close(self) -> None:
        """As Session.close; there is no job to leave."""

    def _end(self, step: Step, skipped: bool) -> None:
        progress = self._progress
        step.contributed, step.skipped, step.metrics, step.done = True, skipped, progress.metrics, True
        progress.metrics, progress.state_step = {}, progress.state_step + 1

    def _average(self, weight: float, part: int) -> bool:
        """Divide the summed gradients by the total weight of all ranks; return whether there is no update.

        ``part``: the slice of the samples that this rank computed.
        """
        if self._group is not None:
            share = {"weight": weight, "metrics": sorted(self._progress.metrics.items()), "part": part}
            ranks = self._group.gather(share)
            shares = [(x["weight"], tuple((k, v) for k, v in x["metrics"])) for x in ranks]
            weight, metrics = replica_share([x["part"] for x in ranks], shares)
            self._progress.metrics = dict(metrics)
        if not weight:  # a step without data; a scaler needs zeros
            scales = any(isinstance(x, torch.amp.GradScaler) for x in self._objects.values())
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter) if scales else None
            return not scales
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(weight)
        return False

    def _skips(self) -> bool:
        """Whether ``on_nan`` skips this step's update because the gradient is not finite."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        on_nan = self.settings.on_nan
        if on_nan == "propagate" or all(bool(torch.isfinite(g).all()) for g in gradients):
            return False
        if on_nan == "stop":
            raise FabricError(f"the gradient of step {self.committed_step} is not finite, and on_nan is stop")
        for parameter in self._parameters:
            parameter.grad = None
        return True


def ddp(model: DistributedDataParallel, session: Session | SoloSession) -> None:
    """Let ``session`` average the gradients of ``model``; call it once, after ``attach``.

    All micro-batches but the last run under ``no_sync``. Raises ConfigError for a model that is not DDP's.
    Raises it too for a DDP group of several processes: the death of a replica would break that group. DDP's
    hook reports which gradients are final, and fabric exchanges its own buckets. The members' DDP buckets may
    differ.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"fabric.client.ddp takes a model that is wrapped in DistributedDataParallel, and this is a "
            f"{type(model).__name__}: wrap it, or leave out the call, which a plain model does not need"
        )
    size = distributed.get_world_size(model.process_group)
    if size != 1:
        raise ConfigError(
            f"the process group of this DDP has {size} members: give DDP a group of this process alone "
            "(fabric averages between the replicas)"
        )
    if isinstance(session, SoloSession):
        return
    overlap = session.overlap
    overlap.unwatch()
    overlap.without_sync = model.no_sync

    # No annotations: DDP checks those of its hook, and torch's stubs lack the type that DDP requires.
    def hook(_, bucket):  # type: ignore[no-untyped-def]
        for parameter in bucket.parameters():
            overlap.ready(parameter, version=False)
        done: futures.Future[torch.Tensor] = futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
