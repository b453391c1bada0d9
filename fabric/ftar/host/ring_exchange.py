"""One exchange over one ring: a thread sends to the next member while it receives from the previous member.

Both sockets are non-blocking, and every piece goes out as soon as the piece that it depends on has arrived.
So a ring cannot deadlock at any size, and the hops of a long buffer overlap. The thread polls only when
neither direction can move. It sleeps until a socket is ready, a notice comes back, the epoch is aborted, or
the deadline has passed.

Two bounds hold. User code may delay a member, so ``entry_s`` holds until a chunk arrives that all members
have sent on. Such a chunk proves that all members have entered the exchange. Then the exchange times out when
no byte of progress arrives for ``exchange_s``.
"""

import select
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fabric.errors import Mismatch, ProtocolError, RoundAborted
from fabric.ftar.chunk_headers import GATHER, REDUCE, ChunkHeader, ExchangeSpec
from fabric.ftar.epochs import Bounds, Waiting, lost
from fabric.ftar.host.exchange_buffers import Operands
from fabric.ftar.host.ring_links import RingLinks
from fabric.ftar.host.shm_transport import ReferenceReceiver, ReferenceSender
from fabric.ftar.host.tcp_transport import ByteReceiver, ByteSender
from fabric.ftar.ring_schedule import RingPiece, Schedule


@dataclass(frozen=True, slots=True)
class ExchangeResources:
    """The resources that the plane lends to its exchanges: see CpuRing."""

    scratch: torch.Tensor  # room for one received piece
    checksum: bool  # whether to digest every payload on TCP
    on_piece: Callable[[int], None]


class HostExchange:
    """One all-reduce of ``operands`` over ``links``; ``run`` once."""

    def __init__(
        self,
        links: RingLinks,
        operands: Operands,
        spec: ExchangeSpec,
        plan: Schedule,
        resources: ExchangeResources,
    ) -> None:
        assert links.next is not None and links.previous is not None
        self._links = links
        self._spec = spec
        self._free = plan.free
        self._on_piece = resources.on_piece
        ring = links.ring

        def header(piece: RingPiece, source: int) -> ChunkHeader:
            kind = GATHER if piece.gather else REDUCE
            return ChunkHeader(spec, kind, source, piece.sequence, operands.nbytes(piece))

        def sent(piece: RingPiece) -> ChunkHeader:
            return header(piece, ring.position)

        def expected(piece: RingPiece) -> ChunkHeader:
            return header(piece, (ring.position - 1) % ring.world)

        self._sender: ByteSender | ReferenceSender
        self._receiver: ByteReceiver | ReferenceReceiver
        if links.outbox is None:
            self._sender = ByteSender(links.next, operands, plan.sends, sent, resources.checksum)
        else:
            self._sender = ReferenceSender(links.outbox, links.inbox, operands, plan.sends, sent)
        if links.inbox is None:
            self._receiver = ByteReceiver(
                links.previous, operands, plan.receives, expected, resources.scratch
            )
        else:
            self._receiver = ReferenceReceiver(links.inbox, links.outbox, operands, plan.receives, expected)
        self._watches_previous = False

    def run(self, bounds: Bounds, waiting: Waiting) -> None:
        """Reduce. Raises RoundAborted; ``waiting`` is kept up to date throughout."""
        poll = select.poll()
        poll.register(self._links.wake, select.POLLIN)
        try:
            self._move(poll, bounds, waiting)
            if not (self._spec.result_is_stable and self._receiver.all_by_reference):
                self._links.tell_read(self._spec)
                self._await_readers(poll, bounds, waiting)
        finally:
            self._sender.close()

    def _move(self, poll: "select.poll", bounds: Bounds, waiting: Waiting) -> None:
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
                self._on_piece(self._spec.step)
            if not moved or not counted:
                bound_s = bounds.exchange_s if self._receiver.everybody else bounds.entry_s
                self._wait(poll, last_s + bound_s, waiting, may_sleep=not moved)

    def _await_readers(self, poll: "select.poll", bounds: Bounds, waiting: Waiting) -> None:
        """Wait until no other member reads this member's memory any more."""
        deadline_s = time.monotonic() + bounds.exchange_s
        while not self._links.all_have_read(self._spec):
            self._links.check()
            self._wait(poll, deadline_s, waiting, may_sleep=True)

    def _send(self) -> bool:
        try:
            return self._sender.pump(self._free + self._receiver.passable)
        except OSError as error:
            # The next member may have sent the reason of an abort before its link ended.
            self._links.hear_back()
            raise lost(self._links.ring.next, error) from error

    def _receive(self) -> tuple[bool, bool]:
        peer = self._links.ring.previous
        try:
            return self._receiver.pump()
        except ProtocolError as error:
            mismatch = isinstance(error, Mismatch)
            raise RoundAborted(
                f"step {self._spec.step} from {peer}: {error}", peer, mismatch=mismatch
            ) from error
        except EOFError as error:
            raise lost(peer, None) from error
        except OSError as error:
            raise lost(peer, error) from error

    def _wait(self, poll: "select.poll", deadline_s: float, waiting: Waiting, may_sleep: bool) -> None:
        ring = self._links.ring
        peer = ring.next if self._receiver.done else ring.previous
        started_s = time.monotonic()
        if started_s >= deadline_s:
            raise RoundAborted(
                f"{peer} stalled in the exchange of step {self._spec.step} of epoch {ring.epoch}: "
                "nothing moved within the bound",
                peer,
            )
        if not may_sleep:
            return
        waiting.peer = waiting.last = peer
        try:
            ready = self._poll(poll, deadline_s - started_s)
        finally:
            waiting.peer = ""
            waited_s = time.monotonic() - started_s
            waiting.seconds[peer] = waiting.seconds.get(peer, 0.0) + waited_s
        assert self._links.next is not None
        if ready.get(self._links.next.fileno(), 0) & ~select.POLLOUT:
            self._links.hear_back()

    def _poll(self, poll: "select.poll", timeout_s: float) -> dict[int, int]:
        links = self._links
        assert links.next is not None and links.previous is not None
        poll.register(links.next, select.POLLIN | (select.POLLOUT if self._sender.blocked else 0))
        if self._receiver.done and self._watches_previous:
            # The previous member may have ended its link: a poll of an ended link would return in a loop.
            poll.unregister(links.previous)
            self._watches_previous = False
        elif not self._receiver.done and not self._watches_previous:
            poll.register(links.previous, select.POLLIN)
            self._watches_previous = True
        return dict(poll.poll(timeout_s * 1000 + 1))
