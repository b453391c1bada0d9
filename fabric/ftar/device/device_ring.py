"""The data plane for tensors in a device's memory: a ring whose chunks never block the compute stream.

Between hosts a chunk goes device -> page-locked slot -> TCP -> page-locked slot -> device, over all
connections of the link at once. Between processes on one host the next member reads it out of device memory
that this one shares. Sums are made on the device, in the order and the arithmetic of every other plane.
"""

import base64
import copy
import json
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial

import msgspec
import torch

from fabric.errors import ConfigError, ProtocolError, RoundAborted
from fabric.ftar.chunk_headers import (
    ANSWER,
    CREDIT,
    DEVICE_GATHER,
    DEVICE_REDUCE,
    HEADER_BYTES,
    ChunkHeader,
    ExchangeSpec,
    check_expected,
    pack,
    to_previous,
    unpack,
)
from fabric.ftar.device.connections import (
    Connections,
    MoverThreads,
    PartReceiver,
    PartSender,
)
from fabric.ftar.device.cuda import CudaDevice, CudaEvent, SharedMemoryHandle
from fabric.ftar.epochs import Bounds, EpochLinks, EpochPlane, Waiting, is_shared, lost, received
from fabric.ftar.plane import Ring
from fabric.ftar.reduce_ops import Reduction
from fabric.ftar.ring_exchange import PieceReceiver, PieceSender, RingExchange
from fabric.ftar.ring_schedule import ALIGNMENT, RingPiece, Schedule, schedule

# The resources of an exchange on a device: side streams, chunk-sized slots, the arithmetic of a piece.


class DeviceWorkspace:
    """The two side streams of a plane, its slots of one chunk, all allocated once, and its threads.

    ``slots`` bounds the chunks under way in each direction, ``group`` those of a segment that go together.
    """

    def __init__(self, device: CudaDevice, chunk_bytes: int, slots: int, group: int) -> None:
        self.device = device
        self.chunk_bytes = chunk_bytes
        self.slots = slots
        self.group = group
        self.down, self.up = device.stream(), device.stream()
        # One allocation for all slots: torch rounds each page-locked allocation up.
        self.outgoing = _cut(device.staging(chunk_bytes * slots), chunk_bytes)
        self.incoming = _cut(device.staging(chunk_bytes * slots), chunk_bytes)
        self.scratch = device.memory(chunk_bytes)
        self.partial = _cut(device.memory(chunk_bytes * 2 * group), chunk_bytes)
        # Slots of partial sums that may be overwritten. If a slot has an event, a copy reads the slot until
        # that event.
        self.free: deque[tuple[int, CudaEvent | None]] = deque()
        self.unfinished: list[CudaEvent] = []
        self.senders, self.receivers = MoverThreads(), MoverThreads()
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._registered: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._register_lock = threading.Lock()

    def register(self, memory: torch.Tensor) -> None:
        """Register host ``memory`` for copies that do not block."""
        with self._register_lock:
            self._registered.append(memory)
            self.device.keep_registered(self._registered)

    def unregister(self, memory: torch.Tensor) -> None:
        """Unregister ``memory``; no copy into it may be under way."""
        with self._register_lock:
            self._registered = [t for t in self._registered if t.data_ptr() != memory.data_ptr()]
            self.device.keep_registered(self._registered)

    def begin(self, behind: CudaEvent) -> None:
        """Begin an exchange: both streams wait for ``behind``, and every slot is free."""
        for stream in (self.down, self.up):
            stream.wait(behind)
        self.free = deque((slot, None) for slot in range(len(self.partial)))

    def abandon(self) -> CudaEvent:
        """Abandon a failed exchange: return the event at which its enqueued work has run."""
        self.up.wait(self.down.record())
        event = self.up.record()
        self.unfinished.append(event)
        return event

    def wake(self) -> None:
        """Wake the exchange; from any thread."""
        with self._lock:
            if self.wakeup_fd >= 0:
                os.eventfd_write(self.wakeup_fd, 1)

    def close(self) -> None:
        """End the threads, and close the descriptor that wakes the exchange."""
        self.senders.close()
        self.receivers.close()
        with self._lock:
            if self.wakeup_fd >= 0:
                os.close(self.wakeup_fd)
            self.wakeup_fd = -1


@dataclass(frozen=True, slots=True)
class ReductionTask:
    """One reduction: flat ``source`` into flat ``result`` (maybe the same), and the operation.

    ``header(piece, source, size)`` is the header of a piece that member ``source``
    sends.
    """

    source: torch.Tensor
    result: torch.Tensor
    how: Reduction
    header: Callable[[RingPiece, int, int], ChunkHeader]
    on_piece: Callable[[], None]

    @property
    def wide(self) -> torch.dtype:
        """Type of a partial sum of several members: 16-bit floats are added in float32 and rounded once."""
        dtype = self.source.dtype
        return torch.float32 if self.how.is_wide(dtype) else dtype

    def dtype(self, piece: RingPiece) -> torch.dtype:
        """Type of ``piece`` on the wire."""
        return self.source.dtype if piece.gather or piece.hop == 0 else self.wide

    def size(self, piece: RingPiece) -> int:
        """Return bytes of ``piece`` on the wire."""
        return (piece.stop - piece.start) * self.dtype(piece).itemsize

    def header_of_part(
        self,
        pieces: Sequence[RingPiece],
        source: int,
        connections: int,
        connection: int,
        number: int,
        size: int,
    ) -> ChunkHeader:
        """Return the header of a part of piece ``number``, where each connection carries one."""
        header = self.header(pieces[number], source, size)
        return msgspec.structs.replace(header, sequence=number * connections + connection)

    def accumulate(self, piece: RingPiece, received: torch.Tensor, total: torch.Tensor) -> None:
        """``total = received (+) own``, finished into the result where ``piece`` is the last of its sum."""
        total.copy_(received)
        own = self.source[piece.start : piece.stop]
        kernel = {"min": torch.minimum, "max": torch.maximum}.get(self.how.operation, torch.add)
        kernel(total, own, out=total)
        if piece.last:
            self.finish(total, self.result[piece.start : piece.stop])

    def finish(self, total: torch.Tensor, into: torch.Tensor) -> None:
        """Write ``total``, divided for a mean, into elements of the result; ``total`` is used up."""
        if self.how.operation == "mean":
            # Divide by a tensor: on a GPU torch would multiply by the reciprocal of a number.
            total.div_(torch.full((), self.how.weight, dtype=total.dtype, device=total.device))
        into.copy_(total)


def _cut(memory: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [memory[begin : begin + size] for begin in range(0, memory.numel(), size)]


# The two sockets of one epoch's device ring, the messages that come back on them, and shared device
# memory.
#
# The link of neighbours on one host is a unix socket. There the sender shares device memory, and the
# receiver reads the chunks from it if it can open it. Then the socket carries the chunks' headers, and
# the receiver returns a credit for every slot that it has read. All other links carry the chunks' bytes.


_OFFER = struct.Struct("<4sI")
_OFFER_MAGIC = b"FDO1"
OFFER_HEAD_BYTES = _OFFER.size
# A handle has some hundred bytes, more where the allocator's memory can grow.
MAX_OFFER_BYTES = 8192

Bytes = bytes | bytearray | memoryview


def offer(handle: SharedMemoryHandle | None) -> bytes:
    """Return the bytes that offer shared memory to the next member, or say that there is none.

    With shared device memory the next member reads the chunks there. Over TCP their bytes follow the headers.
    """
    values = {} if handle is None else {f.name: getattr(handle, f.name) for f in fields(handle)}
    plain = {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in values.items()}
    body = json.dumps(plain).encode() if plain else b""
    if len(body) > MAX_OFFER_BYTES:
        body = b""
    return _OFFER.pack(_OFFER_MAGIC, len(body)) + body


def offer_size(head: Bytes) -> int:
    """Return how many bytes follow the OFFER_HEAD_BYTES in ``head``; raises ProtocolError."""
    magic, size = _OFFER.unpack_from(head)
    if magic != _OFFER_MAGIC or size > MAX_OFFER_BYTES:
        raise ProtocolError(
            "the bytes on the ring are no offer of device memory: do all members run on a GPU?"
        )
    return int(size)


def read_offer(body: Bytes) -> SharedMemoryHandle | None:
    """Return the handle in an offer's body; raises ProtocolError."""
    if not body:
        return None
    try:
        offered = json.loads(bytes(body))
        values = {}
        for field in fields(SharedMemoryHandle):
            value = offered.pop(field.name)
            if field.type is bytes:
                value = base64.b64decode(value, validate=True)
            if type(value) is not field.type or (type(value) is int and not 0 <= value < 2**62):
                raise ValueError(field.name)
            values[field.name] = value
        if offered:
            raise ValueError(min(offered))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError("an offer of device memory has not the fields that it must have") from error
    return SharedMemoryHandle(**values)


class DeviceLinks(EpochLinks):
    """Links of one epoch; ``shares`` says whether device memory may be shared where that is possible."""

    answers = (ANSWER, CREDIT)

    def __init__(
        self,
        ring: Ring,
        next_socket: socket.socket | None,
        previous_socket: socket.socket | None,
        shares: bool = False,
    ) -> None:
        super().__init__(ring, next_socket, previous_socket)
        self.offers = shares and is_shared(next_socket)
        self.expects_offer = shares and is_shared(previous_socket)
        # ``outbox``: memory for the next member to read, None for TCP. ``accepted``: whether the next member
        # can read this memory, None before its answer.
        self.outbox: torch.Tensor | None = None
        self.accepted: bool | None = None if self.offers else False
        self.inbox: torch.Tensor | None = None
        self.credits = 0
        # The connections after the first ones. Messages go backward on the first ones only.
        self.further_next: Sequence[socket.socket] = ()
        self.further_previous: Sequence[socket.socket] = ()

    def add(self, further_next: Sequence[socket.socket], further_previous: Sequence[socket.socket]) -> None:
        """Take further connections of both links; they are closed with the first ones."""
        self.further_next, self.further_previous = further_next, further_previous
        for sock in (*further_next, *further_previous):
            sock.setblocking(False)

    def release(self) -> None:
        super().release()
        for sock in (*self.further_next, *self.further_previous):
            sock.close()

    def make_offer(self, device: CudaDevice, nbytes: int) -> bytes:
        """Allocate the outbox; return the bytes that offer it."""
        self.offers = False
        shared = device.share(nbytes)
        if shared is None:
            return offer(None)
        self.outbox, handle = shared
        return offer(handle)

    def take_offer(self, body: bytes | bytearray, device: CudaDevice) -> None:
        """Open the memory of an offer, and tell the previous member whether that worked. Raises
        ProtocolError."""
        self.expects_offer = False
        handle = read_offer(body)
        self.inbox = None if handle is None else device.open(handle)
        self.send_back(to_previous(ANSWER, int(self.inbox is not None)))

    def send_back(self, frame: bytes) -> None:
        """Send a small frame to the previous member. Raises RoundAborted where not all of it can be sent."""
        with self._lock:
            self.check()
            assert self.previous is not None
            try:
                # Slots bound the credits, so the socket's buffer has room while the link works.
                sent = self.previous.send(frame)
            except OSError as error:
                raise lost(self.ring.previous, error) from error
            if sent != len(frame):
                raise RoundAborted(f"the ring link to {self.ring.previous} does not take answers", "")

    def heard(self, message: ChunkHeader) -> None:
        """Take an answer to the offer, or credits."""
        if message.kind == CREDIT:
            self.credits += message.sequence
            return
        self.accepted = bool(message.sequence) and self.outbox is not None
        if not self.accepted:
            self.outbox = None


class Outgoing(PieceSender):
    """Pieces to the next member: the device copies each into a slot, then it is announced or sent."""

    def __init__(
        self, task: ReductionTask, links: DeviceLinks, space: DeviceWorkspace, pieces: Sequence[RingPiece]
    ) -> None:
        assert links.next is not None
        super().__init__(pieces)
        self._sock = links.next
        self._task, self._links, self._space = task, links, space
        self._copies: deque[CudaEvent] = deque()
        self._begun = self._ready = 0
        self.connections: Connections | None = None
        self._message = b""
        if links.offers:
            self._message = links.make_offer(space.device, space.chunk_bytes * space.slots)
            self._left = len(self._message)

    @property
    def _freed(self) -> int:
        return self._links.credits if self._links.accepted else self._index

    @property
    def done(self) -> bool:
        return self._freed == len(self._pieces) and not self._left

    @property
    def copying(self) -> bool:
        return bool(self._copies)

    def stage(self, arrived: "dict[int, Arrival]") -> None:
        """Enqueue the copies that have a slot and their data; that data leaves ``arrived``."""
        space = self._space
        while (
            self._links.accepted is not None
            and self._begun < len(self._pieces)
            and self._begun - self._freed < space.slots
        ):
            piece = self._pieces[self._begun]
            if piece.needs < 0:
                source = self._task.source[piece.start : piece.stop].view(torch.uint8)
                self._copy(source)
            elif piece.needs in arrived:
                arrival = arrived.pop(piece.needs)
                space.down.wait(arrival.event)
                copied = self._copy(arrival.data)
                if arrival.slot is not None:
                    space.free.append((arrival.slot, copied))
            else:
                return

    def _copy(self, source: torch.Tensor) -> CudaEvent:
        space = self._space
        target = self._slot(self._begun)[: source.numel()]
        self._begun += 1
        space.down.run(lambda: target.copy_(source, non_blocking=True))
        event = space.down.record()
        self._copies.append(event)
        space.device.when(event, space.wake)
        return event

    def _slot(self, number: int) -> torch.Tensor:
        space, index = self._space, number % self._space.slots
        if self._links.accepted:
            assert self._links.outbox is not None
            return self._links.outbox[index * space.chunk_bytes : (index + 1) * space.chunk_bytes]
        return space.outgoing[index]

    def ready(self) -> int:
        """Return how many of the pieces lie in their slots."""
        while self._copies and self._copies[0].done():
            self._copies.popleft()
            self._ready += 1
        return self._ready

    def pump(self, free: int) -> bool:
        if self._left or self._links.accepted is not False:
            return super().pump(free)  # the offer, or a header
        if self.connections is None:
            self.connections = self._connect()
        self.connections.allow(free)
        before, self._index = self._index, self.connections.complete
        return self._index > before

    def send(self) -> int:
        return self._sock.send(self._message[-self._left :])

    def frame(self, piece: RingPiece) -> int:
        position = self._links.ring.position
        self._message = pack(self._task.header(piece, position, self._task.size(piece)))
        return len(self._message)

    def _connect(self) -> Connections:
        task, links, space = self._task, self._links, self._space
        sockets = (self._sock, *links.further_next)
        header = partial(task.header_of_part, self._pieces, links.ring.position, len(sockets))
        memory = [slot.numpy().data for slot in space.outgoing]
        movers = [PartSender(sock, partial(header, n), memory) for n, sock in enumerate(sockets)]
        return Connections(movers, list(map(task.size, self._pieces)), space.senders, space.wake)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A received piece to pass on: its bytes, valid once ``event`` is done, and their slot if they have
    one."""

    data: torch.Tensor
    event: CudaEvent
    slot: int | None


class Incoming(PieceReceiver):
    """Pieces from the previous member: verified, brought to the device, accumulated there."""

    def __init__(
        self, task: ReductionTask, links: DeviceLinks, space: DeviceWorkspace, pieces: Sequence[RingPiece]
    ) -> None:
        assert links.previous is not None
        super().__init__(pieces)
        self._sock = links.previous
        self._task, self._links, self._space = task, links, space
        self._source = (links.ring.position - 1) % links.ring.world
        self._uses: deque[CudaEvent] = deque()
        self._head = bytearray(OFFER_HEAD_BYTES if links.expects_offer else HEADER_BYTES)
        self._offer: bytearray | None = None
        self._chunk: ChunkHeader | None = None  # in shared memory
        self._filled = 0
        self.connections: Connections | None = None
        self.arrived: dict[int, Arrival] = {}

    @property
    def done(self) -> bool:
        return super().done and not self._uses

    @property
    def receiving(self) -> bool:
        """Whether bytes of the previous member are missing."""
        if self.completed == len(self._pieces):
            return False
        if self.connections is not None:
            return self.connections.complete == self.completed
        return self._chunk is None or self._has_room()

    @property
    def copying(self) -> bool:
        return bool(self._uses)

    def settle(self) -> bool:
        """Free the slots of finished copies; return whether there were any. Raises RoundAborted."""
        count = 0
        while self._uses and self._uses[0].done():
            self._uses.popleft()
            count += 1
        if count and self._links.inbox is not None:
            self._links.send_back(to_previous(CREDIT, count))
        return count > 0

    def pump(self) -> tuple[bool, bool]:
        """Receive once; return whether bytes came, and whether they count as progress.

        Raises OSError or EOFError on a lost link, ProtocolError for bytes that cannot be used.
        """
        if self.completed == len(self._pieces):
            return False, False
        if self._links.inbox is None and not self._links.expects_offer:
            return self._take_bytes()
        if self._chunk is not None:
            return self._take_shared(self._chunk)
        target = memoryview(self._head if self._offer is None else self._offer)
        try:
            count = self._sock.recv_into(target[self._filled :])
        except BlockingIOError:
            return False, False
        if not count:
            raise EOFError
        self._filled += count
        if self._filled < len(target):
            return True, False
        self._filled = 0
        if self._links.expects_offer:
            self._read_offer()
        else:
            piece = self._pieces[self.completed]
            chunk, _ = unpack(self._head)
            check_expected(chunk, self._task.header(piece, self._source, self._task.size(piece)))
            self._chunk = chunk
        return True, False

    def _read_offer(self) -> None:
        if self._offer is None:
            self._offer = bytearray(offer_size(self._head))
            if self._offer:
                return
        self._links.take_offer(self._offer, self._space.device)
        self._offer, self._head = None, bytearray(HEADER_BYTES)

    def _has_room(self) -> bool:
        piece, space = self._pieces[self.completed], self._space
        # A chunk that this member reads from shared memory needs no slot of this member.
        return (piece.gather or bool(space.free)) and len(self._uses) < space.slots

    def _take_shared(self, chunk: ChunkHeader) -> tuple[bool, bool]:
        if not self._has_room():
            return False, False
        assert self._links.inbox is not None
        begin = self.completed % self._space.slots * self._space.chunk_bytes
        self._chunk = None
        self._use(self._links.inbox[begin : begin + chunk.size])
        return True, True

    def _take_bytes(self) -> tuple[bool, bool]:
        space = self._space
        if self.connections is None:
            self.connections = self._connect()
        self.connections.allow(self.completed - len(self._uses) + space.slots)
        took = self.completed < self.connections.complete and self._has_room()
        if took:
            size = self._task.size(self._pieces[self.completed])
            self._use(space.incoming[self.completed % space.slots][:size])
        return took, took

    def _connect(self) -> Connections:
        task, links, space = self._task, self._links, self._space
        sockets = (self._sock, *links.further_previous)
        header = partial(task.header_of_part, self._pieces, self._source, len(sockets))
        memory = [slot.numpy().data for slot in space.incoming]
        movers = [PartReceiver(sock, partial(header, n), memory) for n, sock in enumerate(sockets)]
        return Connections(movers, list(map(task.size, self._pieces)), space.receivers, space.wake)

    def _use(self, data: torch.Tensor) -> None:
        """Enqueue the work on ``data``, the next piece, which must not change until the event."""
        task, up, piece = self._task, self._space.up, self._pieces[self.completed]
        landed = task.result[piece.start : piece.stop].view(torch.uint8)
        slot = None
        if piece.gather:
            up.run(lambda: landed.copy_(data, non_blocking=True))
        else:
            slot, landed = self._accumulate(piece, data, landed)
        event = up.record()
        self._uses.append(event)
        self._space.device.when(event, self._space.wake)
        if not (piece.gather and piece.last):
            self.arrived[piece.sequence] = Arrival(landed, event, slot)
        self.everybody = self.everybody or piece.everybody
        self.completed += 1

    def _accumulate(
        self, piece: RingPiece, data: torch.Tensor, landed: torch.Tensor
    ) -> tuple[int | None, torch.Tensor]:
        task, space = self._task, self._space
        slot, behind = space.free.popleft()
        if behind is not None:
            space.up.wait(behind)
        received = space.scratch[: data.numel()]
        total = space.partial[slot][: (piece.stop - piece.start) * task.wide.itemsize]
        typed, sums = received.view(task.dtype(piece)), total.view(task.wide)

        def work() -> None:
            received.copy_(data, non_blocking=True)
            task.accumulate(piece, typed, sums)

        space.up.run(work)
        if piece.last:
            # The next use of the slot is enqueued on this stream too, so the device runs it after this use.
            space.free.append((slot, None))
            return None, landed
        return slot, total


# Every chunk costs the host a fraction of a millisecond: between two processes on one H100, chunks of 4 MiB
# gave 6 GB/s and chunks of 16 MiB 20 GB/s.
CHUNK_BYTES = 16 * 1024 * 1024
SLOTS = 4
# Pieces of a segment that travel together. Memory for partial sums holds two groups of pieces.
GROUP = 4
_CHUNK_UNIT_BYTES = ALIGNMENT * 8


class DeviceExchange(RingExchange[DeviceLinks]):
    """One reduction of ``task`` over ``links``.

    Threads move headers and bytes while the streams move the data:

        device memory --down--> slot --TCP, or shared memory--> slot --up--> accumulate on the device

    Events order the streams. The host reads an event only to know when a slot may be sent or used again. It
    sleeps in one ``poll`` on the sockets, the abort and a descriptor that events wake. The number of slots
    per direction bounds the chunks under way. Only the two side streams wait for the compute stream.

    An abort ends the exchange at once. Work that is already enqueued still runs, and writes to memory that no
    exchange reads. The next exchange waits for that work before it uses a slot again.
    """

    _out: Outgoing
    _in: Incoming

    def __init__(
        self, task: ReductionTask, links: DeviceLinks, space: DeviceWorkspace, pieces: Schedule, step: int
    ) -> None:
        self._space = space
        links.credits = 0
        sender = Outgoing(task, links, space, pieces.sends)
        receiver = Incoming(task, links, space, pieces.receives)
        super().__init__(links, sender, receiver, f"step {step}", task.on_piece)
        self._poll.register(space.wakeup_fd, select.POLLIN)
        for sock in links.further_next:
            self._poll.register(sock, select.POLLIN)  # only the end of such a link comes back

    def run(self, bounds: Bounds, waiting: Waiting) -> None:
        """Reduce. Raises RoundAborted; ``waiting`` is kept up to date throughout."""
        for event in self._space.unfinished:
            self._space.device.when(event, self._space.wake)
        try:
            super().run(bounds, waiting)
        finally:
            for connections in self._connected():
                connections.close()
        self._links.check()

    def _connected(self) -> list[Connections]:
        return [x for x in (self._in.connections, self._out.connections) if x is not None]

    def moved_s(self) -> float:
        return max((x.moved_s() for x in self._connected()), default=0.0)

    def move(self) -> tuple[bool, bool]:
        space = self._space
        space.unfinished = [event for event in space.unfinished if not event.done()]
        if space.unfinished:
            return False, False  # an aborted exchange still reads and writes the slots
        settled = self._in.settle()
        moved, counted = self._receive()
        self._out.stage(self._in.arrived)
        sent = self._send(self._out.ready())
        return moved or sent or settled, counted or sent or settled

    def awaited(self) -> str:
        ring = self._links.ring
        if self._in.copying or self._out.copying or self._space.unfinished:
            return ""
        return ring.previous if self._in.receiving else ring.next

    def hears_previous(self) -> bool:
        return self._in.connections is None and self._in.receiving and not self._space.unfinished

    def sleep(self, timeout_s: float) -> dict[int, int]:
        ready = super().sleep(timeout_s)
        if self._space.wakeup_fd in ready:
            os.eventfd_read(self._space.wakeup_fd)
        for sock in self._links.further_next:
            if sock.fileno() in ready:
                self._links.hear_back()  # the reason of an abort may have come before the end
                if received(sock, peer := self._links.ring.next):
                    raise RoundAborted(f"{peer} answered on a connection that only takes pieces", peer)
        return ready


class DeviceRing(EpochPlane[DeviceLinks]):
    """DataPlane for one device: see ``plane``.

    ``chunk_bytes``, ``slots`` and ``group`` must be equal on all members. A link has at most chunk_bytes *
    slots under way. The plane allocates chunk_bytes * (3 * slots + 2 * group + 1); 2 * slots of these chunks
    lie in host memory. ``shares``: let neighbours on one host read each other's device memory if they can;
    otherwise chunks go over TCP, on so many ``connections`` to the next member. ``exchange_s`` and
    ``on_piece`` are as in ``CpuRing``.
    """

    def __init__(
        self,
        device: CudaDevice,
        chunk_bytes: int = CHUNK_BYTES,
        slots: int = SLOTS,
        group: int = GROUP,
        exchange_s: float = 30.0,
        shares: bool = True,
        on_piece: Callable[[int], None] = lambda _step: None,
        connections: int = 1,
    ) -> None:
        if chunk_bytes < _CHUNK_UNIT_BYTES or chunk_bytes > 2**30 or slots < 2 or group < 1:
            raise ConfigError(
                f"chunks of {chunk_bytes} bytes in {slots} slots, {group} at a time, are not possible: "
                f"choose between {_CHUNK_UNIT_BYTES} bytes and 1 GiB, at least two slots, and a group"
            )
        super().__init__(Bounds(7200.0, exchange_s), device.owns, partial(DeviceLinks, shares=shares))
        self._device = device
        self.shares_memory = shares
        self._on_piece = on_piece
        self.connections = connections
        self._space = DeviceWorkspace(
            device, chunk_bytes // _CHUNK_UNIT_BYTES * _CHUNK_UNIT_BYTES, slots, group
        )

    def sibling(self) -> "DeviceRing":
        """Return a ring with epochs of its own that uses this ring's memory.

        Only one of them may reduce at a time, and the close of one closes the memory of both.
        """
        ring = copy.copy(self)
        EpochPlane.__init__(ring, self._bounds, self._owns, self._make_links)
        return ring

    kind = "device"

    def allocate(self, nbytes: int) -> torch.Tensor:
        return self._device.memory(nbytes)

    def register(self, descriptor: int, memory: torch.Tensor) -> None:
        """Register host ``memory`` as a target of copies of results; neighbours do not see it."""
        self._space.register(memory)

    def unregister(self, memory: torch.Tensor) -> None:
        """Unregister ``memory``; no copy into it may be under way."""
        self._space.unregister(memory)

    def close(self) -> None:
        """Abort and close everything; idempotent. The device stays open: its maker closes it."""
        super().close()
        self._space.close()

    def _reduce(
        self,
        links: DeviceLinks,
        spec: ExchangeSpec,
        source: torch.Tensor,
        result: torch.Tensor,
        how: Reduction,
    ) -> None:
        """Reduce after the earlier work of the calling thread's stream and before its later work, also when
        RoundAborted is raised. The calling thread blocks; its stream does not."""

        def header(piece: RingPiece, member: int, size: int) -> ChunkHeader:
            kind = DEVICE_GATHER if piece.gather else DEVICE_REDUCE
            return ChunkHeader(spec, kind, member, piece.sequence, size)

        with self._abandoned():
            space, compute, ring = self._space, self._device.compute(), links.ring
            task = ReductionTask(source, result, how, header, partial(self._on_piece, spec.step))
            if ring.world == 1:
                compute.run(lambda: task.finish(task.source.to(task.wide, copy=True), task.result))
            elif source.numel():
                space.begin(compute.record())
                elements = space.chunk_bytes // task.wide.itemsize
                pieces = schedule(source.numel(), ring.world, ring.position, elements, space.group)
                DeviceExchange(task, links, space, pieces, spec.step).run(self._bounds, self._waiting)
                compute.wait(space.up.record())

    @contextmanager
    def _abandoned(self) -> Iterator[None]:
        """When an exchange fails, make the caller's stream wait for the work of the side streams."""
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # torch records no event on a lost device
                self._device.compute().wait(self._space.abandon())
            raise
