"""Data that are read in order and dealt out in lanes: one lane for each replica that a job starts with.

Micro-batch m of a step belongs to lane m // n, for n micro-batches of a lane in each step. It is number
``step * n + m % n`` of its lane. So the committed step gives the position in every lane.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset


class PositionStream(IterableDataset):  # type: ignore[type-arg]
    """The positions 0, 1, 2, ... themselves, for ``session.loader``: its ``collate_fn`` reads the data."""

    def __iter__(self) -> Iterator[int]:
        return self.iterate_from(0)

    def iterate_from(self, position: int) -> Iterator[int]:
        """Yield the positions from ``position`` on."""
        while True:
            yield position
            position += 1


class DealtData:
    """``read(lane, begin)`` reads a lane's micro-batches from number ``begin`` on. For one thread."""

    def __init__(self, read: Callable[[int, int], Iterator[Any]], lanes: int, per_step: int) -> None:
        self.lanes = lanes
        self._read = read
        self._per_step = per_step
        self._readers: dict[int, _LaneReader] = {}

    def micro_batch(self, positions: Sequence[int]) -> Any:
        """Return the micro-batch at the one position in ``positions``."""
        step, number = divmod(positions[0], self.lanes * self._per_step)
        lane, part = divmod(number, self._per_step)
        return self._reader(lane).take(step * self._per_step + part, step * self._per_step)

    def read_past(self, lane: int, step: int) -> None:
        """Read the lane up to the beginning of ``step``, so that a micro-batch of the step comes at once."""
        if lane < self.lanes:
            self._reader(lane).read_past(step * self._per_step)

    def _reader(self, lane: int) -> "_LaneReader":
        if lane not in self._readers:
            self._readers[lane] = _LaneReader(lambda begin: self._read(lane, begin))
        return self._readers[lane]


class _LaneReader:
    """Micro-batches of a lane by number. For a number before those that are kept it reads again."""

    def __init__(self, read: Callable[[int], Iterator[Any]]) -> None:
        self._read = read
        self._batches: Iterator[Any] | None = None
        self._next = 0
        self._kept: dict[int, Any] = {}  # those of the step under way, which may be computed again

    def take(self, number: int, first: int) -> Any:
        """Return micro-batch ``number``; forget those before ``first``."""
        self._kept = {n: batch for n, batch in self._kept.items() if n >= first}
        if number not in self._kept:
            self.read_past(number)
            assert self._batches is not None
            self._kept[number] = next(self._batches)
            self._next += 1
        return self._kept[number]

    def read_past(self, number: int) -> None:
        """Go on to ``number``, which comes next then, unless it is kept."""
        if number in self._kept:
            return
        if self._batches is None or number < self._next:
            self._batches, self._next = self._read(number), number
        while self._next < number:
            next(self._batches)
            self._next += 1
