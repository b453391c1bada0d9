"""The two sockets of one epoch's ring, and the ways in which they end.

Chunks travel from each member to the next. The other direction of the same sockets is free, and carries one
thing: the notice of an abort. Whoever aborts tells the previous member why and about whom, which tells its
own previous one, and so the true cause travels around the ring in milliseconds. A death reaches everybody:
the member before the dead one sees the loss and tells the rest. A member that has not entered the exchange
passes a notice on when it enters; until then those behind it hear of the abort from the control plane alone.
Sockets are not shut down on an abort, for the end of a stream cannot say whose fault it was: they are closed
when the epoch is retired.

An eventfd wakes the thread that polls. Descriptors are closed only when that thread is out of the exchange,
since a closed number could be somebody else's by the next poll.
"""

import os
import socket
import threading
from contextlib import suppress

from fabric.errors import ProtocolError, RoundAborted
from fabric.ftar.chunks import HEADER_BYTES, MAX_NOTICE_BYTES, notice, read_notice
from fabric.ftar.plane import Ring

_NOTICE_LIMIT_BYTES = HEADER_BYTES + MAX_NOTICE_BYTES


class RingLinks:
    """Links of one epoch: ``next`` and ``previous`` are non-blocking, None in a ring of one."""

    def __init__(
        self, ring: Ring, next_socket: socket.socket | None, previous_socket: socket.socket | None
    ) -> None:
        self.ring = ring
        self.next = next_socket
        self.previous = previous_socket
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.cause: tuple[str, str] | None = None
        self._came_back = bytearray()
        self._lock = threading.Lock()
        self._in_use = False
        self._closing = False
        for sock in (next_socket, previous_socket):
            if sock is not None:
                sock.setblocking(False)

    def enter(self) -> None:
        """Begin an exchange: the descriptors stay open until ``leave``. Raises RoundAborted."""
        with self._lock:
            self.check()
            self._in_use = True

    def leave(self) -> None:
        """The exchange is over; close now if that was asked for meanwhile."""
        with self._lock:
            self._in_use = False
            if self._closing:
                self._close()

    def check(self) -> None:
        """Raise RoundAborted if this epoch was aborted."""
        if self.cause is not None:
            why, about = self.cause
            raise RoundAborted(why, about)

    def abort(self, why: str, about: str = "") -> None:
        """Wake the exchange and tell the previous member; the first cause is the one that counts."""
        with self._lock:
            if self.cause is not None:
                return
            self.cause = (why, about)
            os.eventfd_write(self.wake, 1)
            if self.previous is not None:
                # Nothing else is ever written in this direction, so its buffer has room.
                with suppress(OSError):
                    self.previous.send(notice(self.ring.epoch, self.ring.position, why, about))

    def close(self, why: str) -> None:
        """Abort, and close the sockets as soon as no exchange uses them; idempotent."""
        self.abort(why)
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if not self._in_use:
                self._close()

    def hear_back(self) -> None:
        """Read what came back from the next member: raises RoundAborted at a notice or its end.

        Returns where nothing has come, or not all of it.
        """
        assert self.next is not None
        peer = self.ring.next
        try:
            data = self.next.recv(_NOTICE_LIMIT_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise lost(peer, error) from error
        if not data:
            raise lost(peer, None)
        self._came_back += data
        try:
            cause = read_notice(self._came_back)
        except ProtocolError as error:
            raise RoundAborted(f"{peer} answered on the ring with garbage: {error}", peer) from error
        if cause is not None:
            why, about = cause
            raise RoundAborted(why, about if about in self.ring.names else "")

    def _close(self) -> None:
        for sock in (self.next, self.previous):
            if sock is not None:
                sock.close()
        if self.wake >= 0:
            os.close(self.wake)
            self.wake = -1


def lost(peer: str, error: OSError | None) -> RoundAborted:
    """The abort that says that the link to ``peer`` ended."""
    detail = "its end of the ring closed"
    if error is not None:
        detail = os.strerror(error.errno).lower() if error.errno else str(error)
    return RoundAborted(f"the ring link to {peer} was lost: {detail}", peer)
