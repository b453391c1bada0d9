"""Pieces over a link between members on one host: headers and references into shared memory, no payload.

The unix socket carries the header of every piece and references to its memory, from which the receiver reads
the piece. A travelling partial result is a list of references to the members' own elements, in ring order.
Only the last member of the sum reads the elements and adds them, each once. A result stays in the memory of
the member that computed it, and other members pass on references. Order, wake-up, the death of a neighbour
and the notice of an abort are those of a socket. Members share no lock or flag that a killed process could
leave behind. All kinds of links have the same ring and the same order of summation. Before a link of bytes,
and where the list would get too long, a member adds up the list and passes on its own memory.

Two rules keep a reader from changed memory. First, a member returns from an exchange only after all members
that can see its memory have sent ``READ``; the exception is an exchange over links of this kind alone whose
caller has promised a stable result (docs/design/data-plane.md). Second, a member that aborts raises its
*guard*, one word in shared memory, before it returns and its memory may be written again. A reader checks the
owner's guard after it has read, and before it sends on any result of it. This needs stores and loads in
program order, which x86-64 guarantees; the calls in between keep the compiler from reordering. So members on
other processors use links of bytes.
"""

import fcntl
import os
import platform
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fabric.errors import ProtocolError, RoundAborted
from fabric.ftar.chunk_headers import (
    HEADER_BYTES,
    MAX_NOTICE_BYTES,
    SEGMENT,
    ChunkHeader,
    check_expected,
    digest,
    pack,
    take_back,
    unpack,
)
from fabric.ftar.host.exchange_buffers import Operands
from fabric.ftar.host.shm_segments import (
    SEGMENT_REF_BYTES,
    OwnSegments,
    PeerSegments,
    SegmentRef,
    SharedSegment,
    unpack_segment_refs,
)
from fabric.ftar.plane import Ring
from fabric.ftar.ring_exchange import PieceReceiver, PieceSender
from fabric.ftar.ring_schedule import ALIGNMENT, RingPiece

SUPPORTED = platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")

# The longest list of references: with longer lists each member would map the memory of all others.
MAX_REFERENCES = 8
# The number of references, which stands in front of the references.
_COUNT = struct.Struct("<Q")
# One piece announces at most two segments per reference.
_MOST_DESCRIPTORS = 2 * MAX_REFERENCES
# Limit of segments that a link may announce. A defective sender would fill this process with mappings.
_MOST_SEGMENTS = 4096
_GUARD = 0
# The guard's first word is the length of the notice behind it, 0 while the sender's memory is valid.
_CAUSE_FROM = 64


class Outbox:
    """This member's end of the link to the next one: the segments announced to it, and the guard."""

    def __init__(self, sock: socket.socket, segments: OwnSegments) -> None:
        self.sock = sock
        self.segments = segments
        self.announced: set[tuple[int, int]] = set()
        self.guard = segments.allocate(_CAUSE_FROM + HEADER_BYTES + MAX_NOTICE_BYTES)
        self._word = self.guard.memory[:8].view(torch.int64).numpy()

    def raise_guard(self, cause: bytes) -> None:
        """Invalidate all later reads of this member's memory; ``cause`` is the notice with the reason."""
        target = self.guard.memory[_CAUSE_FROM : _CAUSE_FROM + len(cause)]
        target.numpy()[:] = np.frombuffer(cause, dtype=np.uint8)
        self._word[0] = len(cause)

    def close(self) -> None:
        """Release the guard's memory; the receiver keeps it mapped."""
        self.segments.unregister(self.guard.memory)


class Inbox:
    """This member's end of the link to the previous one: its messages, and the segments that it announced.

    The previous member announces its own segments and those of members before it. ``keep``: this member may
    have to pass the segments on. The socket is read as bytes come, even for an exchange that begins here
    later.
    """

    def __init__(self, sock: socket.socket, segments: PeerSegments, ring: Ring, keep: bool) -> None:
        self.sock = sock
        self._segments = segments
        self._ring = ring
        self._keep = keep
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}
        self._to_pass_on: dict[tuple[int, int], int] = {}

    def fill(self) -> bool:
        """Read from the socket; return whether bytes came. Raises OSError, EOFError."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, 64 * 1024, _MOST_DESCRIPTORS)
        except BlockingIOError:
            return False
        self._descriptors += descriptors
        if not data:
            raise EOFError
        self._buffer += data
        return True

    def take(self) -> tuple[ChunkHeader, list[SegmentRef]] | None:
        """Take the next header and its references, None until all have come. Raises ProtocolError."""
        while len(self._buffer) >= HEADER_BYTES + _COUNT.size:
            header, expected = unpack(self._buffer[:HEADER_BYTES])
            (count,) = _COUNT.unpack_from(self._buffer, HEADER_BYTES)
            if not 1 <= count <= MAX_REFERENCES:
                raise ProtocolError(f"a piece in shared memory came with {count} references")
            end = HEADER_BYTES + _COUNT.size + count * SEGMENT_REF_BYTES
            if len(self._buffer) < end:
                return None
            body = bytes(self._buffer[HEADER_BYTES:end])
            if expected != digest(body):
                raise ProtocolError("a reference into shared memory came altered")
            del self._buffer[:end]
            refs = unpack_segment_refs(body[_COUNT.size :])
            if header.kind != SEGMENT:
                return header, refs
            self._map(refs[0])
        return None

    def _map(self, ref: SegmentRef) -> None:
        # The announcement of a segment has the segment's size in place of the offset.
        if not self._descriptors or len(self._mapped) >= _MOST_SEGMENTS:
            raise ProtocolError("shared memory was announced and none came")
        descriptor = self._descriptors.popleft()
        key = (ref.owner, ref.number)
        if ref.owner >= self._ring.world or ref.owner == self._ring.position:
            os.close(descriptor)
            raise ProtocolError(
                f"shared memory of position {ref.owner} was announced, which is not another member's"
            )
        if key in self._mapped:
            os.close(descriptor)
            raise ProtocolError("shared memory was announced twice")
        if self._keep:
            self._to_pass_on[key] = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)
        self._mapped[key] = self._segments.map(descriptor, ref.offset, self._ring.epoch)

    def pass_on(self, owner: int, number: int) -> tuple[int, int]:
        """Return a descriptor of an announced segment for the next member, once, and the segment's size."""
        return self._to_pass_on.pop((owner, number)), self._mapped[owner, number].numel()

    def find(self, ref: SegmentRef, nbytes: int, item_bytes: int) -> torch.Tensor:
        """Return the bytes at ``ref``. Raises ProtocolError for a reference outside of announced memory."""
        memory = self._mapped.get((ref.owner, ref.number))
        end = ref.offset + nbytes
        if memory is None or ref.offset % item_bytes or end > memory.numel():
            raise ProtocolError(
                f"it named {nbytes} bytes at {ref.offset} of shared memory that it has not shown"
            )
        return memory[ref.offset : end]

    def void(self, owner: int) -> tuple[str, str] | None:
        """Return (why, about) if ``owner`` has aborted, so that its memory may have changed meanwhile."""
        guard = self._mapped.get((owner, _GUARD))
        if guard is None or guard.numel() < _CAUSE_FROM:
            raise ProtocolError("it sent a chunk before its guard")
        size = int(guard[:8].view(torch.int64).numpy()[0])
        if not size:
            return None
        message = take_back(bytearray(guard[_CAUSE_FROM : _CAUSE_FROM + size].numpy().tobytes()))
        why, about = message if isinstance(message, tuple) else ("it aborted while its memory was read", "")
        return why, about if about in self._ring.names else ""

    def close(self) -> None:
        """Close unused descriptors, and release the mappings."""
        while self._descriptors:
            os.close(self._descriptors.popleft())
        while self._to_pass_on:
            os.close(self._to_pass_on.popitem()[1])
        self._mapped.clear()


class ReferenceSender(PieceSender):
    """Sends references to the next member, in order, each as soon as its piece may be read.

    ``inbox`` is the source of references to others' memory, None behind a link of bytes.
    """

    def __init__(
        self,
        outbox: Outbox,
        inbox: Inbox | None,
        operands: Operands,
        pieces: Sequence[RingPiece],
        header: Callable[[RingPiece], ChunkHeader],
    ) -> None:
        super().__init__(pieces)
        self._operands, self._header = operands, header
        self._outbox = outbox
        self._inbox = inbox
        self._descriptors: list[int] = []
        self._message = b""

    def send(self) -> int:
        rest = self._message[-self._left :]
        if not self._descriptors:
            return self._outbox.sock.send(rest)
        sent = socket.send_fds(self._outbox.sock, [rest], self._descriptors)
        self.close()
        return sent

    def close(self) -> None:
        """Close the descriptors that wait to be passed on."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def frame(self, piece: RingPiece) -> int:
        header = self._header(piece)
        refs = self._operands.borrowed.pop((piece.start, piece.gather), [])
        announced = b""
        for ref in refs:
            for number in (_GUARD, ref.number):
                announced += self._announce(header, ref.owner, number, None)
        if not refs or not piece.gather:
            operands = self._operands
            if refs or not piece.hop:
                memory = operands.own(piece)
            else:
                memory = operands.going(piece)[piece.start : piece.stop]
            location = self._outbox.segments.find(memory)
            assert location is not None, "a piece for a neighbour lies in memory that it cannot see"
            segment, offset = location
            wide = int(memory.dtype != self._operands.source.dtype)
            refs = [*refs, SegmentRef(header.source, wide, segment.number, offset)]
            announced += self._announce(header, header.source, _GUARD, self._outbox.guard)
            announced += self._announce(header, header.source, segment.number, segment)
        self._message = announced + _message(header, refs)
        return len(self._message)

    def _announce(self, header: ChunkHeader, owner: int, number: int, segment: SharedSegment | None) -> bytes:
        if (owner, number) in self._outbox.announced:
            return b""
        self._outbox.announced.add((owner, number))
        if segment is not None:
            descriptor, nbytes = self._outbox.segments.duplicate(segment), segment.nbytes
        else:
            assert self._inbox is not None
            descriptor, nbytes = self._inbox.pass_on(owner, number)
        self._descriptors.append(descriptor)
        about = ChunkHeader(header.spec, SEGMENT, header.source, 0, SEGMENT_REF_BYTES)
        return _message(about, [SegmentRef(owner, 0, number, nbytes)])


class ReferenceReceiver(PieceReceiver):
    """Takes references to pieces from the previous member, and reads the pieces that end here.

    If the next link shares memory too (``outbox``), references are passed on before the piece is read.
    """

    def __init__(
        self,
        inbox: Inbox,
        outbox: Outbox | None,
        operands: Operands,
        pieces: Sequence[RingPiece],
        expect: Callable[[RingPiece], ChunkHeader],
    ) -> None:
        super().__init__(pieces)
        self._inbox = inbox
        self._lends = outbox is not None
        self._operands = operands
        self._expect = expect
        self._arrived: list[_Arrival] = []
        self.passable = 0
        self.all_by_reference = False

    def pump(self) -> tuple[bool, bool]:
        """Take or use one piece. Raises RoundAborted too if the owner of memory that was read has aborted."""
        if self.done:
            return False, False
        moved = counted = False
        if len(self._arrived) < len(self._pieces):
            message = self._inbox.take()
            if message is None and self._inbox.fill():
                moved, message = True, self._inbox.take()
            if message is not None:
                moved, counted = True, self._arrive(*message)
        if not counted and self.completed < len(self._arrived):
            self._use(self._pieces[self.completed], self._arrived[self.completed])
            moved = counted = True
        self.passable = max(self.passable, self.completed)
        while self.passable < len(self._arrived) and self._arrived[self.passable].lent:
            self.passable += 1
        return moved, counted

    def _arrive(self, header: ChunkHeader, refs: list[SegmentRef]) -> bool:
        """Keep the references of the piece that is due; False if they are of an old round."""
        piece = self._pieces[len(self._arrived)]
        expected = self._expect(piece)
        if header.spec.order < expected.spec.order:
            return False
        check_expected(header, expected)
        if len(refs) > (1 if piece.gather else piece.hop + 1):
            raise ProtocolError(f"a piece of hop {piece.hop} has {len(refs)} references")
        views = [self._view(piece, ref) for ref in refs]
        steps = piece.hop % MAX_REFERENCES + 1 if piece.gather else len(refs)
        lent = self._lends and not piece.last and steps < MAX_REFERENCES
        if lent:
            self._operands.borrowed[piece.start, piece.gather] = refs
        if piece.last and not piece.gather:
            no_segment_is_empty = header.spec.length >= ALIGNMENT * header.spec.world
            self.all_by_reference = no_segment_is_empty and self._lends and len(refs) == header.spec.world - 1
        self._arrived.append(_Arrival(views, {ref.owner for ref in refs}, lent))
        return True

    def _use(self, piece: RingPiece, arrival: "_Arrival") -> None:
        if piece.gather or not arrival.lent:
            if piece.gather:
                self._operands.keep(piece, arrival.views[0], arrival.lent)
            else:
                self._operands.take(piece, arrival.views)
            for owner in arrival.owners:
                cause = self._inbox.void(owner)
                if cause is not None:
                    raise RoundAborted(*cause)
        arrival.views.clear()
        self.everybody = self.everybody or piece.everybody
        self.completed += 1

    def _view(self, piece: RingPiece, ref: SegmentRef) -> torch.Tensor:
        dtype = self._operands.source.dtype
        if ref.wide:
            if not self._operands.is_wide(piece):
                raise ProtocolError("a reference to a partial result came for a piece that cannot be one")
            dtype = torch.float32
        nbytes = (piece.stop - piece.start) * dtype.itemsize
        return self._inbox.find(ref, nbytes, dtype.itemsize).view(dtype)


@dataclass(slots=True)
class _Arrival:
    """A received piece: its memory, the memory's owners, whether the references are passed on unchanged."""

    views: list[torch.Tensor]
    owners: set[int]
    lent: bool


def _message(header: ChunkHeader, refs: list[SegmentRef]) -> bytes:
    body = _COUNT.pack(len(refs)) + b"".join(ref.pack() for ref in refs)
    return pack(header, digest(body)) + body
