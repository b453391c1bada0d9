"""Parts of tensors: what two of them have in common, and where in a file it lies."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from fabric.ckpt_server.format.safetensors_file import ELEMENT_BYTES, TensorSpan

_MOST_RUNS = 4096  # of one piece: with more, what lies between them is counted in


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """A part of a whole tensor: where it begins and how far it goes, by dimension."""

    begin: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "TensorRegion":
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def common(self, other: "TensorRegion") -> "TensorRegion":
        """The region that both cover; it may be empty."""
        begin = tuple(map(max, self.begin, other.begin))
        ends = map(min, self.end, other.end)
        return TensorRegion(begin, tuple(max(0, end - at) for at, end in zip(begin, ends, strict=True)))

    def within(self, other: "TensorRegion") -> tuple[slice, ...]:
        """The indices of this part in memory that holds ``other``."""
        starts = (a - b for a, b in zip(self.begin, other.begin, strict=True))
        return tuple(slice(at, at + n) for at, n in zip(starts, self.sizes, strict=True))

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(at + n for at, n in zip(self.begin, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class RegionRead:
    """``box`` of tensor ``name``, which is in the file of ``rank``: there ``held`` of it lies at ``span``."""

    name: str
    rank: int
    span: TensorSpan
    held: TensorRegion
    box: TensorRegion

    def runs(self, gap_bytes: int) -> Iterator[tuple[int, int]]:
        """The bytes (begin, end) of the rank's file that hold it. Where less than ``gap_bytes`` lie between
        them, or there are very many, one run covers all."""
        item, shape, where = ELEMENT_BYTES[self.span.dtype], self.held.sizes, self.box.within(self.held)
        # Dimensions from ``split`` on are covered whole, so what is taken of the one before is contiguous.
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
        """Which blocks of the rank's file hold it."""
        blocks: set[int] = set()
        for begin, end in self.runs(block_bytes):
            blocks.update(range(begin // block_bytes, -(-end // block_bytes)))
        return blocks
