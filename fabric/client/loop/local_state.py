"""The shared state in this process: its step, its digests, its snapshots, and its updates.

The state does not change between a step boundary and the next update, so it is digested and copied there.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from fabric.ckpt_server.state.device_digest import digest_of_file
from fabric.client.control.engine import Engine, EngineParts
from fabric.client.data.randomness import UpdateRandomness
from fabric.client.gradients.bucket_stream import StaleGradients
from fabric.client.gradients.gradient_backend import HostBackend
from fabric.client.state.mutation_guard import MutationGuard, small_entries, tensor_entries
from fabric.errors import IntegrityError, SessionOver
from fabric.model import DataPlan, SnapshotRef
from fabric.protocol.member.state import Mode
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.rank_messages import SnapshotDue
from fabric.protocol.rules.divergence import Entries
from fabric.runtime.priority import run_low_priority


@dataclass(slots=True)
class LoopProgress:
    """The progress of the main thread through the loop: one per session, and only that thread writes it."""

    state_step: int = 0  # number of committed optimizer steps in the state in memory
    begin: int = -1  # the first step of the present call of ``session.steps``; -1: the loop makes none
    until: int = sys.maxsize  # the step at which this call ends
    news: DataPlan | None = None  # the data plan of this call, until the core knows it
    bare: bool = False  # whether the newest step of the user's code has no micro-batch
    source: str = ""  # where the loaded state came from
    left: SessionOver | None = None  # the error with which this process left the job before its end
    finished: bool = False  # whether the job is complete
    behind: bool = False  # true from a load or a replayed step until this replica contributes again
    at: tuple[int, int] | None = None  # the step and micro-batch that user code computes
    metrics: dict[str, float] = field(default_factory=dict)  # the user's sums of this step
    samples: dict[int, list[int]] = field(default_factory=dict)  # this step's samples by micro-batch
    loads: int = 0  # how often this process has loaded a fetched state

    def take_news(self) -> DataPlan | None:
        """Return the data plan that the core does not know yet; None where it knows it."""
        news, self.news = self.news, None
        return news

    def micro_batch(self) -> int:
        """Return the micro-batch that user code computes, or -1."""
        return self.at[1] if self.at is not None else -1


_T = TypeVar("_T")


class LocalState:
    """Digests and snapshots of the shared state; only the main thread uses it."""

    def __init__(self, parts: EngineParts, engine: Engine, progress: LoopProgress) -> None:
        self.describer = parts.describer
        self.gradients = parts.gradients
        self.digest_wanted = True  # whether to digest at the next boundary
        self._process = parts.process
        self._parts = parts
        self._engine = engine
        self._progress = progress
        self._on_device = not isinstance(parts.exchange.backend, HostBackend)
        self._content = parts.snapshots.content  # digests that do not depend on the layout of ranks
        self.compares = parts.settings.digest_steps > 0  # whether this job compares digests
        self._digest_begun = False  # a digest was begun in the background and not taken yet

    # --- digests ----------------------------------------------------------------------------------

    @property
    def may_yield(self) -> bool:
        """Whether heavy work may run at low priority, because no other member waits for this one.

        Not on a device, which needs little of the processor. Not if this replica's ranks would wait for it.
        """
        member = self._engine.member
        outside = member is None or member.epochs.mode is Mode.OUTSIDE
        return self._process.group is None and not self._on_device and outside

    def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of ``work``, run at low priority while no other member waits for this one."""
        return run_low_priority(work) if self.may_yield else work()

    def digest(self) -> str:
        """Return the digest of the shared state as it is now."""
        view, content = self.describer.capture(self._progress.state_step), self._content
        if self._on_device and content is None:
            return self._parts.snapshots.digest(view)
        return self.run(view.digest if content is None else lambda: content.of_view(view))

    def name_installed(self, file: memoryview, manifest: Mapping[str, Any]) -> str:
        """Return the digest of the state just loaded from ``file``, as this kind of device makes it.

        Raises IntegrityError for a manifest that names another state than that of its file.
        """
        digest = self.digest() if self._on_device or self._content is not None else str(manifest["digest"])
        if self._content is None and "state" in manifest:
            named = digest if self._on_device else self.run(partial(digest_of_file, file))
            if named != manifest["state"]:
                raise IntegrityError(f"its digest is {named}, and its manifest names {manifest['state']}")
        return digest

    def note(self, digest: str) -> None:
        """Journal the state's digest, unless it is empty."""
        if digest:
            lanes = self._parts.exchange.lanes
            self._parts.journal.write(
                "state",
                generation=self._engine.generation,
                step=self._progress.state_step,
                digest=digest,
                **({"layout": lanes.layout_name} if lanes is not None else {}),
            )

    # --- the step boundary ------------------------------------------------------------------------

    def reach_boundary(self) -> tuple[str, bool]:
        """Digest and snapshot the state if due; return the digest, and whether the digest comes later."""
        wanted, self.digest_wanted = self.digest_wanted and self.compares, False
        step, parts, in_job = self._progress.state_step, self._parts, self._engine.generation > 0
        takes_part = in_job and self._engine.epoch > 0 and not self._progress.behind
        if wanted and takes_part and self._process.group is None:
            wanted = self._engine.may_be_asked()  # else there is no state to compare this one with
        # Digest while forward and backward run, but not during catch-up.
        later = wanted and takes_part and self._content is None
        digest, copied = self.digest() if wanted and not later else "", False
        if in_job:
            durable = parts.durable.is_due(step, self._engine.current)
            if durable or parts.snapshots.is_due(step, parts.snapshot_worker.submit):
                copied = self.snapshot_by_policy(durable, digest)
        if later:
            parts.snapshots.begin_digest(step, copied)
        self._digest_begun = later
        self.note(digest)
        return digest, later

    def take_digest(self, step: int) -> io.Digested:
        """Return the digest of the state at ``step``: begun in the background, or computed now."""
        digest = self._parts.snapshots.digests.take(step) if self._content is None else ""
        digest = digest or self.digest()
        self._digest_begun = False
        self.note(digest)
        return io.Digested(step, digest, self.entries(digest))

    def entries(self, digest: str) -> Entries:
        """Return the entries of the state that go with its ``digest``; none without a digest."""
        # In an epoch of its own a replica that has met no other one has no entries to compare these with.
        if not digest or (self._engine.epoch and not self._engine.may_be_asked()):
            return ()
        numbers = small_entries(self.describer.objects)
        if self._process.group is not None or self._content is not None:
            return numbers
        step = self._progress.state_step
        guard = self._parts.snapshots.digests.take_guard(step)
        guard = guard or MutationGuard(self.describer.capture(step))
        return (*numbers, *tensor_entries(self.describer.objects, guard))

    def hand_over(self) -> int:
        """Note that user code runs from now on, beside a copy or digest of the state; return its step."""
        self._parts.snapshots.expose()
        return self._progress.state_step

    def wait_changeable(self) -> None:
        """Return when the state may change. Raises StateError, see ``Snapshots.wait_copied``."""
        self._parts.snapshots.wait_copied()
        if self._digest_begun:
            # The other members committed the step without this digest. Journal it anyway.
            self._digest_begun = False
            self.note(self._parts.snapshots.digests.take(self._progress.state_step))

    def drop_gradient(self) -> None:
        """Drop the local gradient, and undo its changes to buffers and metrics."""
        for _, parameter in self.gradients.parameters:
            parameter.grad = None
        self._parts.buffers.drop()
        self._progress.metrics.clear()

    # --- snapshots --------------------------------------------------------------------------------

    def snapshot_by_policy(self, durable: bool, digest: str) -> bool:
        """Begin a snapshot, and return whether it has begun.

        In a replica of several ranks, rank 0's command makes all ranks snapshot at the same step.
        """
        if self._process.group is None:
            self.snapshot(self._engine.generation, durable, digest)
            return True
        if self._process.rank == 0:
            self._engine.post(SnapshotDue(self._progress.state_step, durable))
        return False

    def snapshot(self, generation: int, durable: bool = False, digest: str = "") -> None:
        """Begin a snapshot. ``digest``: the digest of the state, where it is known already."""
        parts, step = self._parts, self._progress.state_step
        parts.points.hit("snapshot", step)
        state = SnapshotRef(generation, step, digest)
        parts.snapshots.start(state, parts.snapshot_worker.submit, self._engine.post, durable)


_log = logging.getLogger("fabric")


class Handover:
    """Hands committed gradients over to the user's update code, equally on all members; in its thread."""

    def __init__(self, parts: EngineParts, state: LocalState) -> None:
        self._parts = parts
        self._state = state
        objects = state.describer.objects.values()
        self._scales = any(isinstance(x, torch.amp.GradScaler) for x in objects)
        self._empty = 0  # steps of total weight 0 so far
        optimizers = optimizers_in(objects)
        group = parts.process.group
        self.randomness = UpdateRandomness(optimizers, group.draws if group is not None else 0)
        self.stale = StaleGradients(optimizers)
        self.attributes = parts.buffers.attributes

    def give(self, order: io.Apply, held: io.PreparedRound) -> bool:
        """Put the committed gradient into ``.grad``. Return whether the step has no update instead."""
        parts, skipped = self._parts, self._has_no_update(held) or bool(held.nonfinite)
        if skipped:
            # Optimizers do not change a parameter without a gradient, so the user's loop needs no branch.
            self._state.drop_gradient()
        else:
            self._state.run(partial(self._scatter, order, held.weight))
            if held.weight:
                parts.buffers.commit(held.weight)
                parts.own_states.commit(held.weight)
            else:
                parts.buffers.drop()
                parts.own_states.drop()
        if not order.contributed:
            self.stale.end()
            parts.own_states.hand_over()
        self.randomness.begin(order.step)
        return skipped

    def resume(self, step: int) -> None:
        """Begin the update of ``step`` again: the loop of a framework has computed a forward since ``give``.

        Its changes to buffers and its random numbers are not those of the other members.
        """
        self._parts.buffers.drop()
        self.randomness.begin(step)

    def _has_no_update(self, held: io.PreparedRound) -> bool:
        """Return whether this step is empty, so every ``.grad`` must be None. All members return the same.

        In a step of total weight 0 no member had data, or the data were drawn for a past step. Such a step is
        committed, so that the data position advances. A scaler fails on a step without gradients. Log the
        first such step, and again each time their number has doubled.
        """
        if held.weight > 0:
            return False
        self._empty += 1
        if self._empty & (self._empty - 1) == 0:
            _log.warning(
                "%s: step %d was committed with total weight 0, as no member had data: %s (%d so far)",
                self._parts.settings.replica,
                held.step,
                "its gradient is zero" if self._scales else "it has no update",
                self._empty,
            )
        return not self._scales

    def _scatter(self, order: io.Apply, weight: float) -> None:
        backend, gradients = self._parts.exchange.backend, self._state.gradients
        weight = weight or 1.0  # weight 0: the sum is zero, so any divisor will do
        if order.prepared is not None and self._parts.exchange.stays(order.step):
            gradients.divide(weight)
        elif order.prepared is not None:
            slot = self._parts.slots.find(order.step)
            backend.scatter(gradients, slot.buffer, weight, slot.absent)
        else:
            fetched = self._parts.fetch_thread.buffer
            assert fetched is not None
            backend.scatter(gradients, fetched, weight)


def optimizers_in(objects: Iterable[object]) -> list[torch.optim.Optimizer]:
    return [x for x in objects if isinstance(x, torch.optim.Optimizer)]
