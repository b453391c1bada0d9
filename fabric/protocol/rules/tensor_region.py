"""A part of a tensor: where it begins and how far it goes, by dimension."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# At most this many comparisons for each region: enough for a tensor cut along two dimensions over 4096 ranks.
MOST_COMPARISONS = 64


class TooManyComparisons(Exception):
    """So many regions lie side by side that comparing them would take too long."""


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


def overlapping(regions: Sequence[TensorRegion]) -> tuple[TensorRegion, TensorRegion] | None:
    """Two of these regions of one tensor that have a common element; None: there are none.

    A sweep along the dimension with the most cuts compares a region only with those beside it. Raises
    TooManyComparisons after ``MOST_COMPARISONS`` for each region.
    """
    if len(regions) < 2 or not regions[0].begin:
        return (regions[0], regions[1]) if len(regions) > 1 else None
    dimension = max(range(len(regions[0].begin)), key=lambda d: len({r.begin[d] for r in regions}))
    beside: list[tuple[tuple[int, ...], TensorRegion]] = []  # the end of each region that the sweep is in
    left = MOST_COMPARISONS * len(regions)
    for region in sorted(regions, key=lambda r: (r.begin[dimension], r.begin)):
        at, end = region.begin, region.end
        beside = [x for x in beside if x[0][dimension] > at[dimension]]
        left -= len(beside)
        if left < 0:
            raise TooManyComparisons
        for other_end, other in beside:
            if all(a < y and b < x for a, x, b, y in zip(at, end, other.begin, other_end, strict=True)):
                return other, region
        beside.append((end, region))
    return None
