"""A GPU as far as a data plane needs it: streams, events and memory, by way of ``torch.cuda``.

The tests have a simulated device whose streams run as late as events allow. So a missing event between two
streams fails there as it does on a busy GPU. ``docs/benchmarks.md`` says which parts have run on a GPU, and
when.
"""

import contextlib
import logging
import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fabric.runtime.system_calls import boot_id

_cuda: Any = torch.cuda  # torch declares no types for its streams and events
_log = logging.getLogger(__name__)
# The form of torch's name for the file with the reference counts of shared device memory. The name becomes a
# path in /dev/shm, so the process accepts no other form.
_COUNTER = re.compile(rb"/torch_[0-9]{1,10}_[0-9]{1,20}_[0-9]{1,20}")


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


class CudaEvent:
    """A point in a stream."""

    def __init__(self, event: Any, watcher: "_Watcher") -> None:
        self.event = event
        self.watcher = watcher

    def done(self) -> bool:
        """Whether the device is past this point; never blocks. Raises RuntimeError on a failed device."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Block this thread until the device is past this point. Raises RuntimeError on a failed device."""
        self.event.synchronize()


@dataclass(frozen=True, slots=True)
class CudaStream:
    """A queue of work that the device runs in order, while the host goes on."""

    stream: Any
    watcher: "_Watcher" = field(compare=False)

    def run(self, work: Callable[[], object]) -> None:
        """Enqueue the torch operations that ``work`` calls: copies and arithmetic into tensors that exist.

        ``work`` must not allocate device memory that outlives it, nor read values of tensors.
        """
        with _cuda.stream(self.stream):
            work()

    def wait(self, event: CudaEvent) -> None:
        """Run all work enqueued later after ``event``; the host does not wait."""
        self.stream.wait_event(event.event)

    def record(self) -> CudaEvent:
        """Return the event that completes with all work enqueued so far."""
        event = _cuda.Event(blocking=True)  # the waiting thread sleeps and does not spin
        self.stream.record_event(event)
        return CudaEvent(event, self.watcher)


class CudaDevice:
    """One GPU; this process makes all of its streams and events.

    Thread-safe; a stream is used by one thread at a time.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        index = torch.device(device).index
        self.device = torch.device("cuda", _cuda.current_device() if index is None else index)
        self._watchers: list[_Watcher] = []
        self._compute = self._watcher()
        self._registered: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def stream(self) -> CudaStream:
        """Return a new side stream. Its work goes before queued work of the trainer's stream.

        Members wait for an exchange, whose kernels are short. Backward's large products would hold up each.
        """
        return CudaStream(_cuda.Stream(self.device, priority=-1), self._watcher())

    def compute(self) -> CudaStream:
        """Return the stream on which the calling thread's torch operations run."""
        return CudaStream(_cuda.current_stream(self.device), self._compute)

    @contextlib.contextmanager
    def on(self, stream: CudaStream) -> Iterator[None]:
        """Run the calling thread's torch operations on ``stream`` within this context.

        Without it a thread uses the default stream, which usually is the trainer's.
        """
        with _cuda.device(self.device), _cuda.stream(stream.stream):
            yield

    def when(self, event: CudaEvent, callback: Callable[[], None]) -> None:
        """Call ``callback`` from some thread once ``event`` is done, or failed.

        Events of one stream complete in order, so one thread per stream waits for them.
        """
        event.watcher.watch(event, callback)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of device memory, uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def staging(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of host memory, uint8, with which device copies do not block the host."""
        # torch rounds page-locked memory up to a power of two: ask for sizes that are powers of two.
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    def keep_registered(self, memory: Sequence[torch.Tensor]) -> None:
        """Register exactly these host tensors for copies that do not block; unregister all others.

        A registered tensor stays alive and mapped. No copy may be under way with a tensor that this call
        unregisters. Memory that cannot be registered still works, but copies are slower.
        """
        wanted = {t.data_ptr(): t for t in memory if t.numel()}
        with self._lock, _cuda.device(self.device):
            for address, old in list(self._registered.items()):
                # The address may belong to new memory now, which the driver has not registered.
                if wanted.get(address) is not old:
                    del self._registered[address]
                    _cuda.cudart().cudaHostUnregister(address)
            for address, tensor in wanted.items():
                if address not in self._registered and self._register(address, tensor.numel()):
                    self._registered[address] = tensor

    def share(self, nbytes: int) -> tuple[torch.Tensor, SharedMemoryHandle] | None:
        """Return device memory that other processes can open, None where that is not possible.

        It uses CUDA IPC, by torch's own handles.
        """
        memory = self.memory(nbytes)
        storage: Any = memory.untyped_storage()
        try:
            # Device, memory, sizes, reference count and event, as torch passes them between processes.
            _, handle, size, offset, counter, counter_offset, event, wanted = storage._share_cuda_()
        except RuntimeError as error:
            _log.warning("device memory cannot be shared with other processes: %s", error)
            return None
        return memory, SharedMemoryHandle(
            boot_id(), self._uuid(self.device.index), nbytes, handle, size, offset, counter, counter_offset,
            event, wanted,
        )  # fmt: skip

    def open(self, handle: SharedMemoryHandle) -> torch.Tensor | None:
        """Return memory that another process shares, None where this process cannot open it.

        The caller must not write it. It is closed when the tensor is deleted. Memory of another GPU is opened
        where this process sees that GPU.
        """
        indexes = [i for i in range(_cuda.device_count()) if self._uuid(i) == handle.device]
        here = boot_id()
        if not here or handle.host != here or not indexes or not _COUNTER.fullmatch(handle.counter):
            return None
        if indexes[0] != self.device.index and not _cuda.can_device_access_peer(
            self.device.index, indexes[0]
        ):
            return None
        try:
            storage = torch.UntypedStorage._new_shared_cuda(  # noqa: SLF001  as above
                indexes[0], handle.memory, handle.storage_bytes, handle.offset, handle.counter,
                handle.counter_offset, handle.event, handle.event_wanted,
            )  # fmt: skip
        except RuntimeError as error:
            _log.warning("device memory of a neighbour cannot be opened, chunks go over TCP: %s", error)
            return None
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
        tensor.set_(storage, 0, (handle.nbytes,), (1,))
        return tensor

    def close(self) -> None:
        """End the device's threads and registrations. Its enqueued work must have run."""
        for watcher in self._watchers:
            watcher.close()
        self.keep_registered([])

    def _watcher(self) -> "_Watcher":
        watcher = _Watcher()
        self._watchers.append(watcher)
        return watcher

    def _register(self, address: int, nbytes: int) -> bool:
        code = int(_cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code:
            _log.warning("host memory of %d bytes could not be page-locked (CUDA error %d)", nbytes, code)
            forget_error(self.device)
        return code == 0

    @staticmethod
    def _uuid(index: int) -> str:
        return str(_cuda.get_device_properties(index).uuid)


def forget_error(device: torch.device) -> None:
    """Clear the error that a failed call of CUDA left behind: the next kernel would raise it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


class _Watcher:
    """A thread that waits for the events of one stream, in order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[CudaEvent, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, event: CudaEvent, callback: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fabric-cuda-events", daemon=True)
            self._thread.start()
        self._queue.put((event, callback))

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, callback = item
            with contextlib.suppress(RuntimeError):  # ``event.done`` raises the error again for the callback
                event.wait()
            callback()
