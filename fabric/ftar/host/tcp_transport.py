"""Pieces over a link that carries their bytes: the two ends of a TCP connection between neighbours.

The compiled ``piece_moves`` moves, digests and sums the payloads. A piece that is to be sent on follows its
own arrival: its bytes go as soon as they are summed. Its digest goes behind the payload, only after the piece
has come completely and was verified. So no member completes a piece that was altered before it.
"""

import socket
from collections.abc import Callable, Sequence

from fabric.errors import Mismatch, ProtocolError
from fabric.ftar.chunk_headers import (
    FOLLOWS,
    HEADER_BYTES,
    NOTE,
    ChunkHeader,
    check_expected,
    digest,
    pack,
    unpack,
)
from fabric.ftar.host.exchange_buffers import Operands
from fabric.ftar.host.piece_moves import DIGEST_BYTES, Inlet, Outlet
from fabric.ftar.plane import MOST_NOTE_BYTES, RingNotes
from fabric.ftar.ring_exchange import PieceReceiver, PieceSender
from fabric.ftar.ring_schedule import DTYPE_CODES, RingPiece


class ByteReceiver(PieceReceiver):
    """Takes pieces off the link from the previous member: verifies, then adds or keeps them.

    ``most`` bounds the bytes of a payload. ``scratch`` holds one block of a piece that is to be added, or
    that is of an old round.
    """

    def __init__(
        self,
        sock: socket.socket,
        operands: Operands,
        pieces: Sequence[RingPiece],
        expect: Callable[[RingPiece], ChunkHeader],
        scratch: memoryview,
        most: int,
        notes: RingNotes,
    ) -> None:
        super().__init__(pieces)
        self._sock = sock
        self._operands = operands
        self._expect = expect
        self._most = most
        how = operands.reduction
        self._inlet = Inlet(
            sock.fileno(), scratch, DTYPE_CODES[operands.source.dtype], how.code, float(how.weight)
        )
        self._header = self._front = memoryview(bytearray(HEADER_BYTES))
        self._filled = 0  # bytes in ``_front``, which gets a header, or a note and the header behind it
        self._note: tuple[ChunkHeader, int | None] | None = None  # what announced the note
        self._notes = notes
        # The notes in front of pieces to send on, with header and digest, by the start of the piece.
        self.notes: dict[int, bytes] = {}
        self._left = 0  # bytes of payload and digest that are still to come
        self._stale = False
        self.digested = False  # whether a digest follows the payload that comes now
        self.all_by_reference = False

    @property
    def passable(self) -> int:
        """The number of pieces that may be sent on to the next member."""
        return self.completed

    @property
    def passing(self) -> int:
        """The bytes of the piece under way that may be sent on before its end."""
        return self._inlet.kept() if self._left and not self._stale else 0

    def pump(self) -> tuple[bool, bool]:
        """Receive once, or a header and at once the bytes behind it: see ``PieceReceiver``."""
        if self.done:
            return False, False
        under_way = self._left
        moved, counted = self._receive()
        if self._left and not under_way:
            counted = self._receive()[1]
        return moved, counted

    def _receive(self) -> tuple[bool, bool]:
        try:
            if self._left:
                self._left -= self._inlet.pump()
                # Only payload of this round counts as progress: an endless row of old chunks is no progress.
                counted = not self._stale
                if not self._left:
                    self._finish()
                    self._begin_when_whole()
                return True, counted
            count = self._sock.recv_into(self._front[self._filled :])
        except BlockingIOError:
            return False, False
        if not count:
            raise EOFError
        self._filled += count
        self._begin_when_whole()
        return True, False

    def _begin_when_whole(self) -> None:
        if self._filled < len(self._front):
            return
        self._filled, front, self._front = 0, self._front, self._header
        announced, self._note = self._note, None
        header, payload_digest = unpack(front[-HEADER_BYTES:])
        if header.kind == NOTE and announced is None and header.size <= MOST_NOTE_BYTES:
            self._note = header, payload_digest
            self._front = memoryview(bytearray(header.size + HEADER_BYTES))
            return
        piece = self._pieces[self.completed]
        expected = self._expect(piece)
        self._stale = header.spec.order < expected.spec.order
        if announced is not None:
            note_header, note_digest = announced
            note = bytes(front[:-HEADER_BYTES])
            if note_digest != digest(note) or note_header.source >= note_header.spec.world:
                raise ProtocolError(
                    f"the note in front of chunk {self.completed} does not match its digest or ring"
                )
            if note_header.spec == expected.spec and piece.gather:
                self._notes.arrived(expected.spec.epoch, expected.spec.step, note_header.source, note)
                self.notes[piece.start] = pack(note_header, note_digest) + note
        if header.size == 0 or header.size > self._most:
            raise Mismatch(f"a chunk announces {header.size} bytes: the chunk sizes differ")
        if not self._stale:
            check_expected(header, expected)
        operands, element = self._operands, expected.spec.dtype
        received = kept = element
        own: memoryview | tuple[memoryview, ...] | None = None
        into = onward = None
        form = 0 if self._stale else operands.form_of(piece)
        if form and not (piece.gather and piece.last):
            onward = operands.coded(piece)
        if not self._stale and piece.gather:
            into = operands.bytes_of(operands.landing(piece), piece)
        elif not self._stale:
            total = operands.total(piece)
            own, into = operands.lying(piece), operands.bytes_of(total, piece)
            received, kept = DTYPE_CODES[operands.wire_dtype(piece)], DTYPE_CODES[total.dtype]
        self.digested = payload_digest == FOLLOWS
        if onward is not None and own is not None and not piece.last:
            into = None  # such a sum only goes on
        is_end = not self._stale and self.completed + 1 == len(self._pieces)
        ahead = 0 if is_end else HEADER_BYTES  # behind the last piece another exchange begins
        self._inlet.begin(
            header.size, own, into, received, kept, piece.last, self.digested, form, onward, ahead
        )
        self._left = header.size + DIGEST_BYTES * self.digested

    def _finish(self) -> None:
        kept_digest = self._inlet.finish()
        if kept_digest is None:
            raise ProtocolError(
                f"chunk {self.completed} does not match its digest: bytes were corrupted on the way "
                "or in memory; if it repeats, check that host's memory and network"
            )
        if not self._stale:
            piece = self._pieces[self.completed]
            self._operands.arrived(piece)
            if self.digested:
                self._operands.digests[piece.start] = kept_digest
            self.everybody = self.everybody or piece.everybody
            self.completed += 1
        self._stale = False
        ahead = self._inlet.ahead()
        self._filled = len(ahead)
        self._header[: self._filled] = ahead


class ByteSender(PieceSender):
    """Sends the bytes of pieces. ``arrivals`` receives the pieces to send on, None behind shared memory."""

    def __init__(
        self,
        sock: socket.socket,
        operands: Operands,
        pieces: Sequence[RingPiece],
        header: Callable[[RingPiece], ChunkHeader],
        checksum: bool,
        arrivals: ByteReceiver | None,
        notes: RingNotes,
    ) -> None:
        super().__init__(pieces)
        self._operands, self._header, self._notes = operands, header, notes
        self._outlet = Outlet(sock.fileno())
        self._checksum = checksum
        self._arrivals = arrivals
        self._follows = False  # whether the piece under way is still arriving

    @property
    def blocked(self) -> bool:
        return self._outlet.may_send()

    def pump(self, free: int) -> bool:
        arrivals = self._arrivals
        if self._follows:
            if self._index <= free:
                self._complete(self._pieces[self._index - 1])
            elif arrivals is not None:
                self._outlet.allow(arrivals.passing)
        elif not self._left and self._index == free < len(self._pieces) and arrivals is not None:
            # The next piece to send is the one that comes now.
            self._follows = arrivals.passing > 0 and arrivals.digested == self._checksum
            free += self._follows
        return super().pump(free)

    def frame(self, piece: RingPiece) -> int:
        operands, form = self._operands, 0
        source: memoryview | tuple[memoryview, ...] | None = None
        payload = operands.coded(piece)
        if payload is None:
            places = () if piece.hop else operands.lying(piece)
            memory = operands.going(piece) if piece.hop else operands.source
            payload = places[0] if len(places) == 1 else operands.bytes_of(memory, piece)
            source = places if len(places) > 1 else None
        elif piece.hop == 0 or self._arrivals is None:
            form = operands.form_of(piece)
            source = operands.bytes_of(operands.going(piece), piece) if piece.hop else operands.lying(piece)
        described = self._header(piece)
        header = pack(described, FOLLOWS if self._checksum else None)
        if piece.gather:
            header = self._note_of(piece, described) + header
        computes = piece.hop == 0 or not (self._follows or piece.start in operands.digests)
        self._outlet.begin(header, payload, self._checksum, computes, form, source)
        if self._follows and self._arrivals is not None:
            self._outlet.allow(self._arrivals.passing)
        elif not computes:
            self._complete(piece)
        return len(header) + len(payload) + DIGEST_BYTES * self._checksum

    def _note_of(self, piece: RingPiece, described: ChunkHeader) -> bytes:
        """Return the note in front of a piece of the result: the own one, or the one that came with it."""
        spec = described.spec
        if piece.hop > spec.world - 1:
            return self._arrivals.notes.pop(piece.start, b"") if self._arrivals is not None else b""
        note = self._notes.take(spec.epoch, spec.step, described.source)
        header = ChunkHeader(spec, NOTE, described.source, 0, len(note))
        return pack(header, digest(note)) + note if note else b""

    def send(self) -> int:
        return self._outlet.pump()

    def _complete(self, piece: RingPiece) -> None:
        """Let all of ``piece`` go. Its digest is the one that its arrival has, or that its sum got."""
        self._follows = False
        payload_digest = self._operands.digests.pop(piece.start, None)
        self._outlet.allow(self._operands.carried(piece), payload_digest if self._checksum else None)
