"""The two sockets of one epoch's ring, and the ways in which they end.

A unix socket links members on one host, which read pieces in each other's memory (``shm_transport``). A TCP
socket carries the bytes of the pieces (``tcp_transport``). A ring may have unix and TCP sockets.

Chunks travel from each member to the next. The other direction of the same sockets carries the notice of an
abort and, on links of shared memory, the READ message. A member that aborts sends a notice, with the reason
and the peer at fault, to the previous member. That member passes the notice on, so all members know the cause
within milliseconds. After a death, the member before the dead member sees the loss and sends the notice. A
member that has not entered the exchange passes the notice on when it enters. Until that moment the members
before it learn of the abort from the control plane.

An abort does not shut sockets down, because the end of a stream cannot name its cause. They are closed when
the epoch is retired.

An eventfd wakes the thread that polls. Descriptors are closed only when that thread is out of the exchange,
because the kernel may give a closed descriptor's number to another file.
"""

import socket
from contextlib import suppress

from fabric.ftar.chunk_headers import (
    READ,
    ChunkHeader,
    ExchangeSpec,
    all_read,
    notice,
    pack,
)
from fabric.ftar.epochs import EpochLinks, is_shared
from fabric.ftar.host.shm_segments import OwnSegments, PeerSegments
from fabric.ftar.host.shm_transport import Inbox, Outbox
from fabric.ftar.plane import Ring


class RingLinks(EpochLinks):
    """Links of one epoch: ``next`` and ``previous`` are non-blocking, None in a ring of one.

    ``outbox`` and ``inbox`` are the shared-memory ends of the next and the previous link, None on TCP.
    """

    def __init__(
        self,
        ring: Ring,
        next_socket: socket.socket | None,
        previous_socket: socket.socket | None,
        own: OwnSegments,
        others: PeerSegments,
    ) -> None:
        super().__init__(ring, next_socket, previous_socket)
        self.outbox = Outbox(next_socket, own) if next_socket and is_shared(next_socket) else None
        self.inbox = (
            Inbox(previous_socket, others, ring, keep=self.outbox is not None)
            if previous_socket and is_shared(previous_socket)
            else None
        )
        # The newest READ message of each member, by the member's position.
        self._readers: dict[int, ChunkHeader] = {}

    def aborted(self, why: str, about: str) -> None:
        """Raise the guard, and tell the previous member, before the exchange returns."""
        if self.outbox is not None:
            self.outbox.raise_guard(notice(self.ring.epoch, self.ring.position, why, about))
        super().aborted(why, about)

    def release(self) -> None:
        """Close the descriptors, and release mapped and shared memory."""
        super().release()
        for end in (self.inbox, self.outbox):
            if end is not None:
                end.close()

    def tell_read(self, spec: ExchangeSpec) -> None:
        """Tell the members before this one that it has read all of their memory in this exchange."""
        self._send_back(all_read(spec, self.ring.position, end=self.outbox is None))

    def all_have_read(self, spec: ExchangeSpec) -> bool:
        """Whether all members that can read this member's memory have sent READ."""
        if self.outbox is None:
            return True
        for distance in range(1, self.ring.world):
            message = self._readers.get((self.ring.position + distance) % self.ring.world)
            if message is None or message.spec != spec:
                return False
            if message.sequence:
                break
        return True

    def _send_back(self, message: bytes) -> None:
        if self.inbox is not None:
            # A previous member whose link has ended does not need this message.
            with suppress(OSError):
                self.inbox.sock.send(message)

    def hear_back(self) -> None:
        """Read messages from the next member. Raises RoundAborted at a notice, or when the link has ended.

        Returns when no complete message is left. Passes a READ message on to the members that it concerns.
        """
        with self.reading_back() as back:
            while (message := self.take_back(back, READ)) is not None:
                self._readers[message.source] = message
                if message.source != (self.ring.position - 1) % self.ring.world:
                    self._send_back(pack(message))
