"""The order of a ring: which member reduces which elements, in which pieces. See ``reduce_ops`` for
arithmetic.

A buffer of L elements is cut into one segment per member. In the reduce phase segment s starts at member s
and travels the ring once. Each member adds its own elements, and member s-1 computes

    ((x[s] + x[s+1]) + x[s+2]) + ... + x[s-1]      (indices modulo the number of members)

In the gather phase the result travels the ring again, and all members copy it. So the order of summation
depends on ring positions and the length alone, never on timing. All members get the same bits, because one
member computed them.

Segments and chunks are cut at multiples of ALIGNMENT elements. Every cut is a function of length, number of
members and chunk size, so members that disagree about any of these must fail and not sum.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import torch

# 16 elements are a cache line of float32, so no two segments share one.
ALIGNMENT = 16

# The number of each type on the wire. New types may be added, but a number is never reused.
DTYPE_CODES: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.float64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.int32: 5,
    torch.int64: 6,
}


@dataclass(frozen=True, slots=True)
class RingPiece:
    """One chunk that travels over one link: elements [start, stop) of a partial sum or of the result."""

    sequence: int
    hop: int  # number of links that these elements have taken; at hop 0 they are a member's own elements
    gather: bool  # whether the elements are the result
    start: int
    stop: int
    last: bool  # whether the receiver keeps the piece: the sum is complete, or all have the result
    everybody: bool  # whether all members have forwarded the piece, so all have entered the exchange
    # Number of the received piece that the sender forwards as this one, -1 for none; both ends name a piece.
    needs: int = field(default=-1, compare=False)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The pieces that one member sends and receives, in order."""

    sends: tuple[RingPiece, ...]
    receives: tuple[RingPiece, ...]

    @property
    def free(self) -> int:
        """How many of the first sends are own data. Without groups a later sends[i] forwards
        receives[i - free]."""
        return next((piece.sequence for piece in self.sends if piece.needs >= 0), len(self.sends))


def segment_bounds(length: int, world: int) -> list[tuple[int, int]]:
    """Return [start, stop) of each of ``world`` segments of ``length`` elements; the last may be empty."""
    units = -(-length // ALIGNMENT)
    edges = [min(length, (units * i // world) * ALIGNMENT) for i in range(world)] + [length]
    return [(edges[i], edges[i + 1]) for i in range(world)]


@lru_cache(maxsize=256)  # a model's buckets are the same in each step
def schedule(
    length: int, world: int, position: int, chunk_elements: int, group: int = 0, cut: int = 0
) -> Schedule:
    """Return the pieces that member ``position`` of ``world`` sends and receives for ``length`` elements.

    ``chunk_elements`` is rounded down to a multiple of ALIGNMENT, but is never zero. ``group``: so many
    pieces of each segment go through all hops before the next ones begin (0: all of them). A device keeps a
    partial sum until it is passed on, so its memory never holds more than two groups. No piece has elements
    on both sides of element ``cut``.
    """
    chunk = max(ALIGNMENT, chunk_elements // ALIGNMENT * ALIGNMENT)
    bounds = segment_bounds(length, world)
    # Of the 2(N-1) hops of N members N-1 reduce and N-1 gather. A piece received at hop k is sent at hop k+1.
    receives = _pieces(bounds, (position - 1) % world, chunk, group, cut, {})
    arrivals = {(piece.hop + 1, piece.start): piece.sequence for piece in receives}
    return Schedule(_pieces(bounds, position, chunk, group, cut, arrivals), receives)


def _pieces(
    bounds: list[tuple[int, int]],
    first: int,
    chunk: int,
    group: int,
    cut: int,
    arrivals: dict[tuple[int, int], int],
) -> tuple[RingPiece, ...]:
    world = len(bounds)
    rows = []
    for hop in range(2 * (world - 1)):
        start, stop = bounds[(first - hop) % world]
        lows = [*range(start, min(stop, cut), chunk), *range(max(start, cut), stop, chunk)]
        for number, (low, high) in enumerate(zip(lows, [*lows[1:], stop], strict=False)):
            rows.append((number // group if group else 0, hop, low, high))
    return tuple(
        RingPiece(
            sequence,
            hop,
            hop >= world - 1,
            low,
            high,
            last=hop in (world - 2, 2 * world - 3),
            everybody=hop >= world - 2,
            needs=arrivals.get((hop, low), -1),
        )
        for sequence, (_, hop, low, high) in enumerate(sorted(rows))
    )
