"""The order of the data: a pure function of data set size, seed and step, the same on every replica.

Pass k over the data set is the permutation ``numpy.random.Generator(PCG64([seed, k])).permutation(size)``.
With a sampler it is the list that the sampler yields for pass k (see ``fabric.client.data.orders``). Position
p is number ``p % size`` of pass ``p // size``.

``epoch_end`` says what the last step of a pass has, for global batch size G. "continue": the passes are
concatenated, and step s covers the positions [s*G, (s+1)*G). With "short" and "drop" a pass is a whole number
of steps. "short": its last step has the samples that are left. "drop": these samples are dropped.

Micro-batch i of a step covers positions [i*m, (i+1)*m) of the step, for micro-batch size m. In a short step a
micro-batch may have fewer samples, or none. So the committed step gives the data position.

Data that only some replicas can read (``redundancy`` above 0) are cut into n shards, one per data slot. Shard
h has the indices [h*size//n, (h+1)*size//n). The micro-batches of a step are divided among the shards in
order, as evenly as possible. Pass k of shard h has its own order, from ``PCG64([seed, k, h + 1])``.

A data set without a size is a stream: its samples are identified by position (see
``fabric.client.data.fetching``).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fabric.client.data.orders import SamplerOrder
from fabric.errors import ConfigError
from fabric.protocol.rules.assignment import cut

EPOCH_ENDS = ("continue", "short", "drop")


@lru_cache(maxsize=32)
def _permutation(
    dataset_size: int, seed: int, number: int, shard: int
) -> "np.ndarray[Any, np.dtype[np.int64]]":
    words = [seed, number] if shard < 0 else [seed, number, shard + 1]
    return np.random.Generator(np.random.PCG64(words)).permutation(dataset_size)


def sample_indices(dataset_size: int, seed: int, start: int, count: int, shard: int = -1) -> list[int]:
    """Return ``count`` data set indices from position ``start`` of the concatenated permutations."""
    indices: list[int] = []
    while count > 0:
        number, offset = divmod(start, dataset_size)
        part = _permutation(dataset_size, seed, number, shard)[offset : offset + count]
        indices.extend(part.tolist())
        start += len(part)
        count -= len(part)
    return indices


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """How a data set is cut into steps and micro-batches."""

    dataset_size: int  # positions of a pass: samples, or what a sampler yields; 0 for a stream
    global_batch_size: int
    micro_batch_size: int
    seed: int
    shards: int = 0  # number of shards; 0: every replica can read all data
    is_stream: bool = False
    epoch_end: str = "continue"
    order: SamplerOrder | None = None  # None: each pass is a permutation of the data set

    def __post_init__(self) -> None:
        if self.dataset_size < 1 and not self.is_stream:
            raise ConfigError(
                "the data set is empty: give session.loader a data set with at least one sample"
            )
        if self.micro_batch_size < 1 or self.global_batch_size % self.micro_batch_size:
            raise ConfigError(
                f"global_batch_size {self.global_batch_size} must be a multiple of "
                f"micro_batch_size {self.micro_batch_size}"
            )
        if self.global_batch_size < 1 or self.seed < 0:
            raise ConfigError("global_batch_size must be at least 1 and the seed must not be negative")
        if self.shards and (self.micro_batches < self.shards or self.dataset_size < self.shards):
            raise ConfigError(
                f"redundancy needs a micro-batch and a sample for each of the {self.shards} replicas: a step "
                f"has {self.micro_batches} micro-batches and the data set {self.dataset_size} samples"
            )
        self._check_epoch_end()

    def _check_epoch_end(self) -> None:
        if self.epoch_end not in EPOCH_ENDS:
            raise ConfigError(f'epoch_end is "{self.epoch_end}": it must be "continue", "short" or "drop"')
        if self.epoch_end != "continue" and (self.is_stream or self.shards):
            kind = "redundancy" if self.shards else "an iterable data set"
            raise ConfigError(f'epoch_end="{self.epoch_end}" does not go with {kind}: say "continue"')
        if self.order is not None and (self.is_stream or self.shards):
            kind = "redundancy, whose shards have an order of their own" if self.shards else "iterable data"
            raise ConfigError(f"the sampler {self.order.name} does not go with {kind}: leave it out")
        if self.epoch_end == "drop" and self.dataset_size < self.global_batch_size:
            raise ConfigError(
                f"a pass has {self.dataset_size} samples, too few for one step of {self.global_batch_size}: "
                "take a smaller batch, or keep the short last step"
            )

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a step."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def steps_per_pass(self) -> int:
        """The number of steps of a pass; 0 where passes are concatenated."""
        full = self.dataset_size // self.global_batch_size
        if self.epoch_end == "short":
            return full + bool(self.dataset_size % self.global_batch_size)
        return full if self.epoch_end == "drop" else 0

    def positions(self, step: int, micro_batch: int) -> range:
        """Return the positions of one micro-batch; without shards."""
        first, end = step * self.global_batch_size, None
        if self.steps_per_pass:
            number, within = divmod(step, self.steps_per_pass)
            first = number * self.dataset_size + within * self.global_batch_size
            end = (number + 1) * self.dataset_size
        start = first + micro_batch * self.micro_batch_size
        stop = start + self.micro_batch_size
        return range(start, stop if end is None else max(start, min(stop, end)))

    def pass_of(self, step: int, micro_batch: int) -> int:
        """Return the number of the pass in which a micro-batch begins; without shards."""
        return self.positions(step, micro_batch).start // self.dataset_size

    def samples(self, step: int, micro_batch: int) -> list[int]:
        """Return the data set indices of one micro-batch, for the journal; of a stream the positions."""
        if self.shards:
            return self._sharded(step, micro_batch)
        positions = self.positions(step, micro_batch)
        if self.order is not None:
            return self.order.indices(positions)
        if self.is_stream:
            return list(positions)
        return sample_indices(self.dataset_size, self.seed, positions.start, len(positions))

    def items(self, step: int, micro_batch: int) -> list[Any]:
        """Return what the data set is indexed with, for one micro-batch; of a stream positions."""
        if self.order is None:
            return self.samples(step, micro_batch)
        return self.order.items(self.positions(step, micro_batch))

    def with_samples(self, step: int, micro_batches: Iterable[int]) -> list[int]:
        """Return those of ``micro_batches`` that have a sample."""
        if not self.steps_per_pass:
            return list(micro_batches)
        return [i for i in micro_batches if self.positions(step, i)]

    def _sharded(self, step: int, micro_batch: int) -> list[int]:
        parts = cut(self.micro_batches, [1] * self.shards)
        shard = next(h for h, part in enumerate(parts) if micro_batch in part)
        begin, end = self.shard(shard)
        number = step * len(parts[shard]) + micro_batch - parts[shard].start
        indices = sample_indices(
            end - begin, self.seed, number * self.micro_batch_size, self.micro_batch_size, shard
        )
        return [begin + i for i in indices]

    def shard(self, number: int) -> tuple[int, int]:
        """Return the indices [begin, end) of shard ``number``."""
        return (
            number * self.dataset_size // self.shards,
            (number + 1) * self.dataset_size // self.shards,
        )

    def describe(self) -> dict[str, Any]:
        """Return all values that determine the order of the data, for the journal."""
        body: dict[str, Any] = {
            "dataset_size": self.dataset_size,
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "seed": self.seed,
            "micro_batches": self.micro_batches,
        }
        if self.shards:
            body["shards"] = self.shards
        if self.is_stream:
            body["stream"] = 1
        if self.epoch_end != "continue":
            body["epoch_end"] = self.epoch_end
        if self.order is not None:
            body["order"] = self.order.digest
        return body
