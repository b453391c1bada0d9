"""The interface to a device, as far as a data plane needs it: streams, events and memory.

``CudaDevice`` is a GPU. The tests have a simulated device whose streams run as late as events allow. So a
missing event between two streams fails there as it does on a busy GPU.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class SharedMemoryHandle:
    """How another process on this host opens device memory: numbers, bytes and checked names only.

    Only the device interprets ``memory`` and the fields after it.
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
    """A queue of work that the device runs in order, while the host goes on."""

    def run(self, work: Callable[[], object]) -> None:
        """Enqueue the torch operations that ``work`` calls: copies and arithmetic into tensors that exist.

        ``work`` must not allocate device memory that outlives it, nor read values of tensors.
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
        """Return the stream on which the calling thread's torch operations run."""

    def on(self, stream: DeviceStream) -> AbstractContextManager[None]:
        """Run the calling thread's torch operations on ``stream`` within this context."""

    def when(self, event: DeviceEvent, callback: Callable[[], None]) -> None:
        """Call ``callback`` from some thread once ``event`` is done, or failed."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of device memory, uint8."""

    def staging(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of host memory, uint8, with which device copies do not block the host."""

    def keep_registered(self, memory: Sequence[torch.Tensor]) -> None:
        """Register exactly these host tensors for copies that do not block; unregister all others.

        A registered tensor stays alive and mapped. No copy may be under way with a tensor that this call
        unregisters. Memory that cannot be registered still works, but copies are slower.
        """

    def share(self, nbytes: int) -> tuple[torch.Tensor, SharedMemoryHandle] | None:
        """Return device memory that other processes can open, None where that is not possible."""

    def open(self, handle: SharedMemoryHandle) -> torch.Tensor | None:
        """Return memory that another process shares, None where this process cannot open it.

        The caller must not write it. It is closed when the tensor is deleted.
        """

    def close(self) -> None:
        """End the device's threads and registrations. Its enqueued work must have run."""
