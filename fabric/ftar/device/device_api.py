"""The device seam: streams, events, memory. Everything that a data plane asks of a device, and no more.

``CudaDevice`` is a GPU. ``SimulatedDevice`` is host memory whose streams are worked off by a thread as late
as they may be, so that what is not ordered by an event goes wrong in a test as it would on a GPU under load.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class SharedMemoryHandle:
    """How another process on this host opens device memory: nothing but numbers, bytes and checked names.

    ``host`` and ``device`` say where the memory is, ``nbytes`` how much; the rest is the device's own.
    """

    host: str
    device: str
    nbytes: int
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
        """Whether the device has come past it; never blocks. Raises RuntimeError when the device failed."""

    def wait(self) -> None:
        """Block this thread until then. Raises RuntimeError when the device failed."""


class DeviceStream(Protocol):
    """Work in order, on the device, at its own time."""

    def run(self, work: Callable[[], object]) -> None:
        """Enqueue the torch operations that ``work`` calls: copies and arithmetic into tensors that exist.

        ``work`` must not allocate device memory that outlives it, nor look at values.
        """

    def wait(self, event: DeviceEvent) -> None:
        """What is enqueued from here on runs after ``event``; the host does not wait."""

    def record(self) -> DeviceEvent:
        """The event that everything enqueued so far is done."""


class Device(Protocol):
    """One device. Thread-safe; a stream is used by one thread at a time."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is in this device's memory."""

    def stream(self) -> DeviceStream:
        """A new side stream."""

    def compute(self) -> DeviceStream:
        """The stream that the calling thread's own torch operations are on."""

    def on(self, stream: DeviceStream) -> AbstractContextManager[None]:
        """Within it, the calling thread's own torch operations are on ``stream``."""

    def when(self, event: DeviceEvent, callback: Callable[[], None]) -> None:
        """Call ``callback`` from some thread once ``event`` is done, or failed."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` of device memory, uint8."""

    def staging(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` of host memory, uint8, that copies to and from the device do not block on."""

    def keep_registered(self, memory: Sequence[torch.Tensor]) -> None:
        """Register exactly these host tensors for copies that do not block; others are let go.

        They stay alive, and mapped, while they are registered. No copy with one that is let go may be
        under way. Memory that cannot be registered still works, more slowly.
        """

    def share(self, nbytes: int) -> tuple[torch.Tensor, SharedMemoryHandle] | None:
        """Device memory that other processes can open, None where that is not possible."""

    def open(self, handle: SharedMemoryHandle) -> torch.Tensor | None:
        """Memory that another process shares, None where it cannot be reached from here.

        Read it and never write it. It is closed when the tensor is gone.
        """

    def close(self) -> None:
        """End the device's threads and registrations; its work must be over."""
