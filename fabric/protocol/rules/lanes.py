"""Lanes: the parts of the parameters that ranks of differently cut replicas exchange with each other.

Every replica holds the whole model, each in its own layout: one process, ranks of FSDP2 or tensor parallel,
pipeline stages that own whole parameters. The layouts of all replicas together cut each parameter into
*pieces*, the largest parts that no layout cuts further. A *lane* is the pieces that one rank of every replica
holds together. Those ranks form a ring and reduce the lane. A rank takes part in as many lanes as it holds.

A part that several ranks of a replica hold has copies. Copy i of one replica is reduced with copy i of the
others. A replica with fewer copies uses its copies repeatedly, so a rank may reduce a piece more than once.
It keeps the result of the lowest copy. The pieces with copies at the same ranks form a *group*. Each lane
exchanges a group as one buffer, so all copies of a piece have equal bits.
Equal layouts make one lane per rank: rank k with rank k.

With each piece travels the presence of its parameter. A rank that holds nothing of a small parameter has an
empty piece of it, which carries the presence only.

The lanes do not depend on the order of the replicas, nor on how many of them have the same layout.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from fabric.errors import ConfigError
from fabric.model import Value

# A part of a tensor: where it begins and how far it goes, by dimension.


# At most this many comparisons for each region: enough for a tensor cut along two dimensions over 4096 ranks.
MOST_COMPARISONS = 64


class TooManyComparisons(Exception):
    """So many regions lie side by side that comparing them would take too long."""


class TensorRegion(Value):
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


class HeldParameter(Value):
    """The part of one parameter that a rank holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # the shape of the whole parameter
    region: TensorRegion  # the part of the parameter; empty where a rank holds nothing of a small parameter

    @property
    def whole(self) -> str:
        """Describe the whole parameter for people."""
        return f"{self.dtype}{list(self.shape)}"


class ReplicaLayout(Value):
    """The parameters of every rank of one replica, by rank."""

    ranks: tuple[tuple[HeldParameter, ...], ...]


class Piece(Value):
    """A part of a parameter that one rank of every replica holds."""

    name: str
    dtype: str
    region: TensorRegion
    copy: int = 0  # the number of this copy, where several ranks of a replica hold the part
    # Pieces of one group are exchanged as one buffer, so that each copy of a piece is summed in one order.
    group: int = 0


class Lane(Value):
    """Pieces that the same ranks hold, in order of their names and places."""

    holders: tuple[int, ...]  # for each replica, the rank that takes part
    pieces: tuple[Piece, ...]

    @property
    def elements(self) -> int:
        return sum(piece.region.elements for piece in self.pieces)


class _Part(Value):
    """A region of a parameter, and the ranks of one replica that hold it, lowest first."""

    region: TensorRegion
    ranks: tuple[int, ...]


class _Cut(Value):
    """How one layout cuts one parameter."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[_Part, ...]
    without: tuple[int, ...]  # the ranks that hold an empty part


class _CommonPiece(Value):
    """A region that no layout cuts further, and the ranks that hold it, by layout."""

    region: TensorRegion
    ranks: tuple[tuple[int, ...], ...]

    def holders(self) -> Iterator[tuple[int, ...]]:
        """For each copy in turn: the rank that holds it, in each layout."""
        for copy in range(max(map(len, self.ranks))):
            yield tuple(ranks[copy % len(ranks)] for ranks in self.ranks)


def lanes_of(layouts: Mapping[str, ReplicaLayout]) -> tuple[Lane, ...]:
    """The lanes of these replicas, the same at every rank; holders are in the order of ``layouts``.

    Raises ConfigError where a replica does not hold the whole model that the others hold, or cuts a parameter
    into parts that overlap.
    """
    kinds: dict[ReplicaLayout, str] = {}  # each layout -> its first replica
    first_alike = [kinds.setdefault(layout, replica) for replica, layout in layouts.items()]
    cuts = {
        replica: {name: _cut(replica, name, held) for name, held in _by_name(replica, layout).items()}
        for layout, replica in kinds.items()
    }
    _check_equal_models(cuts)
    places = [list(cuts).index(replica) for replica in first_alike]
    pieces: dict[tuple[int, ...], list[Piece]] = {}
    refined: dict[tuple[_Cut, ...], list[_CommonPiece]] = {}  # a cache: most parameters are cut alike
    groups: dict[tuple[tuple[int, ...], ...], int] = {}  # the ranks that hold copies -> group
    for name in sorted(next(iter(cuts.values()), {})):
        together = tuple(by_name[name] for by_name in cuts.values())
        if together not in refined:
            refined[together] = _refine(together)
        for common in refined[together]:
            has_copies = len(cuts) > 1 and any(len(ranks) > 1 for ranks in common.ranks)
            group = groups.setdefault(common.ranks, len(groups) + 1) if has_copies else 0
            for copy, holders in enumerate(common.holders()):
                piece = Piece(name, together[0].dtype, common.region, copy, group)
                pieces.setdefault(holders, []).append(piece)
    return tuple(
        Lane(tuple(holders[place] for place in places), tuple(shared)) for holders, shared in pieces.items()
    )


def lanes_of_rank(lanes: Sequence[Lane], place: int, rank: int) -> tuple[int, ...]:
    """The numbers of the lanes in which ``rank`` takes part, of the replica at ``place`` of the layouts."""
    return tuple(number for number, lane in enumerate(lanes) if lane.holders[place] == rank)


def _refine(cuts: Sequence[_Cut]) -> list[_CommonPiece]:
    """The largest pieces of one parameter that no layout cuts further, in order of their places.

    An empty piece comes last.
    """
    pieces = [_CommonPiece(TensorRegion.whole(cuts[0].shape), ())]
    for cut in cuts:
        pieces = [
            _CommonPiece(region, (*piece.ranks, part.ranks))
            for piece in pieces
            for part in cut.parts
            if (region := piece.region.common(part.region)).elements
        ]
    pieces.sort(key=lambda piece: piece.region.begin)
    if count := max(len(cut.without) for cut in cuts):
        # It tells the ranks with an empty part of the parameter whether it has a gradient.
        holders = [cut.without or tuple(rank for part in cut.parts for rank in part.ranks) for cut in cuts]
        nothing = TensorRegion.whole((0,) * len(cuts[0].shape))
        pieces.append(_CommonPiece(nothing, tuple(ranks[:count] for ranks in holders)))
    return pieces


def _check_equal_models(cuts: Mapping[str, Mapping[str, _Cut]]) -> None:
    """Raises ConfigError where replicas hold different parameters."""
    for replica, cut_by_name in cuts.items():
        first, reference = next(iter(cuts.items()))
        missing = sorted(reference.keys() ^ cut_by_name.keys())
        if missing:
            here, there = (first, replica) if missing[0] in reference else (replica, first)
            raise ConfigError(
                f"{here} has the parameter {missing[0]} and {there} has not: start every replica with the "
                "same model"
            )
        for name, cut in cut_by_name.items():
            if (cut.dtype, cut.shape) != (reference[name].dtype, reference[name].shape):
                raise ConfigError(
                    f"{name} is {reference[name].dtype}{list(reference[name].shape)} in {first} and "
                    f"{cut.dtype}{list(cut.shape)} in {replica}: start every replica with the same model"
                )


def _by_name(replica: str, layout: ReplicaLayout) -> dict[str, dict[int, HeldParameter]]:
    """The parts of every parameter by rank. Raises ConfigError for a name that a rank has twice."""
    held: dict[str, dict[int, HeldParameter]] = {}
    for rank, parameters in enumerate(layout.ranks):
        for parameter in parameters:
            ranks = held.setdefault(parameter.name, {})
            if rank in ranks:
                raise ConfigError(
                    f"rank {rank} of {replica} has two parameters named {parameter.name}: give every one its "
                    "own name"
                )
            ranks[rank] = parameter
    return held


def _cut(replica: str, name: str, held: Mapping[int, HeldParameter]) -> _Cut:
    """How ``replica`` cuts one parameter. Raises ConfigError unless its parts cover the parameter once."""
    first_rank, first = next(iter(held.items()))
    ranks: dict[TensorRegion, list[int]] = {}
    for rank, parameter in held.items():
        if (parameter.dtype, parameter.shape) != (first.dtype, first.shape):
            raise ConfigError(
                f"{name} is {first.whole} at rank {first_rank} of {replica} and {parameter.whole} at rank "
                f"{rank}: give parameters of different pipeline stages different names"
            )
        begin, sizes = parameter.region.begin, parameter.region.sizes
        if not len(begin) == len(sizes) == len(parameter.shape) or not all(
            at >= 0 and size >= 0 and at + size <= length
            for at, size, length in zip(begin, sizes, parameter.shape, strict=True)
        ):
            raise ConfigError(
                f"rank {rank} of {replica} describes a part of {name} that lies outside of {first.whole}: "
                "describe it by its offset and its sizes in the whole"
            )
        if parameter.region.elements:
            ranks.setdefault(parameter.region, []).append(rank)
    _check_parts(replica, first, ranks)
    parts = [_Part(region, tuple(holders)) for region, holders in ranks.items()]
    parts.sort(key=lambda part: part.region.begin)
    without = tuple(rank for rank, parameter in held.items() if not parameter.region.elements)
    return _Cut(first.dtype, first.shape, tuple(parts), without)


def _check_parts(replica: str, parameter: HeldParameter, ranks: Mapping[TensorRegion, list[int]]) -> None:
    """Raises ConfigError unless these parts cover the parameter, without an overlap."""
    try:
        overlap = overlapping(list(ranks))
    except TooManyComparisons as error:
        raise ConfigError(
            f"{replica} cuts {parameter.name} into {len(ranks)} parts that lie in too many ways beside each "
            "other: cut it along fewer dimensions"
        ) from error
    if overlap is not None:
        first, second = overlap
        raise ConfigError(
            f"ranks {ranks[first][0]} and {ranks[second][0]} of {replica} hold parts of "
            f"{parameter.name} that overlap and are not equal: cut it into parts that do not overlap"
        )
    count, covered = TensorRegion.whole(parameter.shape).elements, sum(r.elements for r in ranks)
    if covered != count:
        raise ConfigError(
            f"the ranks of {replica} hold {covered} of the {count} elements of {parameter.name}: have every "
            "replica hold the whole model"
        )
