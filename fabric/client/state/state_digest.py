"""Digests a state while forward and backward run.

The copy of a snapshot begun at the same boundary computes it; otherwise the state is read for it.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from fabric.ckpt_server.state.block_copy import BlockPass
from fabric.ckpt_server.state.snapshot import Copier, SnapshotDigests
from fabric.ckpt_server.state.training_state import StateView
from fabric.client.state.mutation_guard import MutationGuard
from fabric.client.state.write_watch import WriteWatch
from fabric.errors import StateError
from fabric.model import SnapshotRef

# How long the trainer waits for a snapshot's slot, which a running server gives within milliseconds.
SLOT_S = 0.5


@dataclass(frozen=True, slots=True)
class CopiedState:
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
    """Computes one digest at a time, for the trainer's thread. ``settle`` checks a snapshot's copy."""

    def __init__(self, watch: WriteWatch, copier: Copier, settle: Callable[[PendingSnapshot], None]) -> None:
        self._watch = watch
        self._copier = copier
        self._settle = settle
        self._reading: tuple[BlockPass, MutationGuard] | None = None
        self._taking: PendingSnapshot | None = None
        self.exposed = False  # whether user code has run since the digest was begun
        self._last = -1, ""  # step and digest of the result computed last
        self._guard: MutationGuard | None = None  # of the newest digest, until its view is taken

    def begin(self, step: int, taking: PendingSnapshot | None) -> None:
        """Begin a digest. The state at ``step`` must not change until ``finish`` or ``take`` returns.

        ``taking``: a snapshot of the state that was begun at this boundary, whose copy computes the digest.
        """
        self._last, self._taking, self.exposed = (step, ""), taking, False
        if taking is None:
            view = self._watch.capture(step)
            reading, self._guard = self._copier.digest(view), self._watch.guard(view)
            self._reading = reading, self._guard
            if self._watch.reads_first:
                reading.help()
                self._last = step, reading.digests().digest
        else:
            self._guard = taking.guard

    def take_view(self, step: int) -> StateView | None:
        """Return the view of the state whose digest was begun at ``step``, once; else None."""
        guard, self._guard = self._guard, None
        return guard.view if guard is not None and guard.view.step == step else None

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
            self._last = step, self._watch.digest(step) if taking.torn else taking.digest
        elif reading is not None:
            if digest:  # it was read before user code went on
                self._watch.check(reading[1], step, digest)
                return
            reading[0].help()
            digest = reading[0].digests().digest
            if name := self._watch.check(reading[1], step):
                self._watch.note(name)
                digest = self._watch.digest(step)
            elif self.exposed:
                digest = self._watch.read_again(step, digest)
            self._last = step, digest
