"""Digests a state while forward and backward run.

The copy of a snapshot begun at the same boundary computes it; otherwise the state is read for it.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from fabric.ckpt_server.state.block_copy import BlockPass
from fabric.ckpt_server.state.snapshot import Copier
from fabric.ckpt_server.state.training_state import StateDescriber
from fabric.client.state.mutation_guard import MutationGuard
from fabric.errors import StateError
from fabric.model import SnapshotRef

# How long the trainer waits for a snapshot's slot, which a running server gives within milliseconds.
SLOT_S = 0.5


@dataclass(slots=True)
class PendingSnapshot:
    """One snapshot under way."""

    state: SnapshotRef  # its digest is empty while unknown
    started: float  # the time when the copy began, monotonic seconds
    created: float  # the time when the state was current, Unix time
    guard: MutationGuard
    refused: str = ""  # which tensor was written while it was copied
    digest: str = ""  # digest of the copy, once computed
    begun: threading.Event = field(default_factory=threading.Event)  # the copy runs, or cannot be made
    copied: threading.Event = field(default_factory=threading.Event)  # the copy is over
    ended: threading.Event = field(default_factory=threading.Event)  # the server serves it, or failed
    given_up: bool = False  # the trainer did not wait longer, so the copy must not begin
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
        self.check_unchanged()
        with self._lock:
            if not self.begun.is_set():
                self.given_up = True
                self.begun.set()
                self.copied.set()
        return not self.given_up

    def check_unchanged(self) -> None:
        """Check for writes to the state, at the copy's end or just before the trainer changes the state."""
        if reason := self.guard.check():
            self.refused = reason

    def demand_unchanged(self) -> None:
        """Raise StateError where the user's code has changed the state."""
        if self.refused:
            raise StateError(self.refused)


class Digests:
    """Computes one digest at a time, for the trainer's thread."""

    def __init__(self, describer: StateDescriber, copier: Copier) -> None:
        self._describer = describer
        self._copier = copier
        self._reading: tuple[BlockPass, MutationGuard] | None = None
        self._taking: PendingSnapshot | None = None
        self._last = -1, ""  # step and digest of the result computed last

    def begin(self, step: int, taking: PendingSnapshot | None) -> None:
        """Begin a digest. The state at ``step`` must not change until ``finish`` or ``take`` returns.

        ``taking``: a snapshot of the state that was begun at this boundary, whose copy computes the digest.
        """
        self._last, self._taking = (step, ""), taking
        if taking is None:
            view = self._describer.capture(step)
            self._reading = self._copier.digest(view), MutationGuard(view)

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
        if taking is not None:
            if not taking.copied.is_set() and taking.wait_begun():
                self._copier.fence()
                taking.copied.wait()
            taking.demand_unchanged()
            self._last = self._last[0], taking.digest
        elif reading is not None:
            reading[0].help()
            self._last = self._last[0], reading[0].digests().digest
            if reason := reading[1].check():
                raise StateError(reason)
