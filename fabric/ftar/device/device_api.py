"""The interface to a device: its streams, events and memory, and no more than a data plane asks for.

``CudaDevice`` is a GPU. The tests have a simulated device whose streams run as late as events allow, so that
work without an event between fails there as on a busy GPU.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class SharedMemoryHandle:
    """How another process on this host opens device memory: numbers, bytes and checked names only.

    ``memory`` and the fields after it have a meaning for the device alone.
    """

    host: str  # boot id of the machine
    device: str  # name of the device that holds the memory
    nbytes: int  # size of the memory
    memory: bytes
    storage_bytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_wanted: bool


class DeviceEvent(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether the device is past this point; never blocks. Raises RuntimeError on a failed device."""

    def wait(self) -> None:
        """Block this thread until the device is past this point. Raises RuntimeError on a failed device."""


class DeviceStream(Protocol):
    """A queue of work that the device runs in order, at its own time."""

    def run(self, work: Callable[[], object]) -> None:
        """Enqueue the torch operations that ``work`` calls: copies and arithmetic into tensors that exist.

        ``work`` must not allocate device memory that outlives it, nor look at values.
        """

    def wait(self, event: DeviceEvent) -> None:
        """Run all work enqueued later after ``event``; the host does not wait."""

    def record(self) -> DeviceEvent:
        """Return the event that completes with all work enqueued so far."""


class Device(Protocol):
    """One device. Thread-safe; a stream is used by one thread at a time."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is in this device's memory."""

    def stream(self) -> DeviceStream:
        """Return a new side stream."""

    def compute(self) -> DeviceStream:
        """Return the stream that the calling thread's own torch operations are on."""

    def on(self, stream: DeviceStream) -> AbstractContextManager[None]:
        """Within it, the calling thread's own torch operations are on ``stream``."""

    def when(self, event: DeviceEvent, callback: Callable[[], None]) -> None:
        """Call ``callback`` from some thread once ``event`` is done, or failed."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of device memory, uint8."""

    def staging(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of host memory, uint8, that copies to and from the device do not block on."""

    def keep_registered(self, memory: Sequence[torch.Tensor]) -> None:
        """Register exactly these host tensors for copies that do not block; unregister all others.

        A registered tensor stays alive and mapped. No copy with an unregistered one may be under way. Memory
        that cannot be registered still works, more slowly.
        """

    def share(self, nbytes: int) -> tuple[torch.Tensor, SharedMemoryHandle] | None:
        """Device memory that other processes can open, None where that is not possible."""

    def open(self, handle: SharedMemoryHandle) -> torch.Tensor | None:
        """Memory that another process shares, None where it cannot be reached from here.

        Read it and never write it. It is closed when the tensor is gone.
        """

    def close(self) -> None:
        """End the device's threads and registrations; its work must be over."""
