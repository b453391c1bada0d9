"""Pieces over a link between members on one host: headers and places in shared memory, no payload.

The unix socket carries for every piece its header and the places in memory where it lies; who needs it reads
it there. A partial result on its way is the list of the members' own elements, in the order of the ring, and
only the member that ends it adds them all up, each read once; a result on its way is its author's, whoever
passes it on. So order, wake-up, the death of a neighbour and the notice of an abort are those of a socket, no
lock or flag is shared that a killed process could leave behind, and an exchange is the same ring, with the
same order of summation, whatever carries its hops. Before a link of bytes, and where the list would get too
long, a member adds up what it has and passes on its own memory.

Two rules keep what is read whole. A member returns from an exchange only after everybody who can see its
memory has said that it read everything (``READ``), unless all links are of this kind and the caller has said
that the result lasts (docs/design/data-plane.md). And a member that aborts raises its *guard*, one word in
shared memory, before it returns and its memory may be written again; a reader looks at the guard of whom it
has read and before it sends anything on that came of it. This relies on stores becoming visible in their
order and loads being done in theirs, which x86-64 guarantees and nothing in Python does elsewhere; the calls
in between keep the compiler from reordering. So members on other processors use links of bytes.
"""

import fcntl
import os
import platform
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fabric.errors import ProtocolError, RoundAborted
from fabric.ftar.host.chunk_headers import (
    HEADER_BYTES,
    MAX_NOTICE_BYTES,
    SEGMENT,
    ChunkHeader,
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
from fabric.ftar.host.tcp_transport import check_expected
from fabric.ftar.plane import Ring
from fabric.ftar.ring_schedule import ALIGNMENT, RingPiece

SUPPORTED = platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")

# A longer list would have everybody on a host of very many members map everybody's memory.
MAX_REFERENCES = 8
# The number of places, in front of them.
_COUNT = struct.Struct("<Q")
# One piece announces two segments per place at most.
_MOST_DESCRIPTORS = 2 * MAX_REFERENCES
# Segments that one link may name; more is a defect of the sender, which would fill this process with maps.
_MOST_SEGMENTS = 4096
_GUARD = 0
# The guard's first word is the length of the notice behind it, 0 while the sender stands by its memory.
_CAUSE_FROM = 64


class Outbox:
    """My end towards the next member, for as long as the link lives: what it was shown, and the guard."""

    def __init__(self, sock: socket.socket, segments: OwnSegments) -> None:
        self.sock = sock
        self.segments = segments
        self.announced: set[tuple[int, int]] = set()
        self._guard = segments.allocate(_CAUSE_FROM + HEADER_BYTES + MAX_NOTICE_BYTES)
        self._word = self._guard.memory[:8].view(torch.int64).numpy()

    @property
    def guard(self) -> SharedSegment:
        return self._guard

    def raise_guard(self, cause: bytes) -> None:
        """From now on nothing that is read in my memory counts; ``cause`` is the notice that says why."""
        ref = self._guard.memory[_CAUSE_FROM : _CAUSE_FROM + len(cause)]
        ref.numpy()[:] = np.frombuffer(cause, dtype=np.uint8)
        self._word[0] = len(cause)

    def close(self) -> None:
        """Let the guard's memory go; the receiver keeps it mapped."""
        self.segments.unregister(self._guard.memory)


class Inbox:
    """My end towards the previous member, for as long as the link lives: what it said, and the memory of its
    own and of those before it that it has shown. ``keep`` says that I may have to pass that on.

    Everything on the socket is read as it comes, also of an exchange that begins here later.
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
        """Read what has come; whether anything had. Raises OSError, EOFError."""
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
        """The next header and its places, None until there are all of them. Raises ProtocolError."""
        while len(self._buffer) >= HEADER_BYTES + _COUNT.size:
            header, expected = unpack(self._buffer[:HEADER_BYTES])
            (count,) = _COUNT.unpack_from(self._buffer, HEADER_BYTES)
            if not 1 <= count <= MAX_REFERENCES:
                raise ProtocolError(f"a piece in shared memory came with {count} places")
            end = HEADER_BYTES + _COUNT.size + count * SEGMENT_REF_BYTES
            if len(self._buffer) < end:
                return None
            body = bytes(self._buffer[HEADER_BYTES:end])
            if expected != digest(body):
                raise ProtocolError("a place in shared memory came altered")
            del self._buffer[:end]
            refs = unpack_segment_refs(body[_COUNT.size :])
            if header.kind != SEGMENT:
                return header, refs
            self._map(refs[0])
        return None

    def _map(self, ref: SegmentRef) -> None:
        # The size stands where the offset does otherwise.
        if not self._descriptors or len(self._mapped) >= _MOST_SEGMENTS:
            raise ProtocolError("shared memory was announced and none came")
        descriptor = self._descriptors.popleft()
        key = (ref.owner, ref.number)
        if ref.owner >= self._ring.world or ref.owner == self._ring.position:
            os.close(descriptor)
            raise ProtocolError(f"shared memory of position {ref.owner} was announced, which is no other's")
        if key in self._mapped:
            os.close(descriptor)
            raise ProtocolError("shared memory was announced twice")
        if self._keep:
            self._to_pass_on[key] = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)
        self._mapped[key] = self._segments.map(descriptor, ref.offset, self._ring.epoch)

    def pass_on(self, owner: int, number: int) -> tuple[int, int]:
        """A descriptor of a segment that was shown here, for the next member, and its size; once for each."""
        return self._to_pass_on.pop((owner, number)), self._mapped[owner, number].numel()

    def find(self, ref: SegmentRef, nbytes: int, item_bytes: int) -> torch.Tensor:
        """The bytes at ``ref``. Raises ProtocolError if there are none."""
        memory = self._mapped.get((ref.owner, ref.number))
        end = ref.offset + nbytes
        if memory is None or ref.offset % item_bytes or end > memory.numel():
            raise ProtocolError(
                f"it named {nbytes} bytes at {ref.offset} of shared memory that it has not shown"
            )
        return memory[ref.offset : end]

    def void(self, owner: int) -> tuple[str, str] | None:
        """(why, about) if ``owner`` has aborted, so that its memory may have changed under our eyes."""
        guard = self._mapped.get((owner, _GUARD))
        if guard is None or guard.numel() < _CAUSE_FROM:
            raise ProtocolError("it sent a chunk before its guard")
        size = int(guard[:8].view(torch.int64).numpy()[0])
        if not size:
            return None
        said = take_back(bytearray(guard[_CAUSE_FROM : _CAUSE_FROM + size].numpy().tobytes()))
        why, about = said if isinstance(said, tuple) else ("it aborted while its memory was read", "")
        return why, about if about in self._ring.names else ""

    def close(self) -> None:
        """Close descriptors that were never used, and let the mappings go."""
        while self._descriptors:
            os.close(self._descriptors.popleft())
        while self._to_pass_on:
            os.close(self._to_pass_on.popitem()[1])
        self._mapped.clear()


class ReferenceSender:
    """Tells the next member where pieces lie, in order, as soon as they are free to be read.

    ``inbox`` is where places of others come from, None behind a link of bytes.
    """

    def __init__(
        self,
        outbox: Outbox,
        inbox: Inbox | None,
        operands: Operands,
        pieces: tuple[RingPiece, ...],
        header: Callable[[RingPiece], ChunkHeader],
    ) -> None:
        self._outbox = outbox
        self._inbox = inbox
        self._operands = operands
        self._pieces = pieces
        self._header = header
        self._index = 0
        self._under_way = b""
        self._descriptors: list[int] = []

    @property
    def done(self) -> bool:
        return self._index == len(self._pieces) and not self._under_way

    @property
    def blocked(self) -> bool:
        """Whether words wait for the socket alone (after ``pump`` moved nothing)."""
        return bool(self._under_way)

    def pump(self, free: int) -> bool:
        """Tell of the pieces before number ``free``; whether anything went. Raises OSError."""
        if not self._under_way:
            if self._index >= min(free, len(self._pieces)):
                return False
            piece = self._pieces[self._index]
            self._index += 1
            self._under_way = self._frame(piece)
        try:
            sent = self._send()
        except BlockingIOError:
            return False
        self._under_way = self._under_way[sent:]
        return True

    def _send(self) -> int:
        if not self._descriptors:
            return self._outbox.sock.send(self._under_way)
        sent = socket.send_fds(self._outbox.sock, [self._under_way], self._descriptors)
        self.close()
        return sent

    def close(self) -> None:
        """Close the descriptors that wait to be passed on."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _frame(self, piece: RingPiece) -> bytes:
        header = self._header(piece)
        refs = self._operands.borrowed.pop((piece.start, piece.gather), [])
        announced = b""
        for ref in refs:
            for number in (_GUARD, ref.number):
                announced += self._announce(header, ref.owner, number, None)
        if not refs or not piece.gather:
            memory = self._operands.own(piece) if refs else self._operands.outgoing(piece)
            found = self._outbox.segments.find(memory)
            assert found is not None, "a piece for a neighbour lies in memory that it cannot see"
            shown, offset = found
            wide = int(memory.dtype != self._operands.source.dtype)
            refs = [*refs, SegmentRef(header.source, wide, shown.number, offset)]
            announced += self._announce(header, header.source, _GUARD, self._outbox.guard)
            announced += self._announce(header, header.source, shown.number, shown)
        return announced + _message(header, refs)

    def _announce(self, header: ChunkHeader, owner: int, number: int, shown: SharedSegment | None) -> bytes:
        if (owner, number) in self._outbox.announced:
            return b""
        self._outbox.announced.add((owner, number))
        if shown is not None:
            descriptor, nbytes = self._outbox.segments.duplicate(shown), shown.nbytes
        else:
            assert self._inbox is not None
            descriptor, nbytes = self._inbox.pass_on(owner, number)
        self._descriptors.append(descriptor)
        about = ChunkHeader(header.spec, SEGMENT, header.source, 0, SEGMENT_REF_BYTES)
        return _message(about, [SegmentRef(owner, 0, number, nbytes)])


class ReferenceReceiver:
    """Takes the places of pieces from the previous member, and reads there what ends here.

    Before anything is read, places go on to the next member if it sees shared memory too: ``outbox``.
    """

    def __init__(
        self,
        inbox: Inbox,
        outbox: Outbox | None,
        operands: Operands,
        pieces: tuple[RingPiece, ...],
        expect: Callable[[RingPiece], ChunkHeader],
    ) -> None:
        self._inbox = inbox
        self._lends = outbox is not None
        self._operands = operands
        self._pieces = pieces
        self._expect = expect
        self._arrived: list[_Arrival] = []
        self.completed = 0
        self.passable = 0
        self.everybody = False
        self.all_by_reference = False

    @property
    def done(self) -> bool:
        return self.completed == len(self._pieces)

    def pump(self) -> tuple[bool, bool]:
        """Take or use one piece: whether anything came, and whether it counted (a piece of this round).

        Raises OSError or EOFError on a lost link, ProtocolError for words that cannot be used, RoundAborted
        if somebody whose memory was read has given it up.
        """
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
        """Keep the places of the piece that is due; False if they are of an old round."""
        piece = self._pieces[len(self._arrived)]
        expected = self._expect(piece)
        if header.spec.order < expected.spec.order:
            return False
        check_expected(header, expected)
        if len(refs) > (1 if piece.gather else piece.hop + 1):
            raise ProtocolError(f"a piece of hop {piece.hop} lies in {len(refs)} places")
        views = [self._view(piece, ref) for ref in refs]
        steps = piece.hop % MAX_REFERENCES + 1 if piece.gather else len(refs)
        lent = self._lends and not piece.last and steps < MAX_REFERENCES
        if lent:
            self._operands.borrowed[piece.start, piece.gather] = refs
        if piece.last and not piece.gather:
            whole = header.spec.length >= ALIGNMENT * header.spec.world
            self.all_by_reference = whole and self._lends and len(refs) == header.spec.world - 1
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
                raise ProtocolError("a place of a partial result came where none can be")
            dtype = torch.float32
        nbytes = (piece.stop - piece.start) * dtype.itemsize
        return self._inbox.find(ref, nbytes, dtype.itemsize).view(dtype)


@dataclass(slots=True)
class _Arrival:
    """A piece that came: where it lies, in whose memory, and whether those places go on as they are."""

    views: list[torch.Tensor]
    owners: set[int]
    lent: bool


def _message(header: ChunkHeader, refs: list[SegmentRef]) -> bytes:
    body = _COUNT.pack(len(refs)) + b"".join(ref.pack() for ref in refs)
    return pack(header, digest(body)) + body
