"""Pieces over a link that carries their bytes: the two ends of a TCP connection between neighbours."""

import socket
from collections.abc import Callable, Sequence

import torch

from fabric.errors import Mismatch, ProtocolError
from fabric.ftar.chunk_headers import HEADER_BYTES, ChunkHeader, check_expected, digest, pack, unpack
from fabric.ftar.host.exchange_buffers import Operands, raw
from fabric.ftar.ring_exchange import PieceSender
from fabric.ftar.ring_schedule import RingPiece


class HostSender(PieceSender):
    """Sends pieces of ``operands`` in host memory."""

    def __init__(
        self, operands: Operands, pieces: Sequence[RingPiece], header: Callable[[RingPiece], ChunkHeader]
    ) -> None:
        super().__init__(pieces)
        self._operands, self._header = operands, header


class ByteSender(HostSender):
    """Sends the bytes of pieces."""

    def __init__(
        self,
        sock: socket.socket,
        operands: Operands,
        pieces: Sequence[RingPiece],
        header: Callable[[RingPiece], ChunkHeader],
        checksum: bool,
    ) -> None:
        super().__init__(operands, pieces, header)
        self._sock = sock
        self._checksum = checksum

    def send(self) -> int:
        return self._sock.sendmsg(self._under_way)

    def frame(self, piece: RingPiece) -> list[memoryview]:
        payload = raw(self._operands.outgoing(piece))
        payload_digest = None
        if self._checksum:
            # A result that is sent on keeps the digest of the member that computed it.
            payload_digest = self._operands.digests.pop(piece.start, None) if piece.gather else None
            if payload_digest is None:
                payload_digest = digest(payload)
        return [memoryview(pack(self._header(piece), payload_digest)), payload]


class ByteReceiver:
    """Takes pieces off the link from the previous member: verifies, then adds or keeps them.

    ``scratch`` (bytes) holds one piece that is to be added, or that is of an old round.
    """

    def __init__(
        self,
        sock: socket.socket,
        operands: Operands,
        pieces: Sequence[RingPiece],
        expect: Callable[[RingPiece], ChunkHeader],
        scratch: torch.Tensor,
    ) -> None:
        self._sock = sock
        self._operands = operands
        self._pieces = pieces
        self._expect = expect
        self._scratch = scratch
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._filled = 0
        self._payload: memoryview | None = None
        self._digest: int | None = None
        self._stale = False
        self.completed = 0
        self.everybody = False
        self.all_by_reference = False

    @property
    def done(self) -> bool:
        return self.completed == len(self._pieces)

    @property
    def passable(self) -> int:
        """The number of pieces that may be sent on to the next member."""
        return self.completed

    def pump(self) -> tuple[bool, bool]:
        """Receive once, or a header and at once the bytes behind it.

        Returns whether bytes came, and whether they count as progress (payload of this round).

        Raises OSError or EOFError on a lost link, ProtocolError for bytes that cannot be used.
        """
        if self.done:
            return False, False
        moved, counted = self._receive()
        if moved and self._payload is not None and not self._filled:
            counted = self._receive()[1]
        return moved, counted

    def _receive(self) -> tuple[bool, bool]:
        target = self._header if self._payload is None else self._payload
        try:
            count = self._sock.recv_into(target[self._filled :])
        except BlockingIOError:
            return False, False
        if not count:
            raise EOFError
        # Only payload of this round counts as progress: an endless row of old chunks is no progress.
        counted = self._payload is not None and not self._stale
        self._filled += count
        if self._filled == len(target):
            self._filled = 0
            if self._payload is None:
                self._begin()
            else:
                self._finish(self._payload)
        return True, counted

    def _begin(self) -> None:
        header, self._digest = unpack(self._header)
        piece = self._pieces[self.completed]
        expected = self._expect(piece)
        self._stale = header.spec.order < expected.spec.order
        if header.size == 0 or header.size > self._scratch.numel():
            raise Mismatch(f"a chunk announces {header.size} bytes: the chunk sizes differ")
        if not self._stale:
            check_expected(header, expected)
        if self._stale or not piece.gather:
            self._payload = raw(self._scratch[: header.size])
        else:
            self._payload = raw(self._operands.landing(piece))

    def _finish(self, payload: memoryview) -> None:
        self._payload = None
        if self._digest is not None and self._digest != digest(payload):
            raise ProtocolError(
                f"chunk {self.completed} does not match its digest: bytes were corrupted on the way "
                "or in memory; if it repeats, check that host's memory and network"
            )
        if self._stale:
            self._stale = False
            return
        piece = self._pieces[self.completed]
        if piece.gather:
            self._operands.landed(piece)
            if self._digest is not None and not piece.last:
                self._operands.digests[piece.start] = self._digest
        else:
            self._operands.take(piece, [self._operands.typed(piece, self._scratch[: len(payload)])])
        self.everybody = self.everybody or piece.everybody
        self.completed += 1
