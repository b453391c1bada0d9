"""One exchange over a ring: pieces go to the next member while pieces come from the previous one.

A thread sends while it receives. Both sockets are non-blocking, and every piece goes out as soon as the piece
that it depends on has arrived. So a ring cannot deadlock at any size, and the hops of a long buffer overlap.
The thread polls only when neither direction can move. It sleeps until a socket is ready, a notice comes back,
the epoch is aborted, or the deadline has passed.

Two bounds hold. User code may delay a member, so ``entry_s`` holds until a chunk arrives that all members
have sent on. Such a chunk proves that all members have entered the exchange. Then the exchange times out when
no byte of progress arrives for ``exchange_s``.
"""

import select
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from fabric.errors import Mismatch, ProtocolError, RoundAborted
from fabric.ftar.epochs import Bounds, EpochLinks, Waiting, lost
from fabric.ftar.ring_schedule import RingPiece


class PieceSender:
    """Sends pieces to the next member in order, each as soon as it is free to go."""

    def __init__(self, pieces: Sequence[RingPiece]) -> None:
        self._pieces = pieces
        self._index = 0  # pieces that are sent or under way
        self._left = 0  # bytes of the piece under way that are still to go

    @property
    def done(self) -> bool:
        return not self._left and self._index == len(self._pieces)

    @property
    def blocked(self) -> bool:
        """Whether only the socket holds the bytes up (after ``pump`` moved nothing)."""
        return self._left > 0

    def pump(self, free: int) -> bool:
        """Send once, from the pieces before number ``free``; return whether a byte was sent. Raises
        OSError."""
        if not self._left:
            if self._index >= min(free, len(self._pieces)):
                return False
            self._left = self.frame(self._pieces[self._index])
            self._index += 1
        try:
            self._left -= self.send()
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Release what waits to be sent."""

    def frame(self, piece: RingPiece) -> int:
        """Make what goes over the socket for this piece ready; return its bytes."""
        raise NotImplementedError

    def send(self) -> int:
        """Send bytes that are under way; return how many went. Raises OSError."""
        raise NotImplementedError


class PieceReceiver:
    """Takes pieces off the link from the previous member, in order."""

    def __init__(self, pieces: Sequence[RingPiece]) -> None:
        self._pieces = pieces
        self.completed = 0  # pieces that are in their place
        self.everybody = False  # whether all members have entered the exchange

    @property
    def done(self) -> bool:
        """Whether all pieces have come."""
        return self.completed == len(self._pieces)

    def pump(self) -> tuple[bool, bool]:
        """Receive once; return whether bytes came, and whether they count as progress of this round.

        Raises OSError or EOFError on a lost link, ProtocolError for bytes that cannot be used, RoundAborted.
        """
        raise NotImplementedError


Links = TypeVar("Links", bound=EpochLinks)


class RingExchange(Generic[Links]):
    """An exchange over ``links``; ``run`` once. ``what`` names it in sentences; ``on_piece``: called after
    each look that has brought a piece."""

    def __init__(
        self,
        links: Links,
        sender: PieceSender,
        receiver: PieceReceiver,
        what: str,
        on_piece: Callable[[], None],
    ) -> None:
        self._links, self._out, self._in = links, sender, receiver
        self._what, self._on_piece = what, on_piece
        self._poll = select.poll()
        self._poll.register(links.wake, select.POLLIN)

    def run(self, bounds: Bounds, waiting: Waiting) -> None:
        """Exchange all pieces. Raises RoundAborted; ``waiting`` is kept up to date throughout."""
        last_s = time.monotonic()
        while not (self._out.done and self._in.done):
            self._links.check()
            before = self._in.completed
            moved, counted = self.move()
            if counted:
                last_s = time.monotonic()
            if self._in.completed > before:
                self._on_piece()
            if not moved or not counted:
                bound_s = bounds.exchange_s if self._in.everybody else bounds.entry_s
                self._wait(max(last_s, self.moved_s()) + bound_s, waiting, may_sleep=not moved)

    def move(self) -> tuple[bool, bool]:
        """Move all bytes that can move now; return whether any moved, and whether they count as progress."""
        raise NotImplementedError

    def moved_s(self) -> float:
        """Return the monotonic time at which another thread of this exchange moved bytes last."""
        return 0.0

    def awaited(self) -> str:
        """Name the peer for which this member waits; empty while it waits for its own device."""
        return self._links.ring.next if self._in.done else self._links.ring.previous

    def hears_previous(self) -> bool:
        """Whether bytes of the previous member are wanted: a closed link would wake the poll in a loop."""
        return not self._in.done

    def _send(self, free: int) -> bool:
        try:
            return self._out.pump(free)
        except OSError as error:
            # The next member may have sent the reason of an abort before its link ended.
            self._links.hear_back()
            raise lost(self._links.ring.next, error) from error

    def _receive(self) -> tuple[bool, bool]:
        peer = self._links.ring.previous
        try:
            return self._in.pump()
        except ProtocolError as error:
            mismatch = isinstance(error, Mismatch)
            raise RoundAborted(f"{self._what} from {peer}: {error}", peer, mismatch=mismatch) from error
        except EOFError as error:
            raise lost(peer, None) from error
        except OSError as error:
            raise lost(peer, error) from error

    def _wait(self, deadline_s: float, waiting: Waiting, may_sleep: bool) -> None:
        peer = self.awaited()
        started_s = time.monotonic()
        if started_s >= deadline_s:
            who = f"{peer} stalled" if peer else "the copies of this member's own device did not end"
            epoch = self._links.ring.epoch
            raise RoundAborted(
                f"{who} in the exchange of {self._what} of epoch {epoch}: nothing moved within the bound",
                peer,
            )
        if not may_sleep:
            return
        waiting.peer = waiting.last = peer
        try:
            ready = self.sleep(deadline_s - started_s)
        finally:
            waiting.peer = ""
            if peer:
                waited_s = time.monotonic() - started_s
                waiting.seconds[peer] = waiting.seconds.get(peer, 0.0) + waited_s
        assert self._links.next is not None
        if ready.get(self._links.next.fileno(), 0) & ~select.POLLOUT:
            self._links.hear_back()

    def sleep(self, timeout_s: float) -> dict[int, int]:
        """Sleep until something may move; return what the poll has found."""
        links, poll = self._links, self._poll
        assert links.next is not None and links.previous is not None
        poll.register(links.next, select.POLLIN | (select.POLLOUT if self._out.blocked else 0))
        hears_previous = self.hears_previous()
        if hears_previous:
            poll.register(links.previous, select.POLLIN)
        ready = dict(poll.poll(timeout_s * 1000 + 1))
        if hears_previous:
            poll.unregister(links.previous)
        return ready
