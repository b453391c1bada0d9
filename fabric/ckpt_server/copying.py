"""One copy of a state into memory, as units that any thread may take, digests included.

Blocks cut the file at multiples of 4 MiB, tensors wherever they end. So a unit is a run of whole tensors
(a large one alone), and a block is digested by whoever writes its last byte, while most of it is still in
the cache. What is digested is the target: the digests describe what is stored.
"""

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fabric.ckpt_server.digest import BLOCK_BYTES, block_digest, digest_of_blocks
from fabric.ckpt_server.encoding import bytes_of
from fabric.ckpt_server.state import StateView
from fabric.errors import StateError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class SnapshotDigests:
    """The state's digest and its blocks' (16 hex digits each, in file order)."""

    digest: str
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Tensor ``index`` of the view (its bytes, flat) and where they go in the file."""

    index: int
    tensor: torch.Tensor
    begin: int
    end: int


def slices_of(view: StateView) -> list[Slice]:
    """Every tensor of ``view`` with its place in the file."""
    slices, begin = [], len(view.header)
    for index, (_, tensor) in enumerate(view.tensors):
        flat = bytes_of(tensor)
        slices.append(Slice(index, flat, begin, begin + flat.numel()))
        begin += flat.numel()
    return slices


def units_of(slices: Sequence[Slice], unit_bytes: int = BLOCK_BYTES) -> list[list[Slice]]:
    """Runs of tensors of about ``unit_bytes`` or one larger tensor, the largest first."""
    units: list[list[Slice]] = []
    size = 0
    for part in slices:
        if not units or size + part.end - part.begin > unit_bytes:
            units.append([])
            size = 0
        units[-1].append(part)
        size += part.end - part.begin
    return sorted(units, key=lambda unit: unit[0].begin - unit[-1].end)


def as_bytes(target: memoryview, nbytes: int) -> Bytes:
    """The first ``nbytes`` of writable ``target`` as an array. StateError where it is too small."""
    if target.readonly or not target.c_contiguous:
        raise StateError("A snapshot needs writable, contiguous memory as its target.")
    if target.nbytes < nbytes:
        raise StateError(
            f"The snapshot needs {nbytes} bytes and its slot has {target.nbytes}; allocate it anew."
        )
    return np.frombuffer(target, np.uint8, nbytes)


class Copying:
    """The progress of one copy. ``run`` may be called from several threads until nothing is left."""

    def __init__(self, view: StateView, target: memoryview) -> None:
        self.memory = as_bytes(target, view.nbytes)
        sizes = [BLOCK_BYTES] * (view.nbytes // BLOCK_BYTES)
        rest = view.nbytes % BLOCK_BYTES
        self._missing = [*sizes, rest] if rest else sizes
        self._blocks: list[str] = [""] * len(self._missing)
        self._lock = threading.Lock()
        self.memory[: len(view.header)] = np.frombuffer(view.header, np.uint8)
        self._written(0, len(view.header))

    def run(self, units: "deque[list[Slice]]", *, copy: bool) -> None:
        """Takes units until none is left. Without ``copy`` their bytes are in the target already."""
        while True:
            try:
                unit = units.popleft()
            except IndexError:
                return
            for part in unit:
                self._take(part, copy=copy)

    def digests(self) -> SnapshotDigests:
        """The result, once every tensor was taken. Raises StateError when the copy ended before that."""
        if any(self._missing):
            raise StateError("The snapshot ended half-way and is not usable; take another one.")
        return SnapshotDigests(digest_of_blocks(self.memory.nbytes, self._blocks), tuple(self._blocks))

    def _take(self, part: Slice, *, copy: bool) -> None:
        source: Bytes | None = part.tensor.numpy() if copy else None
        cuts = range(part.begin // BLOCK_BYTES * BLOCK_BYTES + BLOCK_BYTES, part.end, BLOCK_BYTES)
        for begin, end in itertools.pairwise((part.begin, *cuts, part.end)):
            if source is not None:
                self.memory[begin:end] = source[begin - part.begin : end - part.begin]
            self._written(begin, end)

    def _written(self, begin: int, end: int) -> None:
        while begin < end:
            block = begin // BLOCK_BYTES
            stop = min(end, (block + 1) * BLOCK_BYTES)
            with self._lock:
                self._missing[block] -= stop - begin
                complete = self._missing[block] == 0
            if complete:
                whole = self.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
                self._blocks[block] = block_digest(whole.data)
            begin = stop
