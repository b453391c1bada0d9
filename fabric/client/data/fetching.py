"""Reads the samples of one micro-batch, as torch's DataLoader reads them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fabric.client.data.randomness import seed_everything
from fabric.errors import ConfigError, FabricError

# Iterable data sets: every replica reads the stream from its beginning to the committed position.
#
# An iterable data set must give the same samples in the same order every time it is iterated, on every
# replica. A data set with ``set_epoch`` is told the number of the iteration first, so it may shuffle by
# that number. The iteration is repeated endlessly; position p is sample number p of the repetition. Step
# s covers the positions [s*G, (s+1)*G) for global batch size G. So the committed step gives the position,
# and no position is saved. A replica reads the whole global batch of a step, because it may inherit any
# part of it.
#
# A replica that joins, or a job that goes back to an earlier state, must get to its position. A data set
# with ``iterate_from(position)`` gives an iterator that begins there. Other data sets are read up to the
# position.


class IterableStream:
    """Samples of an iterable data set by position. A read at an earlier position starts a new iteration."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._from = getattr(dataset, "iterate_from", None)
        self._iterator: Iterator[Any] | None = None
        self._number = 0  # of the iteration
        self._next = 0  # the position that the iterator gives next
        self._kept: dict[int, Any] = {}
        self._lock = threading.Lock()

    def read(self, first: int, positions: list[int]) -> list[Any]:
        """Return the samples at ``positions``, and forget those before ``first``; safe from any thread."""
        with self._lock:
            for position in [p for p in self._kept if p < first]:
                del self._kept[position]
            if any(p not in self._kept and p < self._next for p in positions) or self._iterator is None:
                self._begin(first)
            while self._next <= max(positions):
                sample = self._draw()
                if self._next >= first:
                    self._kept[self._next] = sample
                self._next += 1
            return [self._kept[p] for p in positions]

    def _begin(self, first: int) -> None:
        self._kept.clear()
        if self._from is not None:
            self._iterator, self._next = iter(self._from(first)), first
        else:
            self._iterator, self._next = self._iterate(0), 0

    def _iterate(self, number: int) -> Iterator[Any]:
        self._number = number
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(number)
        return iter(self._dataset)

    def _draw(self) -> Any:
        """Return the next sample; after the last comes the first."""
        assert self._iterator is not None
        for sample in self._iterator:
            return sample
        if self._from is not None:
            raise FabricError(
                f"iterate_from ended before position {self._next}: it must go on for ever (begin again after "
                "the last sample)"
            )
        self._iterator = self._iterate(self._number + 1)
        for sample in self._iterator:
            return sample
        raise ConfigError("the data set is empty: its iteration gives no sample")


Collate = Callable[[Sequence[Any]], Any]


class Fetcher(Protocol):
    """How the samples of a micro-batch are read. ``items``: their indices, or positions of a stream."""

    @property
    def collate(self) -> Collate:
        """The function that makes a micro-batch of samples."""

    def read(self, step: int, items: Sequence[Any]) -> Any:
        """Return the collated micro-batch of these items."""

    def count(self, items: Sequence[Any]) -> int:
        """Return the number of samples."""

    def seeded(self, step: int, micro_batch: int, items: Sequence[Any]) -> Any:
        """Seed every generator first, so that the micro-batch is the same on every replica."""


@dataclass(slots=True)
class IndexFetcher:
    """Reads a data set with an index, which is told the number of each pass where it has ``set_epoch``."""

    dataset: Any
    collate: Collate
    seed: int
    batched: bool = False  # the one item of a micro-batch is a list of indices, of a batch sampler
    pass_of: Callable[[int, int], int] | None = None  # if the data set has ``set_epoch``
    _pass: int = -1  # that the data set was told last

    def read(self, step: int, items: Sequence[Any]) -> Any:
        indices = items[0] if self.batched else items
        together = getattr(self.dataset, "__getitems__", None)
        return self.collate(together(indices) if together else [self.dataset[i] for i in indices])

    def count(self, items: Sequence[Any]) -> int:
        return sum(len(batch) for batch in items) if self.batched else len(items)

    def seeded(self, step: int, micro_batch: int, items: Sequence[Any]) -> Any:
        if self.pass_of is not None and self._pass != (number := self.pass_of(step, micro_batch)):
            self._pass = number
            seed_everything(self.seed, number, -1)  # the same draws on replicas that begin it elsewhere
            self.dataset.set_epoch(number)
        seed_everything(self.seed, step, micro_batch)
        return self.read(step, items)


@dataclass(frozen=True, slots=True)
class StreamFetcher:
    """Reads a stream by position."""

    stream: IterableStream
    collate: Collate
    seed: int
    global_batch_size: int

    def read(self, step: int, items: Sequence[Any]) -> Any:
        # Keep the samples of the previous step: this member may still inherit a part of that step.
        first = max(0, step - 1) * self.global_batch_size
        return self.collate(self.stream.read(first, list(items)))

    def count(self, items: Sequence[Any]) -> int:
        return len(items)

    def seeded(self, step: int, micro_batch: int, items: Sequence[Any]) -> Any:
        seed_everything(self.seed, step, micro_batch)
        return self.read(step, items)
