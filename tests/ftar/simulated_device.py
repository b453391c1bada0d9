"""A device made of host memory and one thread: real bytes, in the latest order that events allow.

Enqueued work does not run at once. The device's thread runs only work on which an awaited event depends. So
an enqueued copy that no thread waits for happens late or never, as on a GPU that is behind. ``pause`` makes
the device busy, and ``fail`` makes it lost.
"""

import contextlib
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from fabric.ckpt_server.state.snapshot import Bytes, copy_together
from fabric.ftar.device.cuda import SharedMemoryHandle
from fabric.runtime.system_calls import boot_id

_Work = Callable[[], object]
_MEMFD = re.compile(r"/memfd:fabric-device(?: \(deleted\))?")


class SimulatedEvent:
    """See ``CudaEvent``."""

    def __init__(self, stream: "SimulatedStream") -> None:
        self.stream = stream
        self.happened = False
        self.callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        """Return whether the event has happened; a query lets the device run up to this event."""
        device = self.stream.device
        with device.turn:
            device.check()
            device.want(self)
            return self.happened

    def wait(self) -> None:
        """See ``CudaEvent``."""
        device = self.stream.device
        with device.turn:
            device.want(self)
            device.turn.wait_for(lambda: self.happened or device.error is not None)
            device.check()

    def synchronize(self) -> None:
        """As ``wait``; torch's own events have this name for it."""
        self.wait()


class SimulatedStream:
    """See ``CudaStream``."""

    def __init__(self, device: "SimulatedDevice") -> None:
        self.device = device
        # The stream's queue: work to run, events of other streams to wait for, and own events to set.
        self.queue: deque[_Work | SimulatedEvent] = deque()

    def run(self, work: _Work) -> None:
        """See ``CudaStream``."""
        with self.device.turn:
            self.queue.append(work)

    def wait(self, event: SimulatedEvent) -> None:
        """See ``CudaStream``."""
        with self.device.turn:
            if event.stream is not self and not event.happened:
                self.queue.append(event)

    def record(self) -> SimulatedEvent:
        """See ``CudaStream``."""
        event = SimulatedEvent(self)
        with self.device.turn:
            if self.queue:
                self.queue.append(event)
            else:
                event.happened = True
        return event


class _Immediate(SimulatedStream):
    """A stream whose work is done when the call returns."""

    def run(self, work: _Work) -> None:
        """See ``CudaStream``."""
        work()

    def wait(self, event: SimulatedEvent) -> None:
        """See ``CudaStream``."""
        event.wait()


class SimulatedCopyStream:
    """See ``CudaCopyStream``; all tensors are on the device."""

    device = torch.device("cpu")

    def __init__(self, device: "SimulatedDevice") -> None:
        self._device, self._stream = device, device.stream()
        self.owns, self.run, self.end = device.owns, self._stream.run, self._stream.record

    def register(self, memory: Bytes) -> None:
        """Do nothing."""

    def begin(self) -> None:
        """See ``CudaCopyStream``."""
        self._stream.wait(self._device.compute().record())

    def copy(self, tensors: list[torch.Tensor], memory: Bytes) -> None:
        """See ``CudaCopyStream``."""
        self.run(lambda: copy_together(tensors, memory))

    def staging(self, nbytes: int) -> Bytes:
        """See ``CudaCopyStream``."""
        return np.empty(nbytes, np.uint8)

    def hold(self, event: SimulatedEvent) -> None:
        """See ``CudaCopyStream``."""
        self._device.compute().wait(event)

    def close(self) -> None:
        """Do nothing: the device ends the stream."""


class SimulatedDevice:
    """See ``CudaDevice``. Processes open each other's memory only if their devices have the same ``name``.

    What torch does on the CPU has happened when it returns, so ``compute`` is what a test makes of it: a
    stream as late as the others, or with ``immediate`` one that is never behind, for a real trainer.
    """

    def __init__(self, name: str = "host", immediate: bool = False) -> None:
        self.turn = threading.Condition(threading.RLock())
        self.error: Exception | None = None
        self.registered: list[torch.Tensor] = []
        self.allocated = 0
        self._name = name
        self._wanted: deque[SimulatedEvent] = deque()
        self._paused = False
        self._closed = False
        self._compute = SimulatedStream(self)
        self._immediate = _Immediate(self) if immediate else None
        self._local = threading.local()
        self._files: list[int] = []
        self._thread = threading.Thread(target=self._work, name="fabric-host-device", daemon=True)
        self._thread.start()

    def owns(self, tensor: torch.Tensor) -> bool:
        """See ``CudaDevice``."""
        return tensor.device.type == "cpu"

    def stream(self) -> SimulatedStream:
        """See ``CudaDevice``."""
        return SimulatedStream(self)

    def compute(self) -> SimulatedStream:
        """See ``CudaDevice``."""
        found: SimulatedStream = getattr(self._local, "stream", self._immediate or self._compute)
        return found

    @contextlib.contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        """See ``CudaDevice``; torch's own operations are not deferred."""
        self._local.stream = stream
        try:
            yield
        finally:
            del self._local.stream

    def when(self, event: SimulatedEvent, callback: Callable[[], None]) -> None:
        """See ``CudaDevice``."""
        with self.turn:
            if not event.happened and self.error is None:
                event.callbacks.append(callback)
                self.want(event)
                return
        callback()

    def memory(self, nbytes: int) -> torch.Tensor:
        """See ``CudaDevice``."""
        self.allocated += nbytes
        return torch.zeros(nbytes, dtype=torch.uint8)

    def staging(self, nbytes: int) -> torch.Tensor:
        """See ``CudaDevice``."""
        self.allocated += nbytes
        return torch.zeros(nbytes, dtype=torch.uint8)

    def keep_registered(self, memory: Sequence[torch.Tensor]) -> None:
        """See ``CudaDevice``."""
        self.registered = list(memory)

    def share(self, nbytes: int) -> tuple[torch.Tensor, SharedMemoryHandle] | None:
        """Share memory as a memfd, which another process of this user opens by process id and descriptor."""
        file = os.memfd_create("fabric-device", os.MFD_CLOEXEC)
        self._files.append(file)
        os.ftruncate(file, nbytes)
        self.allocated += nbytes
        memory = f"{os.getpid()} {file}".encode()
        handle = SharedMemoryHandle(boot_id(), self._name, nbytes, memory, nbytes, 0, b"", 0, b"", False)
        return _mapped(file, nbytes), handle

    def open(self, handle: SharedMemoryHandle) -> torch.Tensor | None:
        """See ``CudaDevice``."""
        if (handle.host, handle.device) != (boot_id(), self._name):
            return None
        numbers = re.fullmatch(rb"([0-9]{1,10}) ([0-9]{1,10})", handle.memory)
        if numbers is None:
            return None
        path = Path(f"/proc/{int(numbers[1])}/fd/{int(numbers[2])}")
        try:
            if not _MEMFD.fullmatch(str(path.readlink())) or path.stat().st_size < handle.nbytes:
                return None
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return _mapped(file, handle.nbytes)
        finally:
            os.close(file)

    def close(self) -> None:
        """See ``CudaDevice``."""
        with self.turn:
            self._closed = True
            self.turn.notify_all()
        self._thread.join()
        for file in self._files:
            os.close(file)
        self._files.clear()

    @property
    def is_asked(self) -> bool:
        """Return whether a thread waits for an event that has not happened."""
        return bool(self._wanted)

    def pause(self) -> None:
        """Make the device busy with other work."""
        with self.turn:
            self._paused = True

    def resume(self) -> None:
        """End the device's other work."""
        with self.turn:
            self._paused = False
            self.turn.notify_all()

    def fail(self, error: Exception) -> None:
        """Lose the device: every wait raises."""
        with self.turn:
            self.error = error
            callbacks = [wakeup_fd for event in self._wanted for wakeup_fd in event.callbacks]
            self.turn.notify_all()
        for wakeup_fd in callbacks:
            wakeup_fd()

    def check(self) -> None:
        """Raise RuntimeError if the device failed."""
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error

    def want(self, event: SimulatedEvent) -> None:
        """Request ``event``; the caller holds ``turn``."""
        if not event.happened and event not in self._wanted:
            self._wanted.append(event)
            self.turn.notify_all()

    def _work(self) -> None:
        with self.turn:
            while True:
                self.turn.wait_for(
                    lambda: self._closed or (self._wanted and not self._paused and self.error is None)
                )
                if self._closed:
                    return
                # Run the newest wanted event first, so that earlier work without a dependency runs as late as
                # possible.
                self._step(self._wanted[-1])

    def _step(self, event: SimulatedEvent) -> None:
        """Run one operation on which ``event`` depends."""
        stream = event.stream
        while isinstance(head := stream.queue[0], SimulatedEvent) and head.stream is not stream:
            if head.happened:
                stream.queue.popleft()
            else:
                stream = head.stream
        if isinstance(head, SimulatedEvent):
            stream.queue.popleft()
            self._happen(head)
            return
        try:
            # Unlock, so that the host goes on; only this thread takes work from a stream.
            self.turn.release()
            try:
                head()
            finally:
                self.turn.acquire()
        except Exception as error:  # noqa: BLE001  a device that fails at one operation is lost, whatever the error
            self.fail(error)
            return
        stream.queue.popleft()

    def _happen(self, event: SimulatedEvent) -> None:
        event.happened = True
        if event in self._wanted:
            self._wanted.remove(event)
        self.turn.notify_all()
        for wakeup_fd in event.callbacks:
            wakeup_fd()


def _mapped(file: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
