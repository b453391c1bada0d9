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

from dataclasses import dataclass
from typing import NamedTuple

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
    hop: int  # number of links that these elements have taken
    gather: bool  # whether the elements are the result
    start: int
    stop: int
    last: bool  # whether the receiver keeps the piece: the sum is complete, or all have the result
    everybody: bool  # whether all members have forwarded the piece, so all have entered the exchange


@dataclass(frozen=True, slots=True)
class Schedule:
    """The pieces that one member sends and receives, in order."""

    sends: tuple[RingPiece, ...]
    receives: tuple[RingPiece, ...]
    free: int  # the first ``free`` sends are own data; a later sends[i] forwards receives[i - free]


def segment_bounds(length: int, world: int) -> list[tuple[int, int]]:
    """Return [start, stop) of each of ``world`` segments of ``length`` elements; the last may be empty."""
    units = -(-length // ALIGNMENT)
    edges = [min(length, (units * i // world) * ALIGNMENT) for i in range(world)] + [length]
    return [(edges[i], edges[i + 1]) for i in range(world)]


def schedule(length: int, world: int, position: int, chunk_elements: int) -> Schedule:
    """Return the pieces that member ``position`` of ``world`` sends and receives for ``length`` elements.

    ``chunk_elements`` is rounded down to a multiple of ALIGNMENT, but is never zero.
    """
    chunk = max(ALIGNMENT, chunk_elements // ALIGNMENT * ALIGNMENT)
    bounds = segment_bounds(length, world)
    # Of the 2(N-1) hops of N members N-1 reduce and N-1 gather. A piece received at hop k is sent at hop k+1.
    sends = _pieces(bounds, position, chunk)
    receives = _pieces(bounds, position - 1, chunk)
    start, stop = bounds[position]
    return Schedule(tuple(sends), tuple(receives), -(-(stop - start) // chunk))


def _pieces(bounds: list[tuple[int, int]], first: int, chunk: int) -> list[RingPiece]:
    world = len(bounds)
    pieces: list[RingPiece] = []
    for hop in range(2 * (world - 1)):
        start, stop = bounds[(first - hop) % world]
        gather, everybody = hop >= world - 1, hop >= world - 2
        last = hop in (world - 2, 2 * world - 3)
        for low in range(start, stop, chunk):
            high = min(low + chunk, stop)
            pieces.append(RingPiece(len(pieces), hop, gather, low, high, last, everybody))
    return pieces


# The pieces that go over a device ring, and their order: pure.
#
# The segments, and the order of summation, are those of every ring. Only the order of a device ring's
# pieces differs: a group goes through all hops before the next group begins.
# A partial sum stays in device memory until it is passed on. So this memory never holds more than two
# groups, whatever the length of the buffer.


@dataclass(frozen=True, slots=True)
class DevicePiece:
    """Elements [start, stop) on their way over one link."""

    sequence: int
    hop: int  # number of links that these elements have taken; at hop 0 they are a member's own elements
    start: int
    stop: int
    gather: bool  # whether the elements are the result
    last: bool  # whether the receiver's elements complete the sum
    everybody: bool  # whether the arrival proves that all members have entered the exchange
    needs: int  # number of the received piece that this piece forwards, -1 for none


class PieceOrder(NamedTuple):
    """The pieces of one member, each list in order."""

    sends: list[DevicePiece]
    receives: list[DevicePiece]


def order_pieces(length: int, world: int, position: int, chunk_elements: int, group: int) -> PieceOrder:
    """Order the pieces of member ``position`` of ``world`` for ``length`` elements.

    Pieces have at most ``chunk_elements`` (rounded down to ALIGNMENT, but never zero) elements, and
    ``group`` pieces of each segment travel together.
    """
    chunk = max(ALIGNMENT, chunk_elements // ALIGNMENT * ALIGNMENT)
    bounds = segment_bounds(length, world)
    receives = _device_pieces(bounds, (position - 1) % world, chunk, group, {})
    arrivals = {(p.hop, p.start): p.sequence for p in receives}
    return PieceOrder(_device_pieces(bounds, position, chunk, group, arrivals), receives)


def _device_pieces(
    bounds: list[tuple[int, int]], first: int, chunk: int, group: int, arrivals: dict[tuple[int, int], int]
) -> list[DevicePiece]:
    world = len(bounds)
    rows = []
    for hop in range(2 * (world - 1)):
        start, stop = bounds[(first - hop) % world]
        for number, low in enumerate(range(start, stop, chunk)):
            rows.append((number // group, hop, number, low, min(low + chunk, stop)))
    return [
        DevicePiece(
            sequence,
            hop,
            low,
            high,
            gather=hop >= world - 1,
            last=hop == world - 2,
            everybody=hop >= world - 2,
            needs=arrivals.get((hop - 1, low), -1),
        )
        for sequence, (_, hop, _, low, high) in enumerate(sorted(rows))
    ]
