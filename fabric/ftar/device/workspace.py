"""The resources of an exchange on a device: side streams, chunk-sized slots, the arithmetic of a piece."""

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fabric.ftar.chunk_headers import ChunkHeader
from fabric.ftar.device.device_api import Device, DeviceEvent
from fabric.ftar.device.piece_order import DevicePiece

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class DeviceWorkspace:
    """The two side streams of a plane and its slots of one chunk, all allocated once.

    ``slots`` bounds the chunks under way in each direction, ``group`` those of a segment that go together.
    """

    def __init__(self, device: Device, chunk_bytes: int, slots: int, group: int) -> None:
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
        self.free: deque[tuple[int, DeviceEvent | None]] = deque()
        self.unfinished: list[DeviceEvent] = []
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

    def begin(self, behind: DeviceEvent) -> None:
        """Begin an exchange: both streams wait for ``behind``, and every slot is free."""
        for stream in (self.down, self.up):
            stream.wait(behind)
        self.free = deque((slot, None) for slot in range(len(self.partial)))

    def abandon(self) -> DeviceEvent:
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
        """Close the descriptor that wakes the exchange."""
        with self._lock:
            if self.wakeup_fd >= 0:
                os.close(self.wakeup_fd)
            self.wakeup_fd = -1


@dataclass(frozen=True, slots=True)
class ReductionTask:
    """One reduction: flat ``source`` into flat ``result`` (maybe the same), and the operation.

    ``weight`` divides a mean. ``header(piece, source, size)`` is the header of a piece that member ``source``
    sends.
    """

    source: torch.Tensor
    result: torch.Tensor
    operation: str
    weight: float
    header: Callable[[DevicePiece, int, int], ChunkHeader]
    checksum: bool
    on_piece: Callable[[], None]

    @property
    def wide(self) -> torch.dtype:
        """Type of a partial sum of several members: 16-bit floats are added in float32 and rounded once."""
        dtype = self.source.dtype
        return torch.float32 if dtype in _SIXTEEN_BITS and self.operation in ("sum", "mean") else dtype

    def dtype(self, piece: DevicePiece) -> torch.dtype:
        """Type of ``piece`` on the wire."""
        return self.source.dtype if piece.gather or piece.hop == 0 else self.wide

    def size(self, piece: DevicePiece) -> int:
        """Return bytes of ``piece`` on the wire."""
        return (piece.stop - piece.start) * self.dtype(piece).itemsize

    def accumulate(self, piece: DevicePiece, received: torch.Tensor, total: torch.Tensor) -> None:
        """``total = received (+) own``, finished into the result where ``piece`` is the last of its sum."""
        total.copy_(received)
        own = self.source[piece.start : piece.stop]
        kernel = {"min": torch.minimum, "max": torch.maximum}.get(self.operation, torch.add)
        kernel(total, own, out=total)
        if piece.last:
            self.finish(total, self.result[piece.start : piece.stop])

    def finish(self, total: torch.Tensor, into: torch.Tensor) -> None:
        """Write ``total``, divided for a mean, into elements of the result; ``total`` is used up."""
        if self.operation == "mean":
            # Divide by a tensor: on a GPU torch would multiply by the reciprocal of a number.
            total.div_(torch.full((), self.weight, dtype=total.dtype, device=total.device))
        into.copy_(total)


def _cut(memory: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [memory[begin : begin + size] for begin in range(0, memory.numel(), size)]
