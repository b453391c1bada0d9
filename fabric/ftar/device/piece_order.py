"""The pieces that go over a device ring, and their order: pure.

The segments, and the order of summation, are those of every ring (``fabric.ftar.ring_schedule``). Only the
order of a device ring's pieces differs: a group goes through all hops before the next group begins. A partial
sum stays in device memory until it is passed on. So this memory never holds more than two groups, whatever
the length of the buffer.
"""

from dataclasses import dataclass
from typing import NamedTuple

from fabric.ftar.ring_schedule import ALIGNMENT, segment_bounds


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
    receives = _pieces(bounds, (position - 1) % world, chunk, group, {})
    arrivals = {(p.hop, p.start): p.sequence for p in receives}
    return PieceOrder(_pieces(bounds, position, chunk, group, arrivals), receives)


def _pieces(
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
