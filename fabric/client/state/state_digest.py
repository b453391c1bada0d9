"""The digest of a state, taken while forward and backward run: by a reading of its own, or by the copy of a
snapshot that was begun at the same boundary."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from fabric.ckpt_server.state.block_copy import BlockPass
from fabric.ckpt_server.state.snapshot import Copier
from fabric.ckpt_server.state.training_state import StateDescriber
from fabric.client.state.mutation_guard import MutationGuard
from fabric.errors import StateError
from fabric.model import SnapshotRef

# How long the trainer waits for the place that a snapshot is copied to, which a server that runs gives within
# milliseconds. A server that is stopped costs no more than this, and only once.
SLOT_S = 0.5


@dataclass(slots=True)
class PendingSnapshot:
    """One snapshot under way: of which state (without a digest where that is not known yet), and when it was
    begun, in monotonic seconds and as Unix time. ``begun``: its copy goes on, or cannot be made; ``copied``:
    it is over; ``ended``: so is all that belongs to it. ``refused``: why it is of no one state; ``digest``:
    the copy's, when it is there. ``given_up``: the trainer goes on, so the copy must not begin any more."""

    state: SnapshotRef
    started: float
    created: float
    unchanged: MutationGuard
    refused: str = ""
    digest: str = ""
    begun: threading.Event = field(default_factory=threading.Event)
    copied: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    given_up: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, start: Callable[[], None]) -> None:
        """Run ``start``, which begins the copy. Raises StateError where the trainer has gone on."""
        with self._lock:
            if self.given_up:
                raise StateError(
                    f"the checkpoint server had no place for it within {SLOT_S:g} s, and training has gone on"
                )
            start()
            self.begun.set()

    def wait_begun(self) -> bool:
        """Whether the copy has begun, or cannot be made. Where neither is so within SLOT_S it is given up."""
        if self.begun.wait(SLOT_S):
            return not self.given_up
        self.settle()
        with self._lock:
            if not self.begun.is_set():
                self.given_up = True
                self.begun.set()
                self.copied.set()
        return not self.given_up

    def settle(self) -> None:
        """At the copy's end, or when the trainer goes on to what may write, whichever is first."""
        if why := self.unchanged.check():
            self.refused = why

    def demand_unchanged(self) -> None:
        """Raises StateError where the user's code has changed the state."""
        if self.refused:
            raise StateError(self.refused)


class Digests:
    """One at a time, for the trainer's thread."""

    def __init__(self, describer: StateDescriber, copier: Copier) -> None:
        self._describer = describer
        self._copier = copier
        self._reading: tuple[BlockPass, MutationGuard] | None = None
        self._taking: PendingSnapshot | None = None
        self._last = -1, ""  # of which step, and what it came to

    def begin(self, step: int, taking: PendingSnapshot | None) -> None:
        """The state at ``step`` must not change until ``finish`` or ``take`` returns. ``taking``: a snapshot
        of it was begun just now, and brings the digest along."""
        self._last, self._taking = (step, ""), taking
        if taking is None:
            view = self._describer.capture(step)
            self._reading = self._copier.digest(view), MutationGuard(view)

    def take(self, step: int) -> str:
        """What ``begin`` began, with the caller's help; empty where it did not, or the copy was not made.
        Raises StateError where the user's code has changed the state meanwhile."""
        self.finish()
        return self._last[1] if self._last[0] == step else ""

    def finish(self) -> None:
        """Have what was begun at its end. Raises as ``take`` does."""
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
            if why := reading[1].check():
                raise StateError(why)
