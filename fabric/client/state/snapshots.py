"""When this replica snapshots its state, and how: into two slots of the server's memory, in turn.

The copy starts at a step boundary and is joined before the user's update code may change anything. When one
is due a policy says (``snapshot_policy``); a newcomer's request is served on top of it.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from fabric.ckpt_server.attach.server_handle import ServerHandle
from fabric.ckpt_server.format.manifest import of_rank
from fabric.ckpt_server.state.snapshot import Copier, build_manifest
from fabric.ckpt_server.state.training_state import StateDescriber, StateView
from fabric.client.state.durable_policy import DurableCheckpoints
from fabric.client.state.mutation_guard import UNNAMED, MutationGuard
from fabric.client.state.snapshot_policy import SnapshotPolicy
from fabric.client.state.state_digest import Digests, PendingSnapshot
from fabric.errors import FabricError, ServerLost, StateError
from fabric.model import SnapshotRef
from fabric.protocol.messages.member_events import Snapshotted
from fabric.protocol.messages.rank_messages import NameSnapshot, SnapshotNamed

_SLOTS = 2
_PAUSE_S = 1.0  # after one that failed
_SMALL_BYTES = 64 << 20  # so much memory is there within a moment
_SLACK_BYTES = 64 << 10  # numbers in a header get longer: a slot would have to grow for them
_NUMBERS = re.compile(r"[\d.,]+")
_log = logging.getLogger(__name__)


class Snapshots:
    """One at a time. ``submit`` runs a job on the keeper thread; ``post`` takes Snapshotted; ``recover``
    starts a dead server again. ``rank`` is mine in a replica of several ranks: there a part is served only
    when ``name`` says that all ranks have theirs."""

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
        self.durable: DurableCheckpoints | None = None  # set where snapshots may become durable checkpoints
        self._handle = handle
        self._describer = describer
        self._copier = copier
        self._policy = policy
        self._again_at: float | None = None  # after one that failed, whatever the policy says
        self._said = ""
        self.job, self.replica = who
        # What the server still holds from before stays as long as it can: the newest is overwritten last.
        self._next_slot = (handle.slots[-1] + 1) % _SLOTS if handle.slots else 0
        self._taking: PendingSnapshot | None = None  # the last one that was begun
        self._sized, self._nbytes = False, 0  # whether the optimizer's part is in the size of the state
        self._preparing = self._lacks = False  # memory is on its way; it could not be had
        self._digests = Digests(describer, copier)
        self._on_device = on_device
        self._recover = recover
        self._rank = rank
        # Parts that wait for those of the other ranks, by (generation, step): the slot and the manifest.
        self._unnamed: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
        self._slots_lock = threading.Lock()

    def is_due(self, step: int, submit: Callable[[Callable[[], None]], None]) -> bool:
        """Whether the policy wants one at this boundary, and need not wait for memory."""
        now = time.monotonic()
        wanted = self._policy.is_due(step, now)
        if self._again_at is not None:
            wanted = now >= self._again_at
        if step > 0 and not self._sized:
            self._sized, self._nbytes = True, self._describer.capture(step).nbytes
            self._has_room(submit)
        return wanted and not self._is_copying and self._has_room(submit)

    def _has_room(self, submit: Callable[[Callable[[], None]], None]) -> bool:
        """Whether memory for the next one is there. A large state's is had beside the steps, for a copy that
        waits for it holds up the trainer; where it could not be had the copy finds out why."""
        if self._nbytes <= _SMALL_BYTES or self._lacks:
            return True
        if not self._preparing and not self._holds(self._next_slot, self._nbytes):
            self._preparing = True
            submit(lambda: self._prepare(self._nbytes))
        return not self._preparing

    def _holds(self, slot: int, nbytes: int) -> bool:
        return self._handle.holds("snapshot", slot, nbytes)

    def start(
        self,
        state: SnapshotRef,
        submit: Callable[[Callable[[], None]], None],
        post: Callable[[Snapshotted], None],
        durable: bool = False,
    ) -> None:
        """Begin to copy ``state``, which must not change until ``wait_copied`` returns; its digest is empty
        where it is not known yet. Raises StateError where the last one had been changed.

        The trainer's thread only says what to copy: the keeper asks the server for the slot and starts the
        copy. On a device it is started here, behind the work that is enqueued so far. ``durable``: it becomes
        a durable checkpoint when it is there. While the server has not answered for the last one, there is
        none: nobody waits for it twice.
        """
        self._wait_last()
        if self._is_copying:
            post(Snapshotted(state.step, "", state.generation))
            return
        started, created = time.monotonic(), time.time()
        view = self._describer.capture(state.step)
        self._nbytes = view.nbytes
        self._taking = taking = PendingSnapshot(state, started, created, MutationGuard(view))
        begun = self._begin(view, taking) if self._on_device else None
        submit(lambda: self._take(view, taking, begun, post))
        if durable and self._rank is None:
            submit(lambda: self._persist(state.step, state.generation))

    @property
    def _is_copying(self) -> bool:
        """Whether the last one is under way, or was given up and still waits for the server."""
        taking = self._taking
        if taking is None:
            return False
        return not (taking.ended if taking.given_up else taking.copied).is_set()

    def _wait_last(self) -> None:
        """Until the last copy is over. Raises StateError where its state has been changed."""
        if self._taking is not None:
            self._taking.copied.wait()
            self._taking.demand_unchanged()

    def _begin(self, view: StateView, taking: PendingSnapshot) -> int | FabricError:
        """Start the copy; the slot that it goes to, or why there is none."""
        slot = -1
        try:
            slot = self._take_slot()
            memory = self._memory(slot, view.nbytes)
            taking.begin(lambda: self._copier.start(view, memory))
        except FabricError as error:
            if slot >= 0:  # it holds nothing now: the next one goes there, and the other slot stays
                self._next_slot = slot
            return error
        else:
            return slot
        finally:
            taking.begun.set()

    def _memory(self, slot: int, nbytes: int) -> memoryview:
        wanted = nbytes if self._holds(slot, nbytes) else nbytes + _SLACK_BYTES
        return self._handle.allocate("snapshot", slot, wanted)

    def _prepare(self, nbytes: int) -> None:
        """On the keeper thread: have the memory of both slots before it is wanted."""
        slots, lacks = (self._next_slot, 1 - self._next_slot), True
        self._preparing = not all(self._holds(slot, nbytes) for slot in slots)
        with contextlib.suppress(FabricError):  # said when it is wanted
            for slot in slots:
                self._copier.prepare(self._memory(slot, nbytes))
            lacks = False
        self._preparing, self._lacks = False, lacks

    def _failed(self, step: int, error: FabricError) -> None:
        """Say it, once as long as it goes on, and try again in a while."""
        self._again_at = time.monotonic() + _PAUSE_S
        # Which slot it is, and how much memory there is, differs every time.
        gist = _NUMBERS.sub("", str(error))
        if gist != self._said:
            self._said = gist
            _log.warning("fabric: %s: no snapshot of step %d: %s", self.replica, step, error)

    def _take_slot(self) -> int:
        """The slot to overwrite: the older one, unless somebody reads it and nobody reads the other."""
        with self._slots_lock:
            for slot in (self._next_slot, 1 - self._next_slot):
                if self._handle.begin("snapshot", slot, unless_read=True):
                    break
            else:
                slot = self._next_slot
                self._handle.begin("snapshot", slot)
            self._next_slot = (slot + 1) % _SLOTS
            self._unnamed = {key: held for key, held in self._unnamed.items() if held[0] != slot}
            return slot

    def name(self, order: NameSnapshot, post: Callable[[SnapshotNamed], None]) -> None:
        """Serve my part of a snapshot under the digests of all ranks, unless its slot was taken since."""
        done = False
        with self._slots_lock:
            slot, manifest = self._unnamed.pop((order.generation, order.step), (-1, {}))
            if slot >= 0 and order.digests and self._rank is not None:
                try:
                    self._handle.publish_snapshot(slot, of_rank(manifest, self._rank, order.digests))
                    done = True
                except FabricError:
                    self._recover()
        if done and order.durable:
            self._persist(order.step, order.generation)
        post(SnapshotNamed(order.step, order.generation, done))

    def _persist(self, step: int, generation: int) -> None:
        if self.durable is not None:
            # A server that is lost took the snapshot with it: the next one is written by its successor.
            with contextlib.suppress(FabricError):
                self.durable.persist(self._handle, step, generation)

    def _take(
        self,
        view: StateView,
        taking: PendingSnapshot,
        begun: int | FabricError | None,
        post: Callable[[Snapshotted], None],
    ) -> None:
        """On the keeper thread: start the copy (where it has not ``begun``), wait for it, have it served."""
        generation, step = taking.state.generation, taking.state.step
        digest = ""
        try:
            try:
                slot = self._begin(view, taking) if begun is None else begun
                if isinstance(slot, FabricError):
                    raise slot
                digests = self._copier.join()
                if taking.state.digest not in ("", digests.digest):
                    taking.refused = UNNAMED
                taking.digest = digests.digest
            finally:
                taking.settle()
                self._policy.taken(step, taking.started, time.monotonic() - taking.started)
                taking.copied.set()
            if taking.refused:
                raise StateError(taking.refused)
            manifest = build_manifest(
                view,
                digests,
                job=self.job,
                replica=self.replica,
                generation=generation,
                created=taking.created,
            )
            if self._rank is None:
                self._handle.publish_snapshot(slot, manifest)
            else:
                self._unnamed[generation, step] = (slot, manifest)
            digest = digests.digest
            self._again_at, self._said = None, ""
        except FabricError as error:
            # The server died under us: the newcomer is told that this replica missed the step.
            self._failed(step, error)
            self._recover()
        finally:
            taking.ended.set()
        post(Snapshotted(step, digest, generation))
        if digest and step > 0:  # before the first step the optimizer has not made its part
            self._prepare(view.nbytes)

    def wait_copied(self) -> None:
        """Return once the state may change: on a device, once the compute stream is told to wait. A copy that
        has not begun is waited for no longer than SLOT_S. Raises StateError where the user's code has changed
        the state already."""
        taking = self._taking
        if taking is not None and not taking.copied.is_set():
            taking.settle()
            if taking.wait_begun():
                self._copier.fence()
                if not self._on_device:
                    taking.copied.wait()
        if taking is not None:
            taking.demand_unchanged()
        self._digests.finish()

    def begin_digest(self, step: int, copied: bool) -> None:
        """Begin to digest the state at ``step``, on the host, which must not change until ``wait_copied`` or
        ``take_digest`` returns. ``copied``: its snapshot was begun just now, and brings the digest along."""
        self._digests.begin(step, self._taking if copied else None)

    def take_digest(self, step: int) -> str:
        """What ``begin_digest`` began: see ``Digests.take``."""
        return self._digests.take(step)

    def held(self, state: SnapshotRef) -> int:
        """The slot in which the server held this state when this trainer attached, or -1."""
        found = zip(self._handle.snapshots, self._handle.slots, strict=True)
        return next((slot for ref, slot in found if ref == state), -1)

    def look(self, slot: int, nbytes: int) -> memoryview:
        """The bytes in a slot, which is not overwritten next. Raises FabricError."""
        with self._slots_lock:
            self._next_slot = (slot + 1) % _SLOTS
        return self._handle.allocate("snapshot", slot, nbytes)

    def serve(self, slot: int, manifest: Mapping[str, Any]) -> None:
        """What was fetched into ``slot`` is loaded, and mine to give."""
        with contextlib.suppress(FabricError):  # refused where it has been served from that slot all along
            self._handle.publish_snapshot(slot, manifest)

    @property
    def url(self) -> str:
        """Where this trainer's own server is read."""
        return self._handle.url

    def target(self, nbytes: int, beside: SnapshotRef | None = None) -> tuple[int, memoryview]:
        """A slot for a state that is fetched: it becomes this replica's own snapshot. ``beside``: it is this
        state in another layout. What the server has of that others may still need, so it stays, and the next
        snapshot goes where the fetched one was. A server that is dead is started again: whoever waits for a
        state takes no snapshots, so nobody else would. Raises FabricError."""
        try:
            return self._target(nbytes, beside)
        except ServerLost:
            self._recover()
            return self._target(nbytes, beside)

    def _target(self, nbytes: int, beside: SnapshotRef | None) -> tuple[int, memoryview]:
        # A copy under way has a slot that nothing was published from yet, and must not lose it.
        if self._taking is not None:
            self._taking.copied.wait()
        kept = self.held(beside) if beside is not None else -1
        if kept < 0:
            slot = self._take_slot()
        else:
            with self._slots_lock:
                slot = self._next_slot = 1 - kept
                self._handle.begin("snapshot", slot)
        return slot, self._memory(slot, nbytes)[:nbytes]
