"""Parts of tensors in a file: the bytes and blocks that hold them."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from fabric.ckpt_server.format.safetensors_file import ELEMENT_BYTES, TensorSpan
from fabric.protocol.rules.tensor_region import TensorRegion

_MOST_RUNS = 4096  # the most runs of a piece: if a piece has more, one run covers all of them


@dataclass(frozen=True, slots=True)
class RegionRead:
    """A read of a tensor's ``box`` from the file of ``rank``, which has the part ``held`` at ``span``."""

    name: str
    rank: int
    span: TensorSpan
    held: TensorRegion
    box: TensorRegion

    def runs(self, gap_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the runs of bytes (begin, end) of the rank's file that hold the box. One run covers all where
        gaps are smaller than ``gap_bytes``, or runs are very many."""
        item, shape, where = ELEMENT_BYTES[self.span.dtype], self.held.sizes, self.box.within(self.held)
        # The box covers dimensions from ``split`` on, so its part of dimension ``split - 1`` is contiguous.
        split = len(shape)
        while split and self.box.sizes[split - 1] == shape[split - 1]:
            split -= 1
        strides = [math.prod(shape[i + 1 :]) * item for i in range(len(shape))]
        first = self.span.begin + sum(p.start * stride for p, stride in zip(where, strides, strict=True))
        outer = where[: split - 1] if split else ()
        rows = math.prod(part.stop - part.start for part in outer)
        if rows == 1 or rows > _MOST_RUNS or strides[split - 2] <= gap_bytes:
            reach = sum((n - 1) * stride for n, stride in zip(self.box.sizes, strides, strict=True))
            yield first, first + reach + item
            return
        length = self.box.sizes[split - 1] * strides[split - 1]
        for steps in itertools.product(*(range(part.stop - part.start) for part in outer)):
            at = first + sum(i * stride for i, stride in zip(steps, strides, strict=False))
            yield at, at + length

    def blocks(self, block_bytes: int) -> set[int]:
        """Return the numbers of the blocks of the rank's file that hold the box."""
        blocks: set[int] = set()
        for begin, end in self.runs(block_bytes):
            blocks.update(range(begin // block_bytes, -(-end // block_bytes)))
        return blocks
