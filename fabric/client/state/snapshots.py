"""Takes the snapshots of this replica, into two slots of the checkpoint server's memory by turns.

The copy starts at a step boundary, and reads the state before the user's update code runs. A snapshot is due
when the policy says so, or when a joining member requests it.
"""

import contextlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.format.manifest import of_rank, state_digest
from fabric.ckpt_server.state.content_digest import ContentDigests
from fabric.ckpt_server.state.snapshot import (
    Copier,
    DeviceDigestPass,
    DigestPass,
    SnapshotDigests,
    build_manifest,
)
from fabric.ckpt_server.state.training_state import StateDescriber, StateView
from fabric.client.state.durable_policy import DurableCheckpoints
from fabric.client.state.mutation_guard import UNNAMED, MutationGuard, WriteWatch
from fabric.errors import ConfigError, FabricError, ServerLost, StateError
from fabric.model import SnapshotRef, Value
from fabric.protocol.messages.member_events import Saved, Snapshotted
from fabric.protocol.messages.rank_messages import NameSnapshot, SnapshotNamed
from fabric.runtime.config import Settings, parse_snapshot_every
from fabric.runtime.failpoints import Failpoints


class SnapshotPolicy(Protocol):
    """When a replica snapshots its state without a request. One per process, for one thread at a time.

    ``is_due`` is called once at every step boundary, and ``taken`` after every copy and its check, requested
    ones included, and for a fetched state. Times are monotonic seconds.
    """

    def is_due(self, step: int, now: float) -> bool:
        """Whether the state at ``step`` should be snapshotted at this boundary."""

    def taken(self, step: int, now: float, cost_s: float) -> None:
        """Note a snapshot of ``step``, begun at ``now``, whose copy took ``cost_s``.

        Called again where the copy is then compared with the state, with the time of both.
        """


_LEAST_COST_S = 0.02


@dataclass(slots=True)
class OverheadBudget:
    """Snapshots as often as ``share`` of the time allows, and at least every ``max_age_s`` seconds.

    The whole time of a copy and of its check counts, although most of it overlaps the step's compute. Where
    that is less, 20 ms count: requests and changes of threads cost the steps about it some time too. A
    snapshot is due if waiting for the next boundary would exceed ``max_age_s``. A snapshot of the state
    before the first step does not count: it lacks the optimizer's part, whose memory must exist before a
    joining replica waits for a snapshot. Raises ConfigError.
    """

    share: float = 0.02  # copying time per step time; 0: snapshot by age alone
    max_age_s: float = 600.0  # greatest age of the newest snapshot, seconds
    _at: float = field(default=-math.inf, repr=False)
    _cost_s: float = field(default=0.0, repr=False)
    _asked: float = field(default=math.inf, repr=False)

    def __post_init__(self) -> None:
        if not (0 <= self.share < math.inf and 0 < self.max_age_s < math.inf):
            raise ConfigError(
                f"OverheadBudget({self.share!r}, {self.max_age_s!r}): the share is from 0, the age above 0 s"
            )

    def is_due(self, step: int, now: float) -> bool:
        step_s, self._asked = max(0.0, now - self._asked), now
        if step < 1:
            return False
        age_s = now - self._at
        paid = self.share > 0 and max(self._cost_s, _LEAST_COST_S) <= self.share * age_s
        return paid or age_s + step_s + self._cost_s >= self.max_age_s

    def taken(self, step: int, now: float, cost_s: float) -> None:
        if step >= 1:
            self._at, self._cost_s = now, cost_s


@dataclass(slots=True)
class EverySteps:
    """Snapshots at every ``n``-th step, so all replicas snapshot at the same steps. Raises ConfigError.

    The first snapshot may come later, if the memory for a large state is not allocated yet.
    """

    n: int
    _last: int = field(default=-1, repr=False)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"EverySteps({self.n!r}): give a number of steps from 1")

    def is_due(self, step: int, now: float) -> bool:
        return step % self.n == 0 and step != self._last

    def taken(self, step: int, now: float, cost_s: float) -> None:
        self._last = step


def policy_of(settings: Settings) -> SnapshotPolicy:
    """Return the policy that the settings ask for."""
    share, every = parse_snapshot_every(settings.snapshot_every)
    return EverySteps(every.steps) if every.steps else OverheadBudget(share, every.seconds)


# How long the trainer waits for a snapshot's slot, which a running server gives within milliseconds.
SLOT_S = 0.5


class CopiedState(Value):
    """A complete copy in a slot of the checkpoint server's memory."""

    view: StateView
    slot: int
    digests: SnapshotDigests
    memory: memoryview


@dataclass(slots=True)
class PendingSnapshot:
    """One snapshot under way."""

    state: SnapshotRef  # its digest is empty while unknown
    started: float  # the time when the copy began, monotonic seconds
    created: float  # the time when the state was current, Unix time
    guard: MutationGuard
    publish: Callable[[CopiedState], None]  # lets the server serve the copy, once it has been checked
    settled: bool = False  # whether the trainer's thread has checked for writes
    copy_s: float = 0.0  # how long the copy took
    refused: str = ""  # how user code changed the state while it was copied
    torn: str = ""  # a tensor that user code wrote to for a moment meanwhile
    digest: str = ""  # digest of the copy, once computed
    begun: threading.Event = field(default_factory=threading.Event)  # the copy runs, or cannot be made
    copied: threading.Event = field(default_factory=threading.Event)  # the copy is over
    ended: threading.Event = field(default_factory=threading.Event)  # the server serves it, or failed
    given_up: bool = False  # the trainer did not wait longer, so the copy must not begin
    copy: CopiedState | None = None  # the copy, until it is checked
    _exposed: bool = False  # user code has run while the state was copied
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, start: Callable[[], None]) -> None:
        """Run ``start``, which begins the copy. Raises StateError where the copy was given up."""
        with self._lock:
            if self.given_up:
                raise StateError(
                    f"the checkpoint server had no slot for it within {SLOT_S:g} s, and training has gone on"
                )
            start()
            self.begun.set()

    def wait_begun(self) -> bool:
        """Wait up to SLOT_S until the copy has begun or has failed; return False where it is given up."""
        if self.begun.wait(SLOT_S):
            return not self.given_up
        with self._lock:
            if not self.begun.is_set():
                self.given_up = True
                self.begun.set()
                self.copied.set()
        return not self.given_up

    def expose(self) -> None:
        """Note that user code runs from now on."""
        with self._lock:
            self._exposed = self._exposed or not self.copied.is_set()

    def end_copy(self, copy: CopiedState | None) -> bool:
        """Note that the copy is over; return whether it must be checked, as user code has run meanwhile."""
        with self._lock:
            self.copy = copy if self._exposed else None
            self.copied.set()
            return self.copy is not None

    def take_copy(self) -> CopiedState | None:
        """Return the copy that is to be checked, once."""
        with self._lock:
            copy, self.copy = self.copy, None
            return copy

    def demand_unchanged(self) -> None:
        """Raise StateError where the user's code has changed the state."""
        if self.refused:
            raise StateError(self.refused)


class Digests:
    """Computes one digest at a time, for the trainer's thread, while forward and backward run.

    The copy of a snapshot begun at the same boundary computes it; otherwise the state is read for it.
    ``settle`` checks a snapshot's copy.
    """

    def __init__(self, watch: WriteWatch, copier: Copier, settle: Callable[[PendingSnapshot], None]) -> None:
        self._watch = watch
        self._copier = copier
        self._settle = settle
        self._reading: tuple[DigestPass | DeviceDigestPass, MutationGuard] | None = None
        self._taking: PendingSnapshot | None = None
        self.exposed = False  # whether user code has run since the digest was begun
        self._last = -1, ""  # step and digest of the result computed last
        self._guard: MutationGuard | None = None  # of the newest digest, until it is taken

    def begin(self, step: int, taking: PendingSnapshot | None) -> None:
        """Begin a digest. The state at ``step`` must not change until ``finish`` or ``take`` returns.

        ``taking``: a snapshot of the state that was begun at this boundary, whose copy computes the digest.
        """
        self._last, self._taking, self.exposed = (step, ""), taking, False
        if taking is None:
            view = self._watch.describer.capture(step)
            reading, self._guard = self._copier.digest(view), self._watch.guard(view)
            self._reading = reading, self._guard
            if self._watch.reads_first:
                reading.help()
                self._last = step, reading.digest()
        else:
            self._guard = taking.guard

    def take_guard(self, step: int) -> MutationGuard | None:
        """Return the guard of the state whose digest was begun at ``step``, once; else None."""
        guard, self._guard = self._guard, None
        return guard if guard is not None and guard.view.step == step else None

    def take(self, step: int) -> str:
        """Return the digest that ``begin`` began; the calling thread helps to compute it.

        Empty where no digest was begun, or the copy was not made. Raises StateError where the user's code has
        changed the state.
        """
        self.finish()
        return self._last[1] if self._last[0] == step else ""

    def finish(self) -> None:
        """Complete the digest that was begun. Raises as ``take`` does."""
        taking, self._taking = self._taking, None
        reading, self._reading = self._reading, None
        step, digest = self._last
        if taking is not None:
            if not taking.copied.is_set() and taking.wait_begun():
                self._copier.fence()
                taking.copied.wait()
            self._settle(taking)
            self._last = step, self._watch.digest(taking.guard.view) if taking.torn else taking.digest
        elif reading is not None:
            if digest:  # it was read before user code went on
                self._watch.check(reading[1], digest)
                return
            reading[0].help()
            digest = reading[0].digest()
            if name := self._watch.check(reading[1]):
                self._watch.note(name)
                digest = self._watch.digest(reading[1].view)
            elif self.exposed:
                digest = self._watch.read_again(reading[1].view, digest)
            self._last = step, digest


_SLOTS = 2  # in the checkpoint server's memory, for this replica's snapshots
_SMALL_BYTES = 64 << 20  # memory of up to this size is allocated within milliseconds
_SLACK_BYTES = 64 << 10  # spare bytes, because numbers in a header get longer


class SnapshotSlots:
    """Chooses the slot of the next snapshot, and prepares its memory. Several threads may call it."""

    def __init__(self, handle: ServerHandle, copier: Copier) -> None:
        self.handle = handle
        self._copier = copier
        # Keep the server's snapshots as long as possible: overwrite the newest one last.
        self._next = (handle.slots[-1] + 1) % _SLOTS if handle.slots else 0
        # slot -> the state that the server serves from it
        self._held = dict(zip(handle.slots, handle.snapshots, strict=True))
        self._preparing = self._lacks = False  # memory is being allocated; the allocation failed
        # (generation, step) -> slot and manifest of this rank's part, kept until all ranks have their parts.
        self._unnamed: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def has_room(self, nbytes: int, submit: Callable[[Callable[[], None]], None]) -> bool:
        """Return whether the next snapshot's memory is allocated; begin to allocate it if not.

        A large state's memory is allocated in the background, because a copy that waits for it delays the
        trainer. If the allocation fails, the copy fails too and reports why.
        """
        if nbytes <= _SMALL_BYTES or self._lacks:
            return True
        if not self._preparing and not self._holds(self._next, nbytes):
            self._preparing = True
            submit(lambda: self.prepare(nbytes))
        return not self._preparing

    def _holds(self, slot: int, nbytes: int) -> bool:
        return self.handle.holds("snapshot", slot, nbytes)

    def prepare(self, nbytes: int) -> None:
        """On the snapshot worker: allocate the memory of both slots before a copy needs it."""
        slots, lacks = (self._next, 1 - self._next), True
        self._preparing = not all(self._holds(slot, nbytes) for slot in slots)
        with contextlib.suppress(FabricError):  # the copy that needs the memory reports the error
            for slot in slots:
                self._copier.prepare(self.memory(slot, nbytes))
            lacks = False
        self._preparing, self._lacks = False, lacks

    def memory(self, slot: int, nbytes: int) -> memoryview:
        """Return the memory of a slot, of ``nbytes`` or a little more. Raises FabricError."""
        wanted = nbytes if self._holds(slot, nbytes) else nbytes + _SLACK_BYTES
        return self.handle.allocate("snapshot", slot, wanted)

    def map_next(self) -> None:
        """Map what the server has kept of the next slot's memory, before a state is fetched into it."""
        with contextlib.suppress(FabricError):
            self.handle.allocate("snapshot", self._next, 1)

    def take(self) -> int:
        """Return the slot to overwrite: the older slot, unless only the newer slot is without readers."""
        with self._lock:
            for slot in (self._next, 1 - self._next):
                if self.handle.begin("snapshot", slot, unless_read=True):
                    break
            else:
                slot = self._next
                self.handle.begin("snapshot", slot)
            self._held.pop(slot, None)
            self._next = (slot + 1) % _SLOTS
            self._unnamed = {key: part for key, part in self._unnamed.items() if part[0] != slot}
            return slot

    def take_other(self, kept: int) -> int:
        """Return the other slot than ``kept``, to overwrite now and again with the next snapshot."""
        with self._lock:
            self._next = 1 - kept
            self.handle.begin("snapshot", self._next)
            self._held.pop(self._next, None)
            return self._next

    def give_back(self, slot: int) -> None:
        """Use ``slot`` for the next snapshot, unless it is served, and keep the other slot."""
        with self._lock:
            if slot not in self._held:
                self._next = slot

    def held(self, state: SnapshotRef) -> int:
        """Return the slot from which the server serves this state, or -1; the server may have ended since."""
        with self._lock:
            return next((slot for slot, ref in self._held.items() if ref == state), -1)

    def look(self, slot: int, nbytes: int) -> memoryview:
        """Return the bytes of a slot, and use the other slot for the next snapshot. Raises FabricError."""
        with self._lock:
            self._next = (slot + 1) % _SLOTS
        return self.handle.allocate("snapshot", slot, nbytes)

    def publish(self, slot: int, manifest: Mapping[str, Any]) -> None:
        """Make the server serve the snapshot in ``slot``. Raises FabricError."""
        self.handle.publish_snapshot(slot, manifest)
        self._held[slot] = SnapshotRef(manifest["generation"], manifest["step"], state_digest(manifest))

    def keep_unnamed(self, generation: int, step: int, slot: int, manifest: dict[str, Any]) -> None:
        """Keep this rank's part until ``publish_part``, or until its slot is overwritten."""
        with self._lock:
            self._unnamed[generation, step] = (slot, manifest)

    def publish_part(self, generation: int, step: int, rank: int, digests: Sequence[str]) -> bool:
        """Serve this rank's part under the digests of all ranks. Raises FabricError.

        If the part was overwritten or ``digests`` is empty, drop the part and return False.
        """
        with self._lock:
            slot, manifest = self._unnamed.pop((generation, step), (-1, {}))
            if slot < 0 or not digests:
                return False
            self.publish(slot, of_rank(manifest, rank, digests))
            return True


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
        self.digests = Digests(self._watch, copier, self._settle)
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
        if self._taking is not None:
            self._taking.copied.wait()
            self._settle(self._taking)
            self._taking.demand_unchanged()
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
            taking.digest, taking.torn = digests.name, taking.guard.written()
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
        digest = copy.digests.name
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
        self.digests.exposed = True
        if self._taking is not None:
            self._taking.expose()

    def settle(self) -> None:
        """Check the copy, and let the server serve it. Raises StateError as ``wait_copied`` does.

        The calling thread is the trainer's, while no user code runs and before it waits for the others. The
        others may need this very state. So a copy on the host is awaited here, as ``wait_copied`` awaits it.
        """
        if self._taking is not None and not self._on_device:
            self._await_copy(self._taking)
            self._settle(self._taking)

    def offer(self) -> None:
        """Let the server serve a copy that is over, if user code has left the state as it was copied.

        For the trainer's thread, between two micro-batches. ``settle`` decides about any other copy. It views
        the state of no object: FSDP would gather again on the ranks that do.
        """
        taking, began = self._taking, time.monotonic()
        if taking is None or (copy := taking.take_copy()) is None:
            return
        view, watch = copy.view, self._watch
        changed = taking.guard.written() or taking.guard.changed(lambda: view)
        if changed or self._differs(taking) or watch.torn(copy.memory, view, view):
            taking.copy = copy
        else:
            cost_s = taking.copy_s + time.monotonic() - began
            self._policy.taken(taking.state.step, taking.started, cost_s)
            taking.publish(copy)

    def _await_copy(self, taking: PendingSnapshot) -> None:
        if not taking.copied.is_set() and taking.wait_begun():
            self._copier.fence()
            if not self._on_device:
                taking.copied.wait()

    def _settle(self, taking: PendingSnapshot) -> None:
        if taking.settled:
            return
        taking.settled, began = True, time.monotonic()
        taking.demand_unchanged()
        copy, watch = taking.take_copy(), self._watch
        try:
            # A copy that was complete before user code went on has the digest of the state at its boundary.
            name = watch.check(taking.guard, "" if copy is not None else taking.digest)
            if copy is not None:
                if self._differs(taking):
                    if watch.digest(copy.view) != taking.state.digest:
                        raise StateError(UNNAMED)
                    name = name or "a tensor"
                name = name or watch.torn(copy.memory, copy.view, self._describer.capture(copy.view.step))
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
            self._await_copy(taking)
            is_over = taking.ended.is_set()
            self._settle(taking)
            taking.demand_unchanged()
            if is_over:
                self._taking = None
        self.digests.finish()

    def digest(self, view: StateView) -> str:
        """Return the digest of ``view``, a state on a device, at once."""
        reading = self._copier.digest(view)
        reading.help()
        return reading.digest()

    def begin_digest(self, step: int, copied: bool) -> None:
        """Begin to digest the state at ``step``.

        The state must not change until ``wait_copied`` or ``take_digest`` returns. ``copied``: its snapshot
        was begun just now. On the host its copy computes the digest; a device does so long before it.
        """
        self.digests.begin(step, self._taking if copied and not self._on_device else None)

    def serve(self, slot: int, manifest: Mapping[str, Any], cost_s: float) -> None:
        """Make the server serve the fetched state in ``slot``, which was loaded.

        For the policy it is a snapshot that took ``cost_s``, so that the replica's first step copies nothing.
        """
        with contextlib.suppress(FabricError):  # the server refuses where it serves that slot already
            self.slots.publish(slot, manifest)
        self._policy.taken(manifest["step"], time.monotonic(), cost_s)

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
