"""The session: what a trainer holds. Steps are the outer loop, micro-batches the inner one.

The main thread only ever waits in one place, ``_wait``: it has posted where it stands and gets orders:
compute these micro-batches, apply this committed gradient, load this state, stop. A replayed step, a
newcomer's first step and the recovery after our own eviction are all "a step without micro-batches whose
averaged gradient is already in ``.grad``", so the user's loop has no special case.
"""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from fabric.ckpt_server.state import capture, restore, verify
from fabric.client.data import Loader, Plan, collate
from fabric.client.engine import Engine, Parts
from fabric.client.randomness import seed_everything
from fabric.client.snapshots import Snapshots
from fabric.client.step import Step
from fabric.errors import FabricError
from fabric.ftar.buckets import FlatGradients
from fabric.model import StepTimes
from fabric.protocol import member_io as io
from fabric.protocol.member import Member
from fabric.protocol.member_state import Identity, MemberConfig, State
from fabric.runtime.config import Settings, advertised_host

# For loops that we do not own a step has no micro-batches of ours; this many tokens stand for them, so
# that every member of a roster of up to that size contributes.
EXCHANGE_TOKENS = 64


@dataclass(slots=True)
class _Clock:
    """Where the current step's time went, and what is not yet reported."""

    mark: float = field(default_factory=time.monotonic)
    compute_s: float = 0.0
    optimizer_s: float = 0.0
    wait_s: float = 0.0
    work: dict[int, float] = field(default_factory=dict)

    def lap(self) -> float:
        now = time.monotonic()
        seconds, self.mark = now - self.mark, now
        return seconds


class Session:
    """Made by ``fabric.client.attach``. Not thread-safe: call it from the training loop's thread."""

    def __init__(
        self,
        settings: Settings,
        incarnation: int,
        predecessors_gone: bool,
        objects: Mapping[str, object],
        gradients: FlatGradients,
        snapshots: Snapshots,
        parts: Parts,
    ) -> None:
        self.settings = settings
        self._incarnation = incarnation
        self._predecessors_gone = predecessors_gone
        self._objects = objects
        self._gradients = gradients
        self._snapshots = snapshots
        self._parts = parts
        self._engine = Engine(parts)
        self._state_step = 0
        self._clock = _Clock()
        self._metrics: dict[str, float] = {}
        self._samples: dict[int, list[int]] = {}
        self._loader: Loader | None = None
        self._finished = False
        self._replayed = 0
        self._behind = False
        self._until = sys.maxsize
        atexit.register(self._let_server_go)

    # --- reading ----------------------------------------------------------------------------------

    @property
    def committed_step(self) -> int:
        """Committed optimizer steps that this replica's state has."""
        return self._state_step

    @property
    def epoch(self) -> int:
        """The membership epoch in force here, 0 before the first."""
        member = self._engine.member
        return member.current.epoch if member is not None and member.current is not None else 0

    @property
    def members(self) -> tuple[str, ...]:
        """Replica ids of the epoch in force, in ring order."""
        member = self._engine.member
        return member.current.names if member is not None and member.current is not None else ()

    def digest(self) -> str:
        """xxh3_128 of the shared state as it is now; equal on all members after the same step."""
        return capture(self._objects, self._state_step).digest()

    # --- the trainer's loop -------------------------------------------------------------------------

    def loader(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int = 0,
        collate_fn: Callable[[Sequence[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> Loader:
        """The job's data: every step is a fixed list of micro-batches, whoever computes them.

        ``dataset`` is map-style (``len`` and integer index), ``seed`` also seeds the draws in each
        micro-batch. Raises ConfigError for sizes that do not fit.
        """
        plan = Plan(len(dataset), global_batch_size, micro_batch_size, seed)
        return Loader(dataset, plan, collate_fn or collate, num_workers)

    def steps(self, data: Loader, until: int) -> Iterator[Step]:
        """Steps from wherever the job is up to committed step ``until``; see Step."""
        self._until = until
        if self._engine.member is None:
            self._loader = data
            plan = data.plan
            self._start(plan.micro_batches, f"{plan.hash} until {until}")
        while self._state_step < until and not self._finished:
            step = Step(self, self._state_step)
            order = self._wait(self._ready())
            if isinstance(order, io.Finish):
                if self._state_step < until:
                    # Going on would hand the user's code weights that are not the final ones.
                    self._too_late(order)
                return
            self._first_order = order
            step.number = self._state_step
            yield step
            if not step.done:
                raise FabricError(
                    f"the loop left step {step.number} before its micro-batches ended: iterate `for batch in "
                    "step` to its end, the exchange happens there"
                )
            self._parts.points.reach("optimizer", step.number)

    def run_step(self, step: Step) -> Iterator[Any]:
        """The micro-batches of ``step``, own ones first, then inherited ones (for Step alone)."""
        assert self._loader is not None
        order = self._first_order
        while isinstance(order, io.Compute):
            self._loader.read_ahead(order.step, order.micro_batches)
            for micro_batch in order.micro_batches:
                self._parts.points.reach("forward", order.step)
                samples = self._loader.plan.samples(order.step, micro_batch)
                self._samples[micro_batch] = samples
                batch = self._loader.fetch(order.step, micro_batch)
                seed_everything(self._loader.plan.seed, order.step, micro_batch)
                step.begin(len(samples))
                yield batch
                self._clock.work[micro_batch] = float(len(samples))
            order = self._computed(order, step.take_weight())
        self._end_step(step, order)

    def metrics(self, **values: float) -> None:
        """Add to the step's sums, e.g. ``metrics(loss=loss.item() * len(batch))``; the totals over the
        global batch are in ``step.metrics`` after the commit, at no extra collective."""
        for name, value in values.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + float(value)

    def exchange(self, weight: float = 1.0) -> Step:
        """For loops that we do not own: average ``.grad`` over the members and commit the step.

        Call it between backward and clipping; gradients must come from a mean over ``weight`` units.
        Returns the committed step. What a dead member had computed is skipped (policy ``shrink``).
        """
        if self._engine.member is None:
            self._start(EXCHANGE_TOKENS, "exchange")
        step = Step(self, self._state_step)
        for _, parameter in self._gradients.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(weight)
        order = self._wait(self._ready())
        contributed = False
        while isinstance(order, io.Compute):
            # A gradient of weights that have been replaced meanwhile was dropped: then there is none to give.
            held = any(p.grad is not None for _, p in self._gradients.parameters)
            order = self._computed(order, weight if held and not contributed else 0.0)
            contributed = True
        if isinstance(order, io.Finish):
            self._too_late(order)
        self._end_step(step, order)
        return step

    @contextlib.contextmanager
    def busy(self, reason: str, at_most_s: float) -> Iterator[None]:
        """Say why this replica is away from the exchange for a while; shown in ``fabric status``."""
        member = self._engine.member
        if member is not None:
            member.busy = f"{reason}, at most {at_most_s:g} s"
        try:
            yield
        finally:
            if member is not None:
                member.busy = ""

    def close(self) -> None:
        """Finished: wait until every member is, then leave. Never counted as a failure."""
        if self._engine.member is not None and not self._finished:
            self._note_state(self._digest_when_due(wanted=True))
            self._engine.post(io.Closing())
            while not isinstance(order := self._engine.orders.get(), io.Finish):
                self._obey(order)
            self._finish()
        if self._loader is not None:
            self._loader.close()
        self._parts.journal.write("finish", step=self._state_step)
        self._engine.close()
        self._end(finished=True)

    # --- between the user's code and the engine ---------------------------------------------------------

    def _start(self, micro_batches: int, data_hash: str) -> None:
        """Begin to talk: the data is known now, and with it everything a session must say."""
        settings, parts = self.settings, self._parts
        parts.journal.write(
            "start",
            pid=os.getpid(),
            job=settings.job,
            layout=self._gradients.layout,
            torch=torch.__version__,
            data=self._describe_data(micro_batches),
        )
        self._engine.samples = lambda step, ids: {str(i): self._samples.get(i, []) for i in ids}
        digest = self._digest_when_due(wanted=True)
        if not parts.handle.snapshots:
            # What a first start may begin from, should the replicas' initial states differ.
            self._snapshot(generation=0)
        config = MemberConfig(
            min_replicas=settings.min_replicas,
            autonomy_s=settings.autonomy_s,
            digest_every=settings.digest_every,
        )

        def make_member(port: int) -> Member:
            identity = Identity(
                replica=settings.replica,
                incarnation=self._incarnation,
                link=f"{advertised_host(settings)}:{port}",
                ckpt=parts.handle.url,
                micro_batches=micro_batches,
                layout=self._gradients.layout,
                data=data_hash,
                predecessors_gone=self._predecessors_gone,
            )
            state = State(0, 0, digest)
            return Member(identity, config, time.monotonic(), state, parts.handle.snapshots)

        self._engine.start(make_member, settings.bind, settings.ports)

    def _describe_data(self, micro_batches: int) -> dict[str, int]:
        if self._loader is None:
            return {"micro_batches": micro_batches}
        plan = self._loader.plan
        return {
            "dataset_size": plan.dataset_size,
            "global_batch_size": plan.global_batch_size,
            "micro_batch_size": plan.micro_batch_size,
            "seed": plan.seed,
            "micro_batches": micro_batches,
        }

    def _ready(self) -> io.Ready:
        """The user's update has run (or nothing has yet): the state stands at ``_state_step``."""
        self._clock.optimizer_s += self._clock.lap()
        member = self._engine.member
        generation = member.state.generation if member is not None else 0
        if generation > 0 and self._snapshots.is_due():
            self._snapshot(generation)
        digest = self._digest_when_due(self._digest_wanted)
        self._digest_wanted = False
        self._note_state(digest)
        return io.Ready(self._state_step, digest, self._times())

    _digest_wanted = True
    _first_order: io.Compute | io.Apply | io.Finish | None = None

    def _times(self) -> StepTimes:
        clock, exchange = self._clock, self._parts.exchange
        times = StepTimes(
            compute_s=clock.compute_s,
            exchange_s=exchange.seconds,
            optimizer_s=clock.optimizer_s,
            waiting_s=dict(exchange.waiting_s),
            work=dict(clock.work),
        )
        exchange.seconds, exchange.waiting_s = 0.0, {}
        self._clock = _Clock(mark=clock.mark)
        return times

    def _computed(self, order: io.Compute, weight: float) -> io.Compute | io.Apply | io.Finish:
        self._clock.compute_s += self._clock.lap()
        metrics = tuple(sorted(self._metrics.items()))
        self._metrics.clear()
        return self._wait(io.Computed(order.step, order.micro_batches, weight, metrics))

    def _wait(self, event: io.Event) -> io.Compute | io.Apply | io.Finish:
        """Post where I stand and obey until there is something for the user's loop."""
        self._engine.post(event)
        while True:
            order = self._engine.orders.get()
            self._clock.wait_s += self._clock.lap()
            if isinstance(order, io.Finish):
                self._finish()
                return order
            if isinstance(order, io.Compute | io.Apply):
                return order
            self._obey(order)

    def _obey(self, order: io.Effect) -> None:
        if isinstance(order, io.Stop):
            self._leave(order.reason, order.code)
        elif isinstance(order, io.DropGradient):
            self._drop_gradient()
        elif isinstance(order, io.TakeSnapshot):
            self._snapshot(generation=None)
        elif isinstance(order, io.Install):
            self._install(order)

    def _too_late(self, order: io.Finish) -> NoReturn:
        self._leave(
            f"the job is complete at step {order.step}, this process held step {self._state_step}: nothing "
            "is left to train, and the final state is with the replicas that finished"
        )

    def _end_step(self, step: Step, order: io.Compute | io.Apply | io.Finish | None) -> None:
        """Put the committed gradient into ``.grad`` and hand over to the user's update code."""
        if isinstance(order, io.Finish):
            self._too_late(order)
        assert isinstance(order, io.Apply)
        self._snapshots.wait_copied()
        held, transfer = order.held, self._parts.transfer
        if held is not None:
            buffer, weight, metrics = self._parts.slots.find(order.step), held.weight, dict(held.metrics)
            self._note_joined(held)
            self._journal_commit(order, held, replay=False)
        else:
            assert transfer.gradient is not None and transfer.buffer is not None
            self._parts.points.reach("replay", order.step)
            buffer, weight = transfer.buffer, transfer.gradient.weight
            metrics = dict(transfer.gradient.meta.get("metrics", {}))
            self._journal_replay(order)
            self._replayed += 1
            self._behind = True
        if self._loader is None and weight == 0:
            weight = 1.0  # an ``exchange`` in which every gradient had been dropped: their sum is zero
        self._gradients.scatter(buffer, weight)
        self._state_step = order.step + 1
        self._digest_wanted = order.digest
        self._samples.clear()
        step.number, step.live, step.metrics, step.done = order.step, order.live, metrics, True
        self._clock.lap()

    def _install(self, order: io.Install) -> None:
        """Load the fetched state; only after all of it was verified, and verified again when loaded."""
        arrived = self._parts.transfer.state
        assert arrived is not None
        self._parts.points.reach("install", order.step)
        self._drop_gradient()
        try:
            restore(arrived.file, self._objects)
            verify(self._objects, order.step, order.digest)
        except FabricError as error:
            self._engine.post(io.InstallFailed(f"the state of step {order.step} does not fit: {error}"))
            return
        self._state_step = order.step
        fetched = arrived.fetched
        with contextlib.suppress(FabricError):
            self._parts.handle.publish_snapshot(arrived.slot, fetched.manifest)
        self._replayed = 0
        self._behind = True
        self._parts.journal.write(
            "join",
            generation=fetched.manifest["generation"],
            step=order.step,
            bytes=fetched.nbytes,
            seconds=fetched.seconds,
            sources=dict(fetched.sources),
        )
        self._note_state(order.digest)
        self._engine.post(io.Installed(order.step, order.digest, last=order.step >= self._until))

    def _snapshot(self, generation: int | None) -> None:
        member = self._engine.member
        if generation is None:
            generation = member.state.generation if member is not None else 0
        self._parts.points.reach("snapshot", self._state_step)
        self._snapshots.start(self._state_step, generation, self._parts.keeper.submit, self._engine.post)

    def _drop_gradient(self) -> None:
        for _, parameter in self._gradients.parameters:
            parameter.grad = None
        self._metrics.clear()

    def _digest_when_due(self, wanted: bool) -> str:
        return self.digest() if wanted and self.settings.digest_every > 0 else ""

    def _note_state(self, digest: str) -> None:
        member = self._engine.member
        generation = member.state.generation if member is not None else 0
        if digest:
            self._parts.journal.write("state", generation=generation, step=self._state_step, digest=digest)

    def _journal_commit(self, order: io.Apply, held: io.Hold, replay: bool) -> None:
        member = self._engine.member
        assert member is not None
        self._parts.journal.write(
            "commit",
            generation=member.state.generation,
            epoch=held.epoch,
            step=order.step,
            live=order.live,
            replay=replay,
            contributions={name: list(ids) for name, ids in held.contributions},
            weight=held.weight,
            gradient_digest=held.gradient_digest,
            metrics=dict(held.metrics),
            members=[name for name, _ in held.contributions],
            times={
                "compute_s": self._clock.compute_s,
                "exchange_s": self._parts.exchange.seconds,
                "optimizer_s": self._clock.optimizer_s,
                "wait_s": self._clock.wait_s,
            },
        )

    def _note_joined(self, held: io.Hold) -> None:
        """The first round of a newcomer, or of one that had been evicted."""
        if self._behind:
            self._behind = False
            replayed, self._replayed = self._replayed, 0
            self._parts.journal.write("joined", epoch=held.epoch, step=held.step, replayed=replayed)

    def _journal_replay(self, order: io.Apply) -> None:
        meta = self._parts.transfer.gradient
        assert meta is not None
        contributions = meta.meta.get("contributions", {})
        held = io.Hold(
            epoch=meta.epoch,
            step=order.step,
            gradient_digest=meta.digest,
            weight=meta.weight,
            contributions=tuple((str(k), tuple(v)) for k, v in contributions.items()),
            metrics=tuple(sorted(meta.meta.get("metrics", {}).items())),
        )
        self._journal_commit(order, held, replay=True)

    def _finish(self) -> None:
        self._finished = True

    def _leave(self, reason: str, code: int = 0) -> NoReturn:
        """End this process with one sentence."""
        sys.stderr.write(f"fabric: {self.settings.replica}: {reason}\n")
        sys.stderr.flush()
        self._parts.journal.write("stop", code=code, reason=reason)
        self._engine.close()
        self._end(finished=code == 0)
        raise SystemExit(code)

    def _end(self, finished: bool) -> None:
        """Detach; a server that is gone already needs no goodbye."""
        if finished:
            with contextlib.suppress(FabricError):
                self._parts.handle.finish()
        else:
            self._let_server_go()
        atexit.unregister(self._let_server_go)
        self._parts.handle.close()
        self._parts.journal.close()

    def _let_server_go(self) -> None:
        """A process that ends before it was ever in the job leaves nothing that anybody could want; what its
        server holds is kept for a successor, or for the others, in every other case."""
        member, handle = self._engine.member, self._parts.handle
        newest = member.newest if member is not None else None
        listed = newest is not None and newest.lists(self.settings.replica, self._incarnation)
        if not listed and not self.epoch and not handle.snapshots:
            with contextlib.suppress(FabricError):
                handle.finish(linger_s=0.0)
