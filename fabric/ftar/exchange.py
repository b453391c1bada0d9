"""One exchange over one ring: a single thread that sends to the next while it receives from the previous.

Both sockets are non-blocking and every piece goes out as soon as what it depends on has arrived, so a ring
cannot deadlock at any size and the hops of a long buffer overlap. While bytes flow nothing is polled; when
neither direction can move, the thread sleeps until one can, a notice comes back, somebody aborts, or the
deadline is over.

Two bounds. A member may be late for any reason that its user's code has, so until a chunk has arrived that
went through everybody's hands the bound is ``entry_s``; from then on all are in the exchange and nobody has
an excuse: ``exchange_s`` since the last byte that counted.
"""

import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fabric.errors import ProtocolError, RoundAborted
from fabric.ftar.chunks import GATHER, HEADER_BYTES, REDUCE, Header, Round, intact, pack, unpack
from fabric.ftar.links import RingLinks, lost
from fabric.ftar.reduce import Piece, Schedule, add_into


@dataclass(slots=True)
class Waiting:
    """Whom the exchange waits for now, and for how long it has waited for each in this step."""

    peer: str
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long a wait may last, in seconds: see the module's docstring."""

    entry_s: float
    exchange_s: float


class Area:
    """The tensor that is reduced, as elements and as bytes, with a scratch of one chunk beside it."""

    def __init__(self, buffer: torch.Tensor, scratch: torch.Tensor) -> None:
        self.buffer = buffer
        self.item_bytes = buffer.element_size()
        self._bytes = buffer.view(torch.uint8).numpy().data
        self._scratch = scratch.view(buffer.dtype)
        self.scratch_bytes = scratch.numpy().data

    def payload(self, piece: Piece) -> memoryview:
        """The bytes of ``piece`` in the buffer."""
        return self._bytes[piece.start * self.item_bytes : piece.stop * self.item_bytes]

    def add(self, piece: Piece) -> None:
        """Add what lies in the scratch to ``piece`` of the buffer."""
        received = self._scratch[: piece.stop - piece.start]
        add_into(self.buffer[piece.start : piece.stop], received)


class Sender:
    """Puts pieces on the link to the next member, in order, as far as they are free to go."""

    def __init__(
        self, sock: socket.socket, pieces: tuple[Piece, ...], frame: Callable[[Piece], list[memoryview]]
    ) -> None:
        self._sock = sock
        self._pieces = pieces
        self._frame = frame
        self._index = 0
        self._under_way: list[memoryview] = []

    @property
    def done(self) -> bool:
        return self._index == len(self._pieces) and not self._under_way

    @property
    def blocked(self) -> bool:
        """Whether bytes wait for the socket alone (after ``pump`` moved nothing)."""
        return bool(self._under_way)

    def pump(self, free: int) -> bool:
        """Send once, from the pieces before number ``free``; whether a byte went. Raises OSError."""
        if not self._under_way:
            if self._index >= min(free, len(self._pieces)):
                return False
            self._under_way = self._frame(self._pieces[self._index])
            self._index += 1
        try:
            sent = self._sock.sendmsg(self._under_way)
        except BlockingIOError:
            return False
        while self._under_way and sent >= len(self._under_way[0]):
            sent -= len(self._under_way.pop(0))
        if sent:
            self._under_way[0] = self._under_way[0][sent:]
        return True


class Receiver:
    """Takes pieces off the link from the previous member: verifies, then adds or keeps them."""

    def __init__(
        self,
        sock: socket.socket,
        area: Area,
        pieces: tuple[Piece, ...],
        expect: Callable[[Piece], Header],
    ) -> None:
        self._sock = sock
        self._area = area
        self._pieces = pieces
        self._expect = expect
        self._header = bytearray(HEADER_BYTES)
        self._filled = 0
        self._payload: memoryview | None = None
        self._stale = False
        self.completed = 0
        self.everybody = False

    @property
    def done(self) -> bool:
        return self.completed == len(self._pieces)

    def pump(self) -> tuple[bool, bool]:
        """Receive once: whether bytes came, and whether they counted (payload of this round).

        Raises OSError or EOFError on a lost link, ProtocolError for bytes that cannot be used.
        """
        if self.done:
            return False, False
        target = memoryview(self._header) if self._payload is None else self._payload
        try:
            count = self._sock.recv_into(target[self._filled :])
        except BlockingIOError:
            return False, False
        if not count:
            raise EOFError
        # Headers do not count either: an endless row of old chunks must not look like progress.
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
        header, piece = unpack(self._header), self._pieces[self.completed]
        expected = self._expect(piece)
        self._stale = header.round.order < expected.round.order
        if header.size == 0 or header.size > len(self._area.scratch_bytes):
            raise ProtocolError(f"a chunk announces {header.size} bytes: the chunk sizes differ")
        if self._stale or not piece.gather:
            self._payload = self._area.scratch_bytes[: header.size]
        else:
            self._payload = self._area.payload(piece)
        if not self._stale and header != expected:
            raise ProtocolError(_difference(header, expected))

    def _finish(self, payload: memoryview) -> None:
        self._payload = None
        stale, self._stale = self._stale, False
        if not intact(self._header, payload):
            raise ProtocolError(
                f"chunk {self.completed} does not match its digest: bytes were corrupted on the way "
                "or in memory; if it repeats, check that host's memory and network"
            )
        if stale:
            return
        piece = self._pieces[self.completed]
        if not piece.gather:
            self._area.add(piece)
        self.everybody = self.everybody or piece.everybody
        self.completed += 1


class Exchange:
    """One all-reduce of ``area`` over ``links``; ``run`` once."""

    def __init__(
        self,
        links: RingLinks,
        area: Area,
        round_: Round,
        plan: Schedule,
        checksum: bool,
        on_piece: Callable[[int], None],
    ) -> None:
        assert links.next is not None and links.previous is not None
        self._links = links
        self._round = round_
        self._free = plan.free
        ring = links.ring

        def header(piece: Piece, source: int) -> Header:
            size = (piece.stop - piece.start) * area.item_bytes
            kind = GATHER if piece.gather else REDUCE
            return Header(round_, kind, source, piece.sequence, size)

        def frame(piece: Piece) -> list[memoryview]:
            payload = area.payload(piece)
            return [memoryview(pack(header(piece, ring.position), payload, checksum)), payload]

        source = (ring.position - 1) % ring.world
        self._sender = Sender(links.next, plan.sends, frame)
        self._receiver = Receiver(links.previous, area, plan.receives, lambda piece: header(piece, source))
        self._watches_previous = False
        self._on_piece = on_piece

    def run(self, bounds: Bounds, waiting: Waiting) -> None:
        """Reduce. Raises RoundAborted; ``waiting`` is kept up to date throughout."""
        poll = select.poll()
        poll.register(self._links.wake, select.POLLIN)
        last_s = time.monotonic()
        completed = 0
        while not (self._sender.done and self._receiver.done):
            self._links.check()
            moved, counted = self._receive()
            if self._send():
                moved = counted = True
            if counted:
                last_s = time.monotonic()
            if self._receiver.completed > completed:
                completed = self._receiver.completed
                self._on_piece(self._round.step)
            if not moved or not counted:
                bound_s = bounds.exchange_s if self._receiver.everybody else bounds.entry_s
                self._wait(poll, last_s + bound_s, waiting, nap=not moved)

    def _send(self) -> bool:
        try:
            return self._sender.pump(self._free + self._receiver.completed)
        except OSError as error:
            # The next member may have told us why before it went.
            self._links.hear_back()
            raise lost(self._links.ring.next, error) from error

    def _receive(self) -> tuple[bool, bool]:
        peer = self._links.ring.previous
        try:
            return self._receiver.pump()
        except ProtocolError as error:
            raise RoundAborted(f"step {self._round.step} from {peer}: {error}", peer) from error
        except EOFError as error:
            raise lost(peer, None) from error
        except OSError as error:
            raise lost(peer, error) from error

    def _wait(self, poll: select.poll, deadline_s: float, waiting: Waiting, nap: bool) -> None:
        ring = self._links.ring
        peer = ring.next if self._receiver.done else ring.previous
        started_s = time.monotonic()
        if started_s >= deadline_s:
            raise RoundAborted(
                f"{peer} stalled in the exchange of step {self._round.step} of epoch {ring.epoch}: "
                "nothing moved within the bound",
                peer,
            )
        if not nap:
            return
        waiting.peer = peer
        try:
            ready = self._poll(poll, deadline_s - started_s)
        finally:
            waiting.peer = ""
            waited_s = time.monotonic() - started_s
            waiting.seconds[peer] = waiting.seconds.get(peer, 0.0) + waited_s
        assert self._links.next is not None
        if ready.get(self._links.next.fileno(), 0) & ~select.POLLOUT:
            self._links.hear_back()

    def _poll(self, poll: select.poll, timeout_s: float) -> dict[int, int]:
        links = self._links
        assert links.next is not None and links.previous is not None
        poll.register(links.next, select.POLLIN | (select.POLLOUT if self._sender.blocked else 0))
        if self._receiver.done and self._watches_previous:
            # Its owner may be gone by now, and is not needed any more: do not spin on its end.
            poll.unregister(links.previous)
            self._watches_previous = False
        elif not self._receiver.done and not self._watches_previous:
            poll.register(links.previous, select.POLLIN)
            self._watches_previous = True
        return dict(poll.poll(timeout_s * 1000 + 1))


def _difference(got: Header, expected: Header) -> str:
    if got.round.order > expected.round.order:
        return (
            f"it is in exchange {got.round.exchange} of step {got.round.step} of epoch "
            f"{got.round.epoch} already, we are in exchange {expected.round.exchange} of step "
            f"{expected.round.step} of epoch {expected.round.epoch}"
        )
    if (got.round.length, got.round.dtype) != (expected.round.length, expected.round.dtype):
        return (
            f"it reduces {got.round.length} elements of type {got.round.dtype}, we "
            f"{expected.round.length} of type {expected.round.dtype}: the replicas' models differ"
        )
    return (
        f"its chunk {got.sequence} of {got.size} bytes (position {got.source} of {got.round.world}) "
        f"came where chunk {expected.sequence} of {expected.size} bytes (position {expected.source} "
        f"of {expected.round.world}) was due: chunk sizes or rings differ"
    )
