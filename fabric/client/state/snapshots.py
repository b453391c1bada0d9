"""Takes the snapshots of this replica, into two slots of the checkpoint server's memory by turns.

The copy starts at a step boundary, and reads the state before the user's update code runs. A snapshot is due
when the policy (``snapshot_policy``) says so, or when a joining member requests it.
"""

import contextlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from fabric.ckpt_server.attach.server_handle import ServerHandle
from fabric.ckpt_server.state.content_digest import ContentDigests
from fabric.ckpt_server.state.snapshot import Copier, build_manifest
from fabric.ckpt_server.state.training_state import StateDescriber, StateView
from fabric.client.state.durable_policy import DurableCheckpoints
from fabric.client.state.mutation_guard import UNNAMED
from fabric.client.state.snapshot_policy import SnapshotPolicy
from fabric.client.state.snapshot_slots import SnapshotSlots
from fabric.client.state.state_digest import CopiedState, Digests, PendingSnapshot
from fabric.client.state.write_watch import WriteWatch
from fabric.errors import FabricError, ServerLost, StateError
from fabric.model import SnapshotRef
from fabric.protocol.messages.member_events import Saved, Snapshotted
from fabric.protocol.messages.rank_messages import NameSnapshot, SnapshotNamed
from fabric.runtime.failpoints import Failpoints

_PAUSE_S = 1.0  # pause after a failed snapshot
_NUMBERS = re.compile(r"[\d.,]+")
_log = logging.getLogger(__name__)


class Snapshots:
    """Takes one snapshot at a time.

    ``submit`` runs a job on the snapshot worker; ``post`` takes Snapshotted; ``recover`` starts a dead server
    again. ``rank``: this process's rank, in a replica of several ranks. Such a rank serves its part only
    after a call of ``name``, when all ranks have their parts.
    """

    def __init__(
        self,
        handle: ServerHandle,
        describer: StateDescriber,
        copier: Copier,
        policy: SnapshotPolicy,
        who: tuple[str, str],
        on_device: bool,
        recover: Callable[[], None],
        rank: int | None = None,
    ) -> None:
        self.content: ContentDigests | None = None  # set where replicas may have unequal layouts
        self.durable: DurableCheckpoints | None = None  # set where snapshots may become durable checkpoints
        self.points = Failpoints("")
        self.slots = SnapshotSlots(handle, copier)
        self._describer = describer
        self._copier = copier
        self._policy = policy
        self._again_at: float | None = None  # time of the next try after a failed snapshot
        self._last_failure = ""
        self.job, self.replica = who
        self._taking: PendingSnapshot | None = None  # the snapshot that was begun last
        self._sized, self._nbytes = False, 0  # whether the size includes the optimizer's part
        self._watch = WriteWatch(who[1], describer, self.digest)
        self._digests = Digests(self._watch, copier, self._settle)
        self._on_device = on_device
        self._recover = recover
        self._rank = rank

    def is_due(self, step: int, submit: Callable[[Callable[[], None]], None]) -> bool:
        """Whether the policy asks for a snapshot at this boundary, and the copy can start without a wait."""
        now = time.monotonic()
        wanted = self._policy.is_due(step, now)
        if self._again_at is not None:
            wanted = now >= self._again_at
        if step > 0 and not self._sized:
            self._sized, self._nbytes = True, self._describer.capture(step).nbytes
            self.slots.has_room(self._nbytes, submit)
        return wanted and not self._is_copying and self.slots.has_room(self._nbytes, submit)

    def start(
        self,
        state: SnapshotRef,
        submit: Callable[[Callable[[], None]], None],
        post: Callable[[Snapshotted | Saved], None],
        durable: bool = False,
    ) -> None:
        """Begin to copy ``state``, which must not change until ``wait_copied`` returns.

        The snapshot worker asks the server for the slot and starts the copy. On a device this thread starts
        it, behind all enqueued work. The digest in ``state`` may be empty. ``durable``: the snapshot becomes
        a durable checkpoint. If the snapshot before still waits for the server's slot, this snapshot is given
        up. Raises StateError where user code changed the state of the snapshot before.

        The copy runs beside user code, unless user code has written to the state before (``WriteWatch``).
        """
        self._wait_last()
        if self._is_copying:
            post(Snapshotted(state.step, "", state.generation))
            return
        started, created = time.monotonic(), time.time()
        view = self._describer.capture(state.step)
        self._nbytes = view.nbytes

        def publish(copy: CopiedState | None) -> None:
            self._publish(copy, taking, post)
            if durable and self._rank is None:
                self._persist(state.step, state.generation, post)

        taking = PendingSnapshot(
            state, started, created, self._watch.guard(view), lambda copy: submit(lambda: publish(copy))
        )
        self._taking = taking
        begun = self._begin(view, taking) if self._on_device else None
        submit(lambda: self._take(view, taking, begun, publish))
        if self._watch.reads_first and taking.wait_begun():
            self._copier.fence()
            taking.copied.wait()

    @property
    def _is_copying(self) -> bool:
        """Whether the last copy runs, or was given up while it still waits for the server."""
        taking = self._taking
        if taking is None:
            return False
        return not (taking.ended if taking.given_up else taking.copied).is_set()

    def _wait_last(self) -> None:
        """Wait until the last copy is over. Raises StateError where user code changed its state meanwhile."""
        if self._taking is not None:
            self._taking.copied.wait()
            self._settle(self._taking)
            self._taking.demand_unchanged()

    def _begin(self, view: StateView, taking: PendingSnapshot) -> int | FabricError:
        """Start the copy; return its slot, or why it could not start."""
        slot = -1
        try:
            slot = self.slots.take()
            memory = self.slots.memory(slot, view.nbytes)
            taking.begin(lambda: self._copier.start(view, memory))
        except FabricError as error:
            if slot >= 0:
                self.slots.give_back(slot)
            return error
        else:
            return slot
        finally:
            taking.begun.set()

    def _failed(self, step: int, error: FabricError) -> None:
        """Log a failure, unless it repeats the last one, and set the time of the next try."""
        self._again_at = time.monotonic() + _PAUSE_S
        # Compare the messages without their numbers: the slot and the free memory differ every time.
        gist = _NUMBERS.sub("", str(error))
        if gist != self._last_failure:
            self._last_failure = gist
            _log.warning("fabric: %s: no snapshot of step %d: %s", self.replica, step, error)

    def name(self, order: NameSnapshot, post: Callable[[SnapshotNamed | Saved], None]) -> None:
        """Serve this rank's part under the digests of all ranks, unless its slot was overwritten since."""
        done, rank = False, self._rank or 0
        try:
            done = self.slots.publish_part(order.generation, order.step, rank, order.digests)
        except FabricError:
            self._recover()
        post(SnapshotNamed(order.step, order.generation, done))
        if done and order.durable:
            self._persist(order.step, order.generation, post)

    def _persist(self, step: int, generation: int, post: Callable[[Saved], None]) -> None:
        """Let the server write its snapshot; after a notice wait for the outcome, which rank 0 tells."""
        durable, handle = self.durable, self.slots.handle
        if durable is None:
            return
        # A server that ends loses its snapshots. The next server writes the next durable checkpoint.
        with contextlib.suppress(FabricError):
            durable.persist(handle, step, generation)
        if durable.noticed and not self._rank:
            post(Saved(step, durable.await_written(handle, step, generation)))

    def _take(
        self,
        view: StateView,
        taking: PendingSnapshot,
        begun: int | FabricError | None,
        publish: Callable[[CopiedState | None], None],
    ) -> None:
        """On the snapshot worker: start the copy unless ``begun``, wait for it, and publish it.

        If user code has run meanwhile, the trainer's thread checks the copy and lets it be published.
        """
        slot, copy, waits = -1, None, False
        try:
            begun = self._begin(view, taking) if begun is None else begun
            if isinstance(begun, FabricError):
                raise begun
            slot = begun
            digests = self._copier.join()
            taking.digest, taking.torn = digests.digest, taking.guard.written()
            copy = CopiedState(view, slot, digests, self.slots.memory(slot, view.nbytes)[: view.nbytes])
        except FabricError as error:
            if slot >= 0:
                self.slots.give_back(slot)
            self._failed(taking.state.step, error)
            self._recover()
        finally:
            taking.copy_s = time.monotonic() - taking.started
            self._policy.taken(taking.state.step, taking.started, taking.copy_s)
            waits = taking.end_copy(None if self._on_device else copy)
        if not waits:
            if copy is not None and self._differs(taking):
                taking.refused = UNNAMED
            publish(copy)

    def _differs(self, taking: PendingSnapshot) -> bool:
        """Whether the copy has another digest than the state had."""
        return self.content is None and taking.state.digest not in ("", taking.digest)

    def _publish(
        self, copy: CopiedState | None, taking: PendingSnapshot, post: Callable[[Snapshotted], None]
    ) -> None:
        """On the snapshot worker: let the server serve ``copy``, and say so, or that there is no snapshot."""
        generation, step, digest = taking.state.generation, taking.state.step, ""
        if copy is not None:
            try:
                digest = self._serve_copy(copy, taking)
            except FabricError as error:
                # The event Snapshotted without a digest tells the core that this step has no snapshot.
                self.slots.give_back(copy.slot)
                self._failed(step, error)
                self._recover()
        taking.ended.set()
        post(Snapshotted(step, digest, generation))
        if copy is not None and digest and step > 0:  # at step 0 the state still lacks the optimizer's part
            self.slots.prepare(copy.view.nbytes)

    def _serve_copy(self, copy: CopiedState, taking: PendingSnapshot) -> str:
        """Let the server serve ``copy``, and return the state's digest; empty where it is not the state's.

        Raises FabricError.
        """
        taking.demand_unchanged()
        if taking.torn:
            self.slots.give_back(copy.slot)
            self._again_at = time.monotonic()
            return ""
        manifest = build_manifest(
            copy.view,
            copy.digests,
            job=self.job,
            replica=self.replica,
            generation=taking.state.generation,
            created=taking.created,
        )
        digest = copy.digests.digest
        if self.content is not None:
            digest = manifest["content"] = self.content.of_file(copy.memory)
        generation, step = taking.state.generation, taking.state.step
        self.points.hit("publish", step, lambda: copy.memory)
        if self._rank is None:
            self.slots.publish(copy.slot, manifest)
        else:
            self.slots.keep_unnamed(generation, step, copy.slot, manifest)
        self._again_at, self._last_failure = None, ""
        return digest

    def expose(self) -> None:
        """Note that user code runs from now on."""
        self._digests.exposed = True
        if self._taking is not None:
            self._taking.expose()

    def settle(self) -> None:
        """Check a complete copy, and let the server serve it. Raises StateError as ``wait_copied`` does.

        The calling thread is the trainer's, before its update, while no user code runs.
        """
        if self._taking is not None and self._taking.copied.is_set():
            self._settle(self._taking)

    def _settle(self, taking: PendingSnapshot) -> None:
        if taking.settled:
            return
        taking.settled, began = True, time.monotonic()
        taking.demand_unchanged()
        copy, watch = taking.take_copy(), self._watch
        try:
            # A copy that was complete before user code went on has the digest of the state at its boundary.
            name = watch.check(taking.guard, taking.state.step, "" if copy is not None else taking.digest)
            if copy is not None:
                if self._differs(taking):
                    watch.check_known(taking.state.step, taking.state.digest)
                    name = name or "a tensor"
                name = name or watch.torn(copy.memory, copy.view)
        except StateError as error:
            taking.refused = str(error)
            raise
        else:
            if name:
                watch.note(name)
                taking.torn = name
        finally:
            taking.guard.close()
            if copy is not None:
                cost_s = taking.copy_s + time.monotonic() - began
                self._policy.taken(taking.state.step, taking.started, cost_s)
                taking.publish(copy)

    def wait_copied(self) -> None:
        """Return when the state may change. On a device, make the compute stream wait for the copy instead.

        A copy that has not begun within SLOT_S is given up. Raises StateError where the user's code has
        changed the state already.
        """
        taking = self._taking
        if taking is not None:
            if not taking.copied.is_set() and taking.wait_begun():
                self._copier.fence()
                if not self._on_device:
                    taking.copied.wait()
            self._settle(taking)
            taking.demand_unchanged()
        self._digests.finish()

    def digest(self, view: StateView) -> str:
        """Return the digest of ``view``, a state on a device, at once."""
        reading = self._copier.digest(view)
        reading.help()
        return reading.digests().digest

    def begin_digest(self, step: int, copied: bool) -> None:
        """Begin to digest the state at ``step``.

        The state must not change until ``wait_copied`` or ``take_digest`` returns. ``copied``: its snapshot
        was begun just now, and its copy computes the digest.
        """
        self._digests.begin(step, self._taking if copied else None)

    def take_digest(self, step: int) -> str:
        """Return the digest that ``begin_digest`` began: see ``Digests.take``."""
        return self._digests.take(step)

    def take_view(self, step: int) -> StateView | None:
        """Return the view of the state whose digest was begun at ``step``, once; else None."""
        return self._digests.take_view(step)

    def serve(self, slot: int, manifest: Mapping[str, Any]) -> None:
        """Make the server serve the fetched state in ``slot``, which was loaded."""
        with contextlib.suppress(FabricError):  # the server refuses where it serves that slot already
            self.slots.publish(slot, manifest)

    def target(self, nbytes: int, beside: SnapshotRef | None = None) -> tuple[int, memoryview]:
        """Return a slot, and its memory, for a state that is fetched. Raises FabricError.

        The fetched state becomes this replica's snapshot. ``beside``: a snapshot of the same state in another
        layout, which other members may still need. It stays, and the next snapshot overwrites the fetched
        state. Restarts a dead server, because a replica that waits for a state takes no snapshots.
        """
        try:
            return self._target(nbytes, beside)
        except ServerLost:
            self._recover()
            return self._target(nbytes, beside)

    def _target(self, nbytes: int, beside: SnapshotRef | None) -> tuple[int, memoryview]:
        # Wait for a copy under way, so that its slot is not overwritten.
        if self._taking is not None:
            self._taking.copied.wait()
        kept = self.slots.held(beside) if beside is not None else -1
        slot = self.slots.take() if kept < 0 else self.slots.take_other(kept)
        return slot, self.slots.memory(slot, nbytes)[:nbytes]
