"""The two sockets of one epoch's ring, and the ways in which they end.

A link that is a unix socket connects members on one host, which read pieces in each other's memory
(``shared_stream``); any other carries their bytes (``byte_stream``). A ring may have links of both kinds.

Chunks travel from each member to the next. The other direction of the same sockets is free, and carries the
notice of an abort, and on links of shared memory the word that all was read. Whoever aborts tells the
previous member why and about whom, which tells its own previous one, and so the true cause travels around
the ring in milliseconds. A death reaches everybody: the member before the dead one sees the loss and tells
the rest. A member that has not entered the exchange passes a notice on when it enters; until then those
behind it hear of the abort from the control plane alone.
Sockets are not shut down on an abort, for the end of a stream cannot say whose fault it was: they are closed
when the epoch is retired.

An eventfd wakes the thread that polls. Descriptors are closed only when that thread is out of the exchange,
since a closed number could be somebody else's by the next poll.
"""

import os
import socket
from contextlib import suppress

from fabric.errors import ProtocolError, RoundAborted
from fabric.ftar.epochs import EpochLinks
from fabric.ftar.host.chunk_headers import (
    HEADER_BYTES,
    MAX_NOTICE_BYTES,
    ChunkHeader,
    ExchangeSpec,
    all_read,
    notice,
    pack,
    take_back,
)
from fabric.ftar.host.shm_segments import OwnSegments, PeerSegments
from fabric.ftar.host.shm_transport import Inbox, Outbox
from fabric.ftar.plane import Ring

_NOTICE_LIMIT_BYTES = HEADER_BYTES + MAX_NOTICE_BYTES


class RingLinks(EpochLinks):
    """Links of one epoch: ``next`` and ``previous`` are non-blocking, None in a ring of one.

    ``outbox`` and ``inbox`` are the ends of those that are of shared memory.
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
        # By position: the newest word of each member that it has read everything.
        self._readers: dict[int, ChunkHeader] = {}
        self._came_back = bytearray()

    def aborted(self, why: str, about: str) -> None:
        """Raise the guard and tell the previous member, before the exchange can return."""
        said = notice(self.ring.epoch, self.ring.position, why, about)
        if self.outbox is not None:
            self.outbox.raise_guard(said)
        if self.previous is not None:
            # Next to nothing else is written in this direction, so its buffer has room.
            with suppress(OSError):
                self.previous.send(said)

    def release(self) -> None:
        """Close the descriptors, and let go of what was mapped and shown."""
        super().release()
        for end in (self.inbox, self.outbox):
            if end is not None:
                end.close()

    def tell_read(self, spec: ExchangeSpec) -> None:
        """Tell those before me that I read nothing of their memory in this exchange any more."""
        self._tell_back(all_read(spec, self.ring.position, end=self.outbox is None))

    def all_have_read(self, spec: ExchangeSpec) -> bool:
        """Whether everybody who can see memory of mine has said that it has read everything."""
        if self.outbox is None:
            return True
        for distance in range(1, self.ring.world):
            said = self._readers.get((self.ring.position + distance) % self.ring.world)
            if said is None or said.spec != spec:
                return False
            if said.sequence:
                break
        return True

    def _tell_back(self, said: bytes) -> None:
        if self.inbox is not None:
            # Who has ended meanwhile does not wait for it.
            with suppress(OSError):
                self.inbox.sock.send(said)

    def hear_back(self) -> None:
        """Read what came back from the next member: raises RoundAborted at a notice or its end.

        Returns where nothing has come, or not all of it, or the word that somebody has read everything, which
        is passed on to whom it concerns.
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
            while (said := take_back(self._came_back)) is not None:
                if not isinstance(said, ChunkHeader):
                    why, about = said
                    raise RoundAborted(why, about if about in self.ring.names else "")
                self._readers[said.source] = said
                if said.source != (self.ring.position - 1) % self.ring.world:
                    self._tell_back(pack(said))
        except ProtocolError as error:
            raise RoundAborted(f"{peer} answered on the ring with garbage: {error}", peer) from error


def is_shared(sock: socket.socket) -> bool:
    """Whether the link is one of shared memory."""
    return sock.family == socket.AF_UNIX


def lost(peer: str, error: OSError | None) -> RoundAborted:
    """The abort that says that the link to ``peer`` ended."""
    detail = "its end of the ring closed"
    if error is not None:
        detail = os.strerror(error.errno).lower() if error.errno else str(error)
    return RoundAborted(f"the ring link to {peer} was lost: {detail}", peer)
