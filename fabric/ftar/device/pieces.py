"""The pieces that this member sends and receives: their slots, copies, events and bytes."""

from collections import deque
from dataclasses import dataclass

import torch

from fabric.errors import ProtocolError
from fabric.ftar.chunk_headers import (
    CREDIT,
    HEADER_BYTES,
    ChunkHeader,
    check_expected,
    digest,
    pack,
    to_previous,
    unpack,
)
from fabric.ftar.device.device_api import DeviceEvent
from fabric.ftar.device.device_links import DeviceLinks
from fabric.ftar.device.memory_offers import OFFER_HEAD_BYTES, offer_size
from fabric.ftar.device.piece_order import DevicePiece
from fabric.ftar.device.workspace import DeviceWorkspace, ReductionTask


class Outgoing:
    """Pieces to the next member: the device copies each into a slot, then it is announced or sent."""

    def __init__(
        self, task: ReductionTask, links: DeviceLinks, space: DeviceWorkspace, pieces: list[DevicePiece]
    ) -> None:
        assert links.next is not None
        self._sock = links.next
        self._task, self._links, self._space, self._pieces = task, links, space, pieces
        self._copies: deque[DeviceEvent] = deque()
        self._begun = self._ready = self._sent = 0
        self._under_way: list[memoryview] = []
        self._ends_piece = False
        if links.offers:
            offer = links.make_offer(space.device, space.chunk_bytes * space.slots)
            self._under_way = [memoryview(offer)]

    @property
    def _freed(self) -> int:
        return self._links.credits if self._links.accepted else self._sent

    @property
    def done(self) -> bool:
        return self._freed == len(self._pieces) and not self._under_way

    @property
    def blocked(self) -> bool:
        """Whether only the socket holds the bytes up (after ``pump`` moved nothing)."""
        return bool(self._under_way)

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

    def _copy(self, source: torch.Tensor) -> DeviceEvent:
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

    def pump(self) -> bool:
        """Send once from the pieces that are ready; return whether a byte was sent. Raises OSError."""
        while self._copies and self._copies[0].done():
            self._copies.popleft()
            self._ready += 1
        if not self._under_way:
            if self._sent >= self._ready:
                return False
            self._under_way = self._frame(self._pieces[self._sent])
            self._ends_piece = True
        try:
            count = self._sock.sendmsg(self._under_way)
        except BlockingIOError:
            return False
        while self._under_way and count >= len(self._under_way[0]):
            count -= len(self._under_way.pop(0))
        if self._under_way:
            self._under_way[0] = self._under_way[0][count:]
        elif self._ends_piece:
            self._sent += 1
        return True

    def _frame(self, piece: DevicePiece) -> list[memoryview]:
        size = self._task.size(piece)
        header = self._task.header(piece, self._links.ring.position, size)
        if self._links.accepted:
            return [memoryview(pack(header))]
        payload = self._space.outgoing[self._sent % self._space.slots].numpy().data[:size]
        payload_digest = digest(payload) if self._task.checksum else None
        return [memoryview(pack(header, payload_digest)), payload]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A received piece to pass on: its bytes, valid once ``event`` is done, and their slot if they have
    one."""

    data: torch.Tensor
    event: DeviceEvent
    slot: int | None


class Incoming:
    """Pieces from the previous member: verified, brought to the device, accumulated there."""

    def __init__(
        self, task: ReductionTask, links: DeviceLinks, space: DeviceWorkspace, pieces: list[DevicePiece]
    ) -> None:
        assert links.previous is not None
        self._sock = links.previous
        self._task, self._links, self._space, self._pieces = task, links, space, pieces
        self._source = (links.ring.position - 1) % links.ring.world
        self._uses: deque[DeviceEvent] = deque()
        self._head = bytearray(OFFER_HEAD_BYTES if links.expects_offer else HEADER_BYTES)
        self._offer: bytearray | None = None
        self._chunk: ChunkHeader | None = None
        self._digest: int | None = None  # of the chunk's bytes; None where the sender made none
        self._filled = 0
        self.arrived: dict[int, Arrival] = {}
        self.completed = 0
        self.everybody = False

    @property
    def done(self) -> bool:
        return self.completed == len(self._pieces) and not self._uses

    @property
    def receiving(self) -> bool:
        """Whether this member can receive bytes now."""
        return self.completed < len(self._pieces) and (
            self._chunk is None or self._filled > 0 or self._has_room()
        )

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
        if not self.receiving:
            return False, False
        chunk = self._chunk
        if chunk is not None and self._links.inbox is not None:
            return self._take(chunk)
        target = self._target()
        try:
            count = self._sock.recv_into(target[self._filled :])
        except BlockingIOError:
            return False, False
        if not count:
            raise EOFError
        self._filled += count
        if self._filled < len(target):
            return True, chunk is not None
        self._filled = 0
        if chunk is not None:
            return self._take(chunk)
        if self._links.expects_offer:
            self._read_offer()
        else:
            piece = self._pieces[self.completed]
            chunk, self._digest = unpack(self._head)
            check_expected(chunk, self._task.header(piece, self._source, self._task.size(piece)))
            self._chunk = chunk
        return True, False

    def _target(self) -> memoryview:
        if self._chunk is not None:
            return self._staged().numpy().data
        return memoryview(self._head if self._offer is None else self._offer)

    def _staged(self) -> torch.Tensor:
        assert self._chunk is not None
        return self._space.incoming[self.completed % self._space.slots][: self._chunk.size]

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

    def _take(self, chunk: ChunkHeader) -> tuple[bool, bool]:
        piece = self._pieces[self.completed]
        if self._links.inbox is None:
            data = self._staged()
            if self._digest is not None and self._digest != digest(data.numpy().data):
                raise ProtocolError(
                    f"chunk {chunk.sequence} does not match its digest: bytes were corrupted on the way or "
                    "in memory; if it repeats, check that host's memory and network"
                )
        else:
            begin = self.completed % self._space.slots * self._space.chunk_bytes
            data = self._links.inbox[begin : begin + chunk.size]
        self._chunk = None
        self._use(piece, data)
        self.everybody = self.everybody or piece.everybody
        self.completed += 1
        return True, True

    def _use(self, piece: DevicePiece, data: torch.Tensor) -> None:
        """Enqueue the work on ``data``, which must not change until the event."""
        task, up = self._task, self._space.up
        landed = task.result[piece.start : piece.stop].view(torch.uint8)
        slot = None
        if piece.gather:
            up.run(lambda: landed.copy_(data, non_blocking=True))
        else:
            slot, landed = self._accumulate(piece, data, landed)
        event = up.record()
        self._uses.append(event)
        self._space.device.when(event, self._space.wake)
        if piece.hop < 2 * self._links.ring.world - 3:
            self.arrived[piece.sequence] = Arrival(landed, event, slot)

    def _accumulate(
        self, piece: DevicePiece, data: torch.Tensor, landed: torch.Tensor
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
