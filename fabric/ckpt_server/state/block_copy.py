"""One pass over a state, block by block: it copies the state and digests it, or only digests it.

The file is cut into blocks at multiples of 4 MiB, independent of the tensors. A block is the unit of work.
Any thread takes a block, copies the tensors' bytes in it in pieces that fit into a core's own cache, and
digests each piece while it is in the cache. A copy digests its target, so the digests describe the stored
bytes.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import xxhash

from fabric.ckpt_server.format.digest import BLOCK_BYTES, digest_of_blocks
from fabric.ckpt_server.state.encoding import bytes_of
from fabric.ckpt_server.state.training_state import StateView
from fabric.errors import StateError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
PIECE_BYTES = 256 << 10  # a piece and its source fit well into a core's second-level cache


@dataclass(frozen=True, slots=True)
class SnapshotDigests:
    """The digest of a state, and the digests of its blocks (16 hex digits each, in file order)."""

    digest: str
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorExtent:
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
        """Note that the work has failed."""
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
        """Read one block."""
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
        """Copy one host tensor, without a digest."""
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
