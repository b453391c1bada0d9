"""The data plane for tensors in host memory: a ring of links that ends at once when it cannot go on.

Neighbours on one host, whose link is a unix socket, read each other's memory. Other neighbours exchange bytes
over TCP.

One thread calls ``all_reduce``; the control thread installs links, aborts and retires. They share a table of
epochs under one lock, and the links of an epoch have locks of their own. An epoch that failed stays failed:
every later call for it raises the first cause, until the epoch is retired.
"""

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch

from fabric.errors import ConfigError
from fabric.ftar.chunk_headers import (
    GATHER,
    READ,
    REDUCE,
    ChunkHeader,
    ExchangeSpec,
    all_read,
    notice,
    pack,
)
from fabric.ftar.epochs import Bounds, EpochLinks, EpochPlane, Waiting, is_shared
from fabric.ftar.host.exchange_buffers import Operands, StagingMemory, make_operands, raw
from fabric.ftar.host.piece_moves import BLOCK_BYTES
from fabric.ftar.host.shm_segments import OwnSegments, PeerSegments
from fabric.ftar.host.shm_transport import (
    MAX_REFERENCES,
    SUPPORTED,
    Inbox,
    Outbox,
    ReferenceReceiver,
    ReferenceSender,
)
from fabric.ftar.host.tcp_transport import ByteReceiver, ByteSender
from fabric.ftar.plane import Ring, RingNotes
from fabric.ftar.reduce_ops import Reduction, put_together
from fabric.ftar.ring_exchange import RingExchange
from fabric.ftar.ring_schedule import ALIGNMENT, RingPiece, Schedule, schedule, segment_bounds


class RingLinks(EpochLinks):
    """Links of one epoch: ``next`` and ``previous`` are non-blocking, None in a ring of one.

    ``outbox`` and ``inbox`` are the shared-memory ends of the next and the previous link, None on TCP.

    A unix socket links members on one host, which read pieces in each other's memory (``shm_transport``). A
    TCP socket carries the bytes of the pieces (``tcp_transport``). A ring may have unix and TCP sockets.

    Chunks travel from each member to the next. The other direction of the same sockets carries the notice of
    an abort and, on links of shared memory, the READ message. A member that aborts sends a notice, with the
    reason and the peer at fault, to the previous member. That member passes the notice on, so all members
    know the cause within milliseconds. After a death, the member before the dead member sees the loss and
    sends the notice. A member that has not entered the exchange passes the notice on when it enters. Until
    that moment the members before it learn of the abort from the control plane.

    An abort does not shut sockets down, because the end of a stream cannot name its cause. They are closed
    when the epoch is retired.

    An eventfd wakes the thread that polls. Descriptors are closed only when that thread is out of the
    exchange, because the kernel may give a closed descriptor's number to another file.
    """

    answers = (READ,)

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
        self.parts: Sequence[torch.Tensor] = ()  # where own elements of the next exchange lie
        # The newest READ message of each member, by the member's position.
        self._readers: dict[int, ChunkHeader] = {}

    def aborted(self, why: str, about: str) -> None:
        """Raise the guard, and tell the previous member, before the exchange returns."""
        if self.outbox is not None:
            self.outbox.raise_guard(notice(self.ring.epoch, self.ring.position, why, about))
        super().aborted(why, about)

    def release(self) -> None:
        super().release()
        for end in (self.inbox, self.outbox):
            if end is not None:
                end.close()

    def take_parts(self, parts: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """Leave the elements where they lie, if both links carry bytes."""
        if self.outbox is None and self.inbox is None and self.ring.world > 1:
            self.parts = parts
        else:
            put_together(parts, result)

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

    def heard(self, message: ChunkHeader) -> None:
        """Take a READ message, and pass it on to the members before this one that it concerns."""
        self._readers[message.source] = message
        if message.source != (self.ring.position - 1) % self.ring.world:
            self._send_back(pack(message))


# A piece costs about 0.1 ms besides its bytes, so smaller pieces are slower. Larger pieces gain nothing
# (benchmarks/notes/all-reduce.md).
CHUNK_BYTES = 8 * 1024 * 1024
# The widest type has eight bytes, so every cut falls between elements.
_CHUNK_UNIT_BYTES = ALIGNMENT * 8


@dataclass(frozen=True, slots=True)
class ExchangeResources:
    """The resources that the plane lends to its exchanges: see CpuRing."""

    scratch: memoryview  # room for one block of a received piece
    most: int  # bytes of the largest piece
    checksum: bool  # whether to digest every payload on TCP
    on_piece: Callable[[int], None]


class HostExchange(RingExchange[RingLinks]):
    """One all-reduce of ``operands`` over ``links``."""

    _out: ByteSender | ReferenceSender
    _in: ByteReceiver | ReferenceReceiver

    def __init__(
        self,
        links: RingLinks,
        operands: Operands,
        spec: ExchangeSpec,
        plan: Schedule,
        resources: ExchangeResources,
        notes: RingNotes,
    ) -> None:
        assert links.next is not None and links.previous is not None
        self._spec, self._free = spec, plan.free
        ring = links.ring

        def header(source: int, size: Callable[[RingPiece], int], piece: RingPiece) -> ChunkHeader:
            kind = GATHER if piece.gather else REDUCE
            return ChunkHeader(spec, kind, source, piece.sequence, size(piece))

        sent = partial(header, ring.position, operands.carried if links.outbox is None else operands.nbytes)
        expected = partial(
            header,
            (ring.position - 1) % ring.world,
            operands.carried if links.inbox is None else operands.nbytes,
        )
        receiver: ByteReceiver | ReferenceReceiver
        arrivals = None
        if links.inbox is None:
            receiver = arrivals = ByteReceiver(
                links.previous, operands, plan.receives, expected, resources.scratch, resources.most, notes
            )
        else:
            receiver = ReferenceReceiver(links.inbox, links.outbox, operands, plan.receives, expected)
        sender: ByteSender | ReferenceSender
        if links.outbox is None:
            sender = ByteSender(links.next, operands, plan.sends, sent, resources.checksum, arrivals, notes)
        else:
            sender = ReferenceSender(links.outbox, links.inbox, operands, plan.sends, sent)
        super().__init__(links, sender, receiver, f"step {spec.step}", partial(resources.on_piece, spec.step))

    def run(self, bounds: Bounds, waiting: Waiting) -> None:
        """Reduce, and return when no member reads this one's memory any more. Raises RoundAborted."""
        try:
            super().run(bounds, waiting)
            if not (self._spec.result_is_stable and self._in.all_by_reference):
                self._links.tell_read(self._spec)
                deadline_s = time.monotonic() + bounds.exchange_s
                while not self._links.all_have_read(self._spec):
                    self._links.check()
                    self._wait(deadline_s, waiting, may_sleep=True)
        finally:
            self._out.close()

    def move(self) -> tuple[bool, bool]:
        moved, counted = self._receive()
        sent = self._send(self._free + self._in.passable)
        return moved or sent, counted or sent


class CpuRing(EpochPlane[RingLinks]):
    """DataPlane over links of shared memory and TCP: see ``plane``.

    ``exchange_s`` bounds the time without progress once all members have entered the exchange. ``entry_s``
    bounds the wait for late members, and must exceed the time limit of user code. ``chunk_bytes`` must be
    equal on all members. ``checksum`` covers every payload on TCP and not only the headers. ``shared_memory``
    asks for links of shared memory where possible. ``on_piece(step)`` is called after every arrived piece,
    for tests that act in mid-exchange.
    """

    def __init__(
        self,
        chunk_bytes: int = CHUNK_BYTES,
        exchange_s: float = 30.0,
        entry_s: float = 7200.0,
        checksum: bool = True,
        shared_memory: bool = True,
        on_piece: Callable[[int], None] = lambda _step: None,
    ) -> None:
        if chunk_bytes < _CHUNK_UNIT_BYTES or chunk_bytes > 2**30:
            raise ConfigError(
                f"chunks of {chunk_bytes} bytes are not possible: "
                f"choose between {_CHUNK_UNIT_BYTES} bytes and 1 GiB"
            )
        self._own = OwnSegments()
        self._others = PeerSegments()
        make_links = partial(RingLinks, own=self._own, others=self._others)
        super().__init__(Bounds(entry_s, exchange_s), attrgetter("is_cpu"), make_links)
        self.shares_memory = shared_memory and SUPPORTED
        self._chunk_bytes = chunk_bytes // _CHUNK_UNIT_BYTES * _CHUNK_UNIT_BYTES
        # Partial results of 16-bit elements travel as float32, twice as large.
        scratch = raw(torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu"))
        self._resources = ExchangeResources(scratch, 2 * self._chunk_bytes, checksum, on_piece)
        self._workspace = StagingMemory(self._own)

    kind = "host"

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate memory that neighbours read in place: see DataPlane. Raises ConfigError."""
        return self._own.allocate(nbytes).memory[:nbytes]

    def register(self, descriptor: int, memory: torch.Tensor) -> None:
        """Let neighbours read ``memory``, the start of ``descriptor``, in place: see DataPlane."""
        self._own.register(descriptor, memory)

    def unregister(self, memory: torch.Tensor) -> None:
        """Stop sharing ``memory`` that was allocated or registered; ignore other memory."""
        self._own.unregister(memory)

    _memory = "in host memory"

    def _reduce(
        self, links: RingLinks, spec: ExchangeSpec, source: torch.Tensor, result: torch.Tensor, how: Reduction
    ) -> None:
        """Reduce in the order of ``ring_schedule``."""
        ring, length = links.ring, source.numel()
        if ring.world == 1:
            how.alone(source, result)
            return
        if not length:
            return
        chunk_elements = self._chunk_bytes // source.element_size()
        cut = min(how.coarse, length) if spec.form else 0
        plan = schedule(length, ring.world, ring.position, chunk_elements, cut=cut)
        by_reference = links.outbox is not None and links.inbox is not None
        readable = range(*segment_bounds(length, ring.world)[ring.position])
        if by_reference and ring.world > 2:
            readable = range(length)
        partial = not by_reference or ring.world > MAX_REFERENCES + 1
        visible = None if links.outbox is None else lambda memory: self._own.find(memory) is not None
        operands = make_operands(source, result, how, readable, ring.world, partial, self._workspace, visible)
        operands.parts, links.parts = links.parts, ()
        exchange = HostExchange(links, operands, spec, plan, self._resources, self.notes)
        exchange.run(self._bounds, self._waiting)

    def retire(self, before_epoch: int) -> None:
        super().retire(before_epoch)
        self._others.retire(before_epoch)

    def close(self) -> None:
        super().close()
        self._own.close()
        self._others.close()
