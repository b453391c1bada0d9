"""Memory that neighbours on one host share: this member's segments, and mapped segments of other members.

A member creates its segments as memfds sealed against shrinking, so that a truncated file cannot kill a
reader. Only their owner writes them. It passes a descriptor to the next member over their authenticated unix
socket, and a reader maps it read-only. So a member that was stopped and wakes in a later epoch cannot write
to other members' memory. A segment's memory exists until its owner and all readers have unmapped it.
"""

import ctypes
import fcntl
import mmap
import os
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from fabric.errors import ConfigError, ProtocolError, StateError
from fabric.runtime.system_calls import available_bytes, create_memfd

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_FAULT_BYTES = 64 * 1024 * 1024

_PLACE = struct.Struct("<IIQQ")


class SegmentRef(NamedTuple):
    """A reference into a shared segment."""

    owner: int  # position of the member that owns the segment
    wide: int  # 1 for a partial result in float32 of smaller elements
    number: int  # number of the segment
    offset: int  # offset in bytes; in a segment's announcement the segment's size

    def pack(self) -> bytes:
        return _PLACE.pack(*self)


SEGMENT_REF_BYTES = _PLACE.size


def unpack_segment_refs(data: bytes) -> list[SegmentRef]:
    """Return the references in ``data``, a multiple of SEGMENT_REF_BYTES long."""
    return [SegmentRef(*fields) for fields in _PLACE.iter_unpack(data)]


@dataclass(frozen=True, slots=True, eq=False)
class SharedSegment:
    """A segment of this member. ``memory`` is the whole segment as bytes, and reserves its address."""

    number: int
    descriptor: int
    memory: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


class OwnSegments:
    """The segments that this member shares; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: list[SharedSegment] = []
        self._count = 0

    def allocate(self, nbytes: int) -> SharedSegment:
        """Return a new segment of at least ``nbytes`` zeros, every page of it present.

        Raises ConfigError where the host has not that much shared memory.
        """
        capacity = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        # Check first: the kernel would allocate pages until the machine has no memory left.
        if capacity > available_bytes():
            raise _none_left(capacity)
        descriptor = create_memfd("fabric-bucket")
        try:
            os.posix_fallocate(descriptor, 0, capacity)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            memory = _map(descriptor, capacity, mmap.PROT_READ | mmap.PROT_WRITE, _MADV_POPULATE_WRITE)
        except OSError as error:
            os.close(descriptor)
            raise _none_left(capacity) from error
        return self._add(descriptor, memory)

    def register(self, descriptor: int, memory: torch.Tensor) -> None:
        """Share ``memory`` (bytes), the mapped start of ``descriptor``, whose file is sealed against
        shrinking.

        The descriptor is duplicated.
        """
        self._add(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0), memory)

    def find(self, part: torch.Tensor) -> tuple[SharedSegment, int] | None:
        """Return the segment of ``part`` and its offset in bytes; None for memory that is not shared."""
        address, nbytes = part.data_ptr(), part.numel() * part.element_size()
        with self._lock:
            segments = tuple(self._segments)
        for segment in segments:
            offset = address - segment.memory.data_ptr()
            if offset >= 0 and offset + nbytes <= segment.nbytes:
                return segment, offset
        return None

    def unregister(self, memory: torch.Tensor) -> None:
        """Stop sharing the segments at ``memory``; readers keep their mappings."""
        with self._lock:
            for segment in [s for s in self._segments if s.memory.data_ptr() == memory.data_ptr()]:
                self._segments.remove(segment)
                os.close(segment.descriptor)

    def duplicate(self, segment: SharedSegment) -> int:
        """Return a descriptor to pass on, for the caller to close. Raises StateError if unregistered."""
        with self._lock:
            if segment not in self._segments:
                raise StateError("a buffer was given back while it was being reduced")
            return fcntl.fcntl(segment.descriptor, fcntl.F_DUPFD_CLOEXEC, 0)

    def close(self) -> None:
        with self._lock:
            while self._segments:
                os.close(self._segments.pop().descriptor)

    def _add(self, descriptor: int, memory: torch.Tensor) -> SharedSegment:
        with self._lock:
            self._count += 1
            segment = SharedSegment(self._count, descriptor, memory)
            self._segments.append(segment)
            return segment


class PeerSegments:
    """Mapped segments of other members, kept over epochs, because mapping a large segment costs page faults.

    ``retire`` unmaps segments that only epochs before the previous call's ``before_epoch`` used.
    """

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int, int], tuple[torch.Tensor, int]] = {}
        self._kept_from = 0
        self._lock = threading.Lock()  # links come up in one thread while another begins an epoch

    def map(self, descriptor: int, capacity: int, epoch: int) -> torch.Tensor:
        """Map the first ``capacity`` bytes of ``descriptor`` read-only, and close it.

        Raises ProtocolError where it is not a segment of that size, or cannot be mapped.
        """
        try:
            status = os.fstat(descriptor)
            key = (status.st_dev, status.st_ino, capacity)
            memory = self._mapped.get(key, (None, 0))[0]
            if memory is None:
                seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
                if status.st_size < capacity or not capacity or not seals & fcntl.F_SEAL_SHRINK:
                    raise ProtocolError("shared memory came that may end while it is read")
                memory = _map(descriptor, capacity, mmap.PROT_READ, _MADV_POPULATE_READ)
        except OSError as error:
            raise ProtocolError(f"shared memory of {capacity} bytes cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        with self._lock:
            self._mapped[key] = (memory, epoch)
        return memory

    def retire(self, before_epoch: int) -> None:
        """Retire epochs older than ``before_epoch``, and release unused segments: see the class."""
        with self._lock:
            unused = [k for k, (_, epoch) in self._mapped.items() if epoch < self._kept_from]
            memories = [self._mapped.pop(key)[0] for key in unused]
        if memories:
            # Unmapping gigabytes takes a tenth of a second; the next epoch's links do not wait for it.
            threading.Thread(target=memories.clear, name="fabric-unmap", daemon=True).start()
        self._kept_from = max(self._kept_from, before_epoch)

    def close(self) -> None:
        self._mapped.clear()


def _none_left(capacity: int) -> ConfigError:
    return ConfigError(
        f"the host has no {capacity} bytes of shared memory left for the exchange: give it more memory, "
        "run fewer replicas on it, or set FABRIC_DATA_PLANE=tcp"
    )


def _map(descriptor: int, capacity: int, protection: int, populate: int) -> torch.Tensor:
    mapped = mmap.mmap(descriptor, capacity, mmap.MAP_SHARED, protection)
    for begin in range(0, capacity, _FAULT_BYTES):
        # Populate pages in pieces, because each call holds the interpreter lock. Kernels before 5.14 cannot
        # populate pages, and fault the pages in one by one.
        with suppress(OSError):
            mapped.madvise(populate, begin, min(_FAULT_BYTES, capacity - begin))
    if protection & mmap.PROT_WRITE:
        return torch.frombuffer(mapped, dtype=torch.uint8)
    # Wrap the address: torch has no read-only tensors, and warns about a read-only buffer.
    array = (ctypes.c_uint8 * capacity).from_address(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
    array.mapped = mapped  # type: ignore[attr-defined]  # the tensor keeps the array, and so the mapping
    return torch.frombuffer(array, dtype=torch.uint8)
