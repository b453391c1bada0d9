"""A part of a tensor: where it begins and how far it goes, by dimension."""

import math
from dataclasses import dataclass


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
        """The region that this part and ``other`` both cover; it may be empty."""
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
