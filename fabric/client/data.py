"""The order of the data: a pure function of (data set size, seed, step), whoever computes it.

Pass k over the data set is the permutation ``numpy.random.Generator(PCG64([seed, k])).permutation(size)``;
the passes are concatenated. Step s covers positions [s*G, (s+1)*G) of that, and its micro-batch i covers
[i*m, (i+1)*m) of those. So the committed step is the data position, and nothing else must be saved.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xxhash

from fabric.errors import ConfigError


@lru_cache(maxsize=4)
def _permutation(dataset_size: int, seed: int, number: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    generator = np.random.Generator(np.random.PCG64([seed, number]))
    return generator.permutation(dataset_size)


def sample_indices(dataset_size: int, seed: int, start: int, count: int) -> list[int]:
    """Data set indices at positions ``start`` to ``start + count`` of the concatenated permutations."""
    found: list[int] = []
    while count > 0:
        number, offset = divmod(start, dataset_size)
        part = _permutation(dataset_size, seed, number)[offset : offset + count]
        found.extend(int(i) for i in part)
        start += len(part)
        count -= len(part)
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """How a data set is cut into steps and micro-batches."""

    dataset_size: int
    global_batch_size: int
    micro_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.dataset_size < 1:
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

    @property
    def micro_batches(self) -> int:
        """How many micro-batches make a step."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def hash(self) -> str:
        """16 hex digits that differ where the data order does."""
        text = f"{self.dataset_size} {self.global_batch_size} {self.micro_batch_size} {self.seed}"
        return xxhash.xxh3_64_hexdigest(text.encode())

    def samples(self, step: int, micro_batch: int) -> list[int]:
        """Data set indices of one micro-batch."""
        start = step * self.global_batch_size + micro_batch * self.micro_batch_size
        return sample_indices(self.dataset_size, self.seed, start, self.micro_batch_size)


def collate(samples: Sequence[Any]) -> Any:
    """torch's default: stack tensors, keep the structure."""
    return torch.utils.data.default_collate(list(samples))


class Loader:
    """Micro-batches of a map-style data set on request, read ahead by ``num_workers`` threads.

    What was read ahead and is no longer wanted (its step is past) is discarded.
    """

    def __init__(
        self,
        dataset: Any,
        plan: Plan,
        collate: Callable[[Sequence[Any]], Any],
        num_workers: int = 0,
    ) -> None:
        self.plan = plan
        self._dataset = dataset
        self._collate = collate
        self._ahead: dict[tuple[int, int], Future[Any]] = {}
        self._pool = ThreadPoolExecutor(num_workers, "fabric-loader") if num_workers > 0 else None

    def read_ahead(self, step: int, micro_batches: Iterable[int]) -> None:
        """Begin to read these micro-batches; forget those of earlier steps."""
        if self._pool is None:
            return
        for key in [k for k in self._ahead if k[0] < step]:
            self._ahead.pop(key).cancel()
        for micro_batch in micro_batches:
            if (step, micro_batch) not in self._ahead:
                future = self._pool.submit(self._read, step, micro_batch)
                self._ahead[step, micro_batch] = future

    def fetch(self, step: int, micro_batch: int) -> Any:
        """One collated micro-batch."""
        future = self._ahead.pop((step, micro_batch), None)
        return future.result() if future is not None else self._read(step, micro_batch)

    def _read(self, step: int, micro_batch: int) -> Any:
        return self._collate([self._dataset[i] for i in self.plan.samples(step, micro_batch)])

    def close(self) -> None:
        """End the reading threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
