"""Snapshots: a consistent copy of live state in shared memory while training goes on.

The state is consistent between two optimizer steps. The trainer calls ``start`` there, which returns at once.
The copy runs during the next forward and backward. The trainer calls ``fence`` before it changes the state
again; ``fence`` returns when a change is safe. ``join`` returns the digests. Between ``start`` and ``fence``
nothing may change the view's tensors, including buffers and moving averages.

On the CPU one or two threads of low priority copy and digest block by block, and leave the trainer a core.
The thread that waits in ``fence`` helps: it takes blocks itself, because the scheduler may starve the other
threads. ``digest`` reads the state in the same way, without a copy.

On a GPU a side stream waits for an event recorded behind the optimizer step, copies into registered
(page-locked) shared memory, and records an event of its own. ``fence`` makes the compute stream wait for the
copy's event; the host does not wait. Digesting the file begins after that event.

Members know a state on a GPU by a digest that the GPU makes (``device_digest``), beside forward and backward.
The file's manifest has both digests. That of the state is also made of the copy, so it vouches for the copy.
"""

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import xxhash
from msgspec.structs import replace

from fabric.ckpt_server.format.manifest import BLOCK_BYTES, digest_of_blocks, make_manifest
from fabric.ckpt_server.state.device_digest import BLOCK_BYTES as DIGEST_BLOCK_BYTES
from fabric.ckpt_server.state.device_digest import SUMS_BYTES, DeviceDigest, device_digest
from fabric.ckpt_server.state.encoding import bytes_of
from fabric.ckpt_server.state.training_state import StateView
from fabric.errors import StateError
from fabric.model import SnapshotRef, Value
from fabric.runtime.priority import lower_priority

# One pass over a state, block by block: it copies the state and digests it, or only digests it.
#
# The file is cut into blocks at multiples of 4 MiB, independent of the tensors. A block is the unit of
# work. Any thread takes a block, copies the tensors' bytes in it in pieces that fit into a core's own
# cache, and digests each piece while it is in the cache. A copy digests its target, so the digests describe
# the stored bytes.


Bytes = np.ndarray[Any, np.dtype[np.uint8]]
PIECE_BYTES = 256 << 10  # a piece and its source fit well into a core's second-level cache


class SnapshotDigests(Value):
    """The digest of a state's file, and the digests of its blocks (16 hex digits each, in file order)."""

    digest: str
    blocks: tuple[str, ...]
    state: str = ""  # the digest by which members know a state on a device

    @property
    def name(self) -> str:
        """The digest by which members know the state."""
        return self.state or self.digest


class TensorExtent(Value):
    """A tensor of the view (its bytes, flat), and the place of these bytes in the file."""

    tensor: torch.Tensor
    begin: int
    end: int


def tensor_extents(view: StateView) -> list[TensorExtent]:
    """Return every tensor of ``view`` that has any bytes, with its place in the file, in order."""
    slices, begin = [], len(view.header)
    for _, tensor in view.tensors:
        flat = bytes_of(tensor)
        if flat.numel():
            slices.append(TensorExtent(flat, begin, begin + flat.numel()))
        begin += flat.numel()
    return slices


def as_bytes(target: memoryview, nbytes: int) -> Bytes:
    """Return the first ``nbytes`` of writable ``target`` as an array. StateError where it is too small."""
    if target.readonly or not target.c_contiguous:
        raise StateError("A snapshot needs writable, contiguous memory as its target.")
    if target.nbytes < nbytes:
        raise StateError(
            f"The snapshot needs {nbytes} bytes and its slot has {target.nbytes}; allocate it anew."
        )
    return np.frombuffer(target, np.uint8, nbytes)


Item = TypeVar("Item")


class SharedWork(Generic[Item]):
    """Work in pieces, which any threads take until none is left. ``wait`` waits for begun pieces only, never
    for a thread that has not begun."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._left = deque(items)
        self._undone = len(self._left)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._error: BaseException | None = None
        if not self._left:
            self._over.set()

    def __len__(self) -> int:
        """Count the pieces that no thread has taken yet."""
        return len(self._left)

    def run(self, do: Callable[[Item], None]) -> None:
        """Take pieces until none is left; keep an error for ``wait`` to raise."""
        while not self._error:
            try:
                item = self._left.popleft()
            except IndexError:
                return
            try:
                do(item)
            except Exception as error:  # noqa: BLE001  (of whatever kind: who waits must hear of it)
                self.fail(error)
                return
            with self._lock:
                self._undone -= 1
                if not self._undone:
                    self._over.set()

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._over.set()

    def wait(self) -> None:
        """Wait until all is done. Raises StateError where something went wrong."""
        self._over.wait()
        if self._error is not None:
            raise StateError(f"The snapshot failed and is not usable: {self._error}.") from self._error


class BlockPass:
    """One pass over all blocks of a file of ``nbytes``; ``sources``: bytes and their begin in the file, in
    order."""

    def __init__(self, nbytes: int, sources: Iterable[tuple[Bytes, int]]) -> None:
        count = -(-nbytes // BLOCK_BYTES)
        self._nbytes = nbytes
        self._sources: list[list[tuple[Bytes, int]]] = [[] for _ in range(count)]
        for source, begin in sources:
            for block in range(begin // BLOCK_BYTES, (begin + source.size - 1) // BLOCK_BYTES + 1):
                self._sources[block].append((source, begin))
        self._digests: list[str] = [""] * count
        self.blocks = SharedWork(range(count))

    def run(self) -> None:
        """Work on blocks until none is left; several threads may call it."""
        self.blocks.run(self._take)

    def help(self) -> None:
        """Work on blocks, then wait for blocks of other threads. Keep an error for ``digests`` to raise."""
        self.run()
        with contextlib.suppress(StateError):
            self.blocks.wait()

    def digest(self) -> str:
        """Return the digest of the whole. Raises as ``digests`` does."""
        return self.digests().digest

    def digests(self) -> SnapshotDigests:
        """Return the result, when every block is done. Raises StateError where something went wrong.

        Drops all references to the state, even if a thread has not yet noticed that no block is left.
        """
        try:
            self.blocks.wait()
        finally:
            self._sources = []
        return SnapshotDigests(digest_of_blocks(self._nbytes, self._digests), tuple(self._digests))

    def _take(self, block: int) -> None:
        raise NotImplementedError


class DigestPass(BlockPass):
    """Digests a state in host memory, without a copy."""

    def __init__(self, view: StateView) -> None:
        header = np.frombuffer(view.header, np.uint8), 0
        tensors = [(part.tensor.numpy(), part.begin) for part in tensor_extents(view)]
        super().__init__(view.nbytes, [header, *tensors])

    def _take(self, block: int) -> None:
        begin = block * BLOCK_BYTES
        hasher = xxhash.xxh3_64()
        for source, start in self._sources[block]:
            hasher.update(source[max(0, begin - start) : begin + BLOCK_BYTES - start].data)
        self._digests[block] = hasher.hexdigest()


class CopyPass(BlockPass):
    """One copy. It copies the tensors in ``fused`` while it digests; all other bytes must be in the target
    before."""

    def __init__(self, view: StateView, target: memoryview, fused: Sequence[TensorExtent]) -> None:
        self.memory = as_bytes(target, view.nbytes)
        self.memory[: len(view.header)] = np.frombuffer(view.header, np.uint8)
        super().__init__(view.nbytes, ((part.tensor.numpy(), part.begin) for part in fused))

    def copy(self, part: TensorExtent) -> None:
        self.memory[part.begin : part.end] = part.tensor.numpy()

    def digests(self) -> SnapshotDigests:
        try:
            return super().digests()
        finally:
            self.memory = np.empty(0, np.uint8)

    def _take(self, block: int) -> None:
        """Copy a block's part of the fused tensors, and digest the block."""
        begin = digested = block * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self.memory.nbytes)
        hasher = xxhash.xxh3_64()
        for source, start in self._sources[block]:
            at, stop = max(begin, start), min(end, start + source.size)
            while at < stop:
                upto = min(stop, at + PIECE_BYTES)
                self.memory[at:upto] = source[at - start : upto - start]
                if (at := upto) - digested >= PIECE_BYTES:
                    hasher.update(self.memory[digested:at].data)
                    digested = at
        hasher.update(self.memory[digested:end].data)
        self._digests[block] = hasher.hexdigest()


class DeviceDigestPass:
    """Digests bytes on a device: behind the work enqueued so far on its side stream, beside later work.

    ``parts``: the bytes behind the ``header``, 1-D uint8, one tensor behind the other. Their small tensors in
    host memory are read at once. If there are large ones, ``submit`` takes the work to another thread.
    """

    def __init__(
        self,
        header: bytes,
        parts: list[torch.Tensor],
        device: "CudaCopyStream",
        submit: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._header, self._device = header, device
        self._nbytes = sum(part.numel() for part in parts)
        small = [x for x in parts if not device.owns(x) and x.numel() < _PACK_BELOW_BYTES]
        if small:
            # From page-locked memory a copy to the device does not wait for the device.
            sizes = [x.numel() for x in small]
            staged = torch.from_numpy(device.staging(sum(sizes)))
            at_hand = iter(torch.split(torch.cat(small, out=staged), sizes))
            is_small = {id(x) for x in small}
            parts = [next(at_hand) if id(x) in is_small else x for x in parts]
        self._parts = parts  # the device reads them until ``digest`` returns
        self._sums: Bytes = np.empty(0, np.uint8)
        self._event: Any = None
        self._work = SharedWork([parts])
        if submit is not None and any(not device.owns(x) and x.numel() >= _PACK_BELOW_BYTES for x in parts):
            submit(self.help)
        else:
            self.help()

    def help(self) -> None:
        """Enqueue the work unless another thread has taken it; keep an error for ``digest`` to raise."""
        self._work.run(self._enqueue)

    def _enqueue(self, parts: list[torch.Tensor]) -> None:
        digest = device_digest(self._device.device)
        self._sums = self._device.staging(-(-self._nbytes // DIGEST_BLOCK_BYTES) * SUMS_BYTES)
        target = torch.from_numpy(self._sums)
        self._device.run(lambda: target.copy_(bytes_of(digest.sums(parts)), non_blocking=True))
        self._event = self._device.end()

    def digest(self) -> str:
        """Return the digest, when the device has made it. Raises StateError where something went wrong."""
        self.help()
        try:
            self._work.wait()
            self._event.synchronize()
        except RuntimeError as error:
            raise StateError(f"The state could not be digested on its device: {error}.") from error
        finally:
            self._parts = []
        return DeviceDigest.name(self._sums, self._nbytes, self._header)


_cuda: Any = torch.cuda  # torch declares no types for its streams and events
_log = logging.getLogger(__name__)
# The copying threads have lower priority than other background work: the trainer needs the cores.
# The thread that waits for the copy helps to copy.
_NICENESS = 10
_HOST_THREADS = 2  # threads that copy host tensors beside a stream of the device
# The caller itself digests up to this many blocks: the scheduler may starve another thread.
_FEW_BLOCKS = 4
_PACK_BELOW_BYTES = 256 << 10  # a smaller device tensor is first gathered with others on the device
_PACK_BYTES = 16 << 20
_REGISTERED = 2  # the most registered memories, as many as there are snapshot slots


def build_manifest(
    view: StateView, digests: SnapshotDigests, *, job: str, replica: str, generation: int, created: float
) -> dict[str, Any]:
    """Return the manifest that the checkpoint server publishes; ``created`` is Unix time."""
    state = SnapshotRef(generation, view.step, digests.digest)
    manifest = make_manifest(state, view.nbytes, digests.blocks, job=job, replica=replica, created=created)
    return manifest | ({"state": digests.state} if digests.state else {})


def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "fabric-snapshot", lower_priority, (_NICENESS,))


def _digest_threads() -> int:
    """Return the number of threads that digest a device's bytes: a quarter of the cores, at most four.

    One core digests 7 GB/s, and a copy from a GPU brings 55 GB/s (docs/benchmarks.md).
    """
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


# A copier copies one view at a time. One thread may call ``fence`` while another thread joins; all other
# calls must come one at a time.


class CpuCopier:
    """Copies host tensors with two threads, or one where two would leave no core to the trainer."""

    def __init__(self) -> None:
        self._threads = max(1, min(2, len(os.sched_getaffinity(0)) - 1))
        self._pool = _pool(self._threads + 1)
        self._copying: CopyPass | None = None

    def prepare(self, target: memoryview) -> None:
        """Do nothing: the target's pages are allocated already."""

    def start(self, view: StateView, target: memoryview) -> None:
        """Begin to copy ``view``. Raises StateError for a target that is too small, or device tensors."""
        if self._copying is not None:
            raise StateError("A snapshot is still being copied; join it before the next one is started.")
        for name, tensor in view.tensors:
            if tensor.device.type != "cpu":
                raise StateError(f"{name} is on {tensor.device}; a CpuCopier copies host memory only.")
        self._copying = CopyPass(view, target, tensor_extents(view))
        self._begin(self._copying)

    def digest(self, view: StateView) -> DigestPass:
        """Begin to digest ``view``, also during a copy.

        ``view`` must not change until ``digest`` of the returned object has returned.
        """
        digesting = DigestPass(view)
        if len(digesting.blocks) > _FEW_BLOCKS:
            self._begin(digesting)
        return digesting

    def _begin(self, reading: BlockPass) -> None:
        for _ in range(min(self._threads, len(reading.blocks))):
            self._pool.submit(reading.run)

    def fence(self) -> None:
        """Work on blocks until every live tensor has been read. Keep an error for ``join`` to raise."""
        copying = self._copying
        if copying is not None:
            # The caller waits, so its core is free for one more copying thread. Each copying thread waits for
            # the interpreter's lock between two pieces; meanwhile another thread uses its core.
            if len(copying.blocks) > 1:
                self._pool.submit(copying.run)
            copying.help()

    def join(self) -> SnapshotDigests:
        """Return the digests when the target is complete. Raises the copy's error, and StateError when
        nothing was started."""
        if self._copying is None:
            raise StateError("No snapshot was started, so there is none to wait for.")
        try:
            return self._copying.digests()
        finally:
            self._copying = None

    def close(self) -> None:
        """End the threads, waiting for a copy in progress."""
        self._pool.shutdown(wait=True)


class CudaCopyStream:
    """A side stream of one CUDA device, and the host memory registered for it."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        index = torch.device(device).index
        self.device = torch.device("cuda", _cuda.current_device() if index is None else index)
        self._stream = _cuda.Stream(self.device)
        # Address -> registered memory, oldest first; each array keeps its memory mapped while registered.
        self._registered: dict[int, Bytes] = {}
        self._registering = threading.Lock()

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def register(self, memory: Bytes) -> None:
        """Register host memory, so that copies to it do not block; from any thread, repeated calls are
        free."""
        with self._registering:
            self._register(memory)

    def _register(self, memory: Bytes) -> None:
        address, nbytes = memory.ctypes.data, memory.nbytes
        registered = self._registered.pop(address, None)
        if registered is not None and registered.nbytes >= nbytes:
            self._registered[address] = registered  # at the dictionary's end: now the newest registration
            return
        with _cuda.device(self.device):
            if registered is not None:
                _unregister(registered)
            # Slots grow and servers end: unregister the oldest memory when a new slot's memory is registered.
            while len(self._registered) >= _REGISTERED:
                _unregister(self._registered.pop(next(iter(self._registered))))
            code = int(_cuda.cudart().cudaHostRegister(address, nbytes, 0))
            if code == 0:
                self._registered[address] = memory
                return
            # Copies still work, but the host waits. Read CUDA's error, or the next kernel would raise it.
            _log.warning("Shared memory of %d bytes could not be page-locked (CUDA error %d).", nbytes, code)
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self.device)

    def begin(self) -> None:
        """Let all later copies see all earlier compute work."""
        ready = _cuda.Event()
        ready.record(_cuda.current_stream(self.device))
        self._stream.wait_event(ready)

    def copy(self, tensors: list[torch.Tensor], memory: Bytes) -> None:
        """Enqueue the copy of flat ``tensors``, one behind the other, into ``memory``."""
        # The gathered copy belongs to the side stream, so that torch does not reuse its memory too early.
        self.run(lambda: copy_together(tensors, memory))

    def end(self) -> Any:
        """Return an event that happens after all enqueued copies."""
        done = _cuda.Event(blocking=True)  # the waiting thread sleeps, and does not spin
        self._stream.record_event(done)
        return done

    def run(self, work: Callable[[], object]) -> None:
        """Enqueue the torch operations that ``work`` calls."""
        with _cuda.stream(self._stream):
            work()

    def staging(self, nbytes: int) -> Bytes:
        memory: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu").numpy()
        return memory

    def hold(self, event: Any) -> None:
        """Let later compute work wait on the device for ``event``."""
        _cuda.current_stream(self.device).wait_event(event)

    def close(self) -> None:
        self._stream.synchronize()
        with _cuda.device(self.device):
            while self._registered:
                _unregister(self._registered.popitem()[1])


def copy_together(tensors: list[torch.Tensor], memory: Bytes) -> None:
    """Copy flat ``tensors``, one behind the other, into ``memory``, without waiting for a device."""
    source = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    torch.from_numpy(memory).copy_(source, non_blocking=True)


def _unregister(memory: Bytes) -> None:
    _cuda.cudart().cudaHostUnregister(memory.ctypes.data)


class _DeviceCopy(Value):
    """One copy under way."""

    view: StateView  # keeps the tensors alive until join
    copying: CopyPass
    host: SharedWork[TensorExtent]  # the copies of the host tensors
    state: DeviceDigestPass
    event: Any  # occurs after the copies of the device tensors


class CudaCopier:
    """Copies device tensors by a stream and host tensors (Adam's step counters) by threads; then digests."""

    def __init__(self, stream: CudaCopyStream | None = None) -> None:
        self._stream = CudaCopyStream() if stream is None else stream
        self._host = _pool(_HOST_THREADS)
        self._digesting = _pool(_digest_threads())
        self._current: _DeviceCopy | None = None

    def prepare(self, target: memoryview) -> None:
        """Page-lock the target now, because that is slow and ``start`` runs in the trainer's thread."""
        self._stream.register(as_bytes(target, target.nbytes))

    def start(self, view: StateView, target: memoryview) -> None:
        """Raises StateError for a target that is too small, or a foreign device."""
        if self._current is not None:
            raise StateError("A snapshot is still being copied; join it before the next one is started.")
        for name, tensor in view.tensors:
            if tensor.device.type != "cpu" and not self._stream.owns(tensor):
                raise StateError(f"{name} is on {tensor.device}, another device than the snapshot's.")
        copying = CopyPass(view, target, [])
        self._stream.register(copying.memory)
        slices = tensor_extents(view)
        self._stream.begin()
        for pack in _packs([part for part in slices if self._stream.owns(part.tensor)]):
            self._stream.copy([part.tensor for part in pack], copying.memory[pack[0].begin : pack[-1].end])
        state = self.digest(view)
        event = self._stream.end()
        host = SharedWork(part for part in slices if not self._stream.owns(part.tensor))
        self._current = _DeviceCopy(view, copying, host, state, event)
        for _ in range(min(_HOST_THREADS, len(host))):
            self._host.submit(host.run, copying.copy)
        for _ in range(_digest_threads()):
            self._digesting.submit(_digest, event, host, copying)

    def fence(self) -> None:
        """Make later work of the compute stream wait for the copy; helps with host tensors."""
        if self._current is not None:
            current = self._current
            self._stream.hold(current.event)
            current.host.run(current.copying.copy)
            with contextlib.suppress(StateError):
                current.host.wait()

    def join(self) -> SnapshotDigests:
        """Raises StateError when nothing was started."""
        if (current := self._current) is None:
            raise StateError("No snapshot was started, so there is none to wait for.")
        try:
            current.host.wait()
            header, memory = current.view.header, current.copying.memory
            digests = current.copying.digests()
            body = torch.from_numpy(memory[len(header) :])
            copied = DeviceDigestPass(header, [body], self._stream).digest()
            if copied != current.state.digest():
                raise StateError("The copy has another digest than the state on the device.")
            return replace(digests, state=copied)
        finally:
            self._current = None

    def digest(self, view: StateView) -> DeviceDigestPass:
        self._stream.begin()
        parts = [part.tensor for part in tensor_extents(view)]
        return DeviceDigestPass(view.header, parts, self._stream, self._digesting.submit)

    def close(self) -> None:
        self._host.shutdown(wait=True)
        self._digesting.shutdown(wait=True)
        self._stream.close()


Copier = CpuCopier | CudaCopier


def make_copier(device: torch.device) -> Copier:
    """Return the copier of states whose parameters are on ``device``."""
    return CpuCopier() if device.type == "cpu" else CudaCopier(CudaCopyStream(device))


def _digest(event: Any, host: "SharedWork[TensorExtent]", copying: CopyPass) -> None:
    """Digest when all bytes are in the target."""
    try:
        event.synchronize()
        host.wait()
    except Exception as error:  # noqa: BLE001  (of whatever kind: who joins must hear of it)
        copying.blocks.fail(error)
    else:
        copying.run()


def _packs(slices: Iterable[TensorExtent]) -> list[list[TensorExtent]]:
    """Group small tensors that are neighbours in the file; a larger one stays alone."""
    packs: list[list[TensorExtent]] = []
    for part in slices:
        last = packs[-1] if packs else None
        if (
            last is not None
            and last[-1].end == part.begin
            and part.end - part.begin < _PACK_BELOW_BYTES > last[0].end - last[0].begin
            and part.end - last[0].begin <= _PACK_BYTES
        ):
            last.append(part)
        else:
            packs.append([part])
    return packs
