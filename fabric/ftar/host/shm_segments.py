"""Memory that neighbours on one host read from each other: own segments shown, other members' mapped.

A member creates its segments itself (memfd, sealed against shrinking, so that a reader cannot be killed by a
truncated file), is the only one that writes them, and passes a descriptor to the next member over their
authenticated unix socket. A reader maps read-only. So a member that was stopped and wakes in a later epoch
can scribble over nobody's memory, and memory outlives its owner for as long as somebody has it mapped.
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
from fabric.runtime.host_memory import available_bytes

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_FAULT_BYTES = 64 * 1024 * 1024

_PLACE = struct.Struct("<IIQQ")


class SegmentRef(NamedTuple):
    """Where something lies: ``offset`` bytes into segment ``number`` of the member at position ``owner``.

    ``wide`` is 1 for a partial result in float32 of smaller elements. Where a segment is announced its size
    stands in the place of the offset.
    """

    owner: int
    wide: int
    number: int
    offset: int

    def pack(self) -> bytes:
        """Its bytes on the wire."""
        return _PLACE.pack(*self)


SEGMENT_REF_BYTES = _PLACE.size


def unpack_segment_refs(data: bytes) -> list[SegmentRef]:
    """The places in ``data``, a multiple of PLACE_BYTES long."""
    return [SegmentRef(*fields) for fields in _PLACE.iter_unpack(data)]


@dataclass(frozen=True, slots=True, eq=False)
class SharedSegment:
    """One own segment; ``memory`` is all of it as bytes, and keeps its address from being used again."""

    number: int
    descriptor: int
    memory: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


class OwnSegments:
    """What this member may show; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: list[SharedSegment] = []
        self._count = 0

    def allocate(self, nbytes: int) -> SharedSegment:
        """A new segment of at least ``nbytes`` zeros, every page of it present.

        Raises ConfigError where the host has not that much shared memory.
        """
        capacity = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        # Asked first: the kernel would hand out pages until the machine has none left.
        if capacity > available_bytes():
            raise _none_left(capacity)
        descriptor = os.memfd_create("fabric-bucket", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, capacity)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            memory = _map(descriptor, capacity, mmap.PROT_READ | mmap.PROT_WRITE, _MADV_POPULATE_WRITE)
        except OSError as error:
            os.close(descriptor)
            raise _none_left(capacity) from error
        return self._add(descriptor, memory)

    def register(self, descriptor: int, memory: torch.Tensor) -> None:
        """Memory that somebody else allocated: ``memory`` (bytes) is the mapped start of ``descriptor``,
        which is duplicated. The file must be sealed against shrinking."""
        self._add(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0), memory)

    def find(self, part: torch.Tensor) -> tuple[SharedSegment, int] | None:
        """Where ``part`` lies, as segment and offset in bytes; None if not in shown memory."""
        address, nbytes = part.data_ptr(), part.numel() * part.element_size()
        with self._lock:
            known = tuple(self._shown)
        for shown in known:
            offset = address - shown.memory.data_ptr()
            if offset >= 0 and offset + nbytes <= shown.nbytes:
                return shown, offset
        return None

    def unregister(self, memory: torch.Tensor) -> None:
        """Show the segments that lie in ``memory`` no more; who has mapped them keeps them."""
        with self._lock:
            for shown in [s for s in self._shown if s.memory.data_ptr() == memory.data_ptr()]:
                self._shown.remove(shown)
                os.close(shown.descriptor)

    def duplicate(self, shown: SharedSegment) -> int:
        """A descriptor to pass on, which the caller closes. Raises StateError if it was forgotten."""
        with self._lock:
            if shown not in self._shown:
                raise StateError("a buffer was given back while it was being reduced")
            return fcntl.fcntl(shown.descriptor, fcntl.F_DUPFD_CLOEXEC, 0)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            while self._shown:
                os.close(self._shown.pop().descriptor)

    def _add(self, descriptor: int, memory: torch.Tensor) -> SharedSegment:
        with self._lock:
            self._count += 1
            shown = SharedSegment(self._count, descriptor, memory)
            self._shown.append(shown)
            return shown


class PeerSegments:
    """Mapped segments of other members, kept over epochs: to map a large one again costs page faults.

    What was used neither in the epoch before nor since is unmapped when an epoch is retired.
    """

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int, int], tuple[torch.Tensor, int]] = {}
        self._kept_from = 0

    def map(self, descriptor: int, capacity: int, epoch: int) -> torch.Tensor:
        """The first ``capacity`` bytes behind ``descriptor``, to be read only; the descriptor is closed.

        Raises ProtocolError for what is no segment of that size, or cannot be mapped.
        """
        try:
            found = os.fstat(descriptor)
            key = (found.st_dev, found.st_ino, capacity)
            memory = self._mapped[key][0] if key in self._mapped else None
            if memory is None:
                seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
                if found.st_size < capacity or not capacity or not seals & fcntl.F_SEAL_SHRINK:
                    raise ProtocolError("shared memory came that may end while it is read")
                memory = _map(descriptor, capacity, mmap.PROT_READ, _MADV_POPULATE_READ)
        except OSError as error:
            raise ProtocolError(f"shared memory of {capacity} bytes cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self._mapped[key] = (memory, epoch)
        return memory

    def retire(self, before_epoch: int) -> None:
        """``before_epoch`` is in force: let go of what only older ones used."""
        unused = [k for k, (_, epoch) in self._mapped.items() if epoch < self._kept_from]
        memories = [self._mapped.pop(key)[0] for key in unused]
        if memories:
            # To unmap gigabytes takes a tenth of a second, which the next epoch's links need not wait for.
            threading.Thread(target=memories.clear, name="fabric-unmap", daemon=True).start()
        self._kept_from = max(self._kept_from, before_epoch)

    def close(self) -> None:
        """Let go of everything."""
        self._mapped.clear()


def _none_left(capacity: int) -> ConfigError:
    return ConfigError(
        f"{capacity} bytes of shared memory for the exchange are not to be had: give the host more memory, "
        "run fewer replicas on it, or set FABRIC_DATA_PLANE=tcp"
    )


def _map(descriptor: int, capacity: int, protection: int, populate: int) -> torch.Tensor:
    mapped = mmap.mmap(descriptor, capacity, mmap.MAP_SHARED, protection)
    for begin in range(0, capacity, _FAULT_BYTES):
        # In pieces, because the interpreter lock is held during each. Kernels before 5.14 cannot do it, and
        # fault the pages in one by one.
        with suppress(OSError):
            mapped.madvise(populate, begin, min(_FAULT_BYTES, capacity - begin))
    if protection & mmap.PROT_WRITE:
        return torch.frombuffer(mapped, dtype=torch.uint8)
    # By way of its address: torch has no read-only tensors, and warns when it is given such a buffer.
    array = (ctypes.c_uint8 * capacity).from_address(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
    array.mapped = mapped  # type: ignore[attr-defined]  # the tensor keeps the array, and so the mapping
    return torch.frombuffer(array, dtype=torch.uint8)
