"""Reads the samples of one micro-batch, as torch's DataLoader reads them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fabric.client.data.iterable_stream import IterableStream
from fabric.client.data.randomness import seed_everything

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
