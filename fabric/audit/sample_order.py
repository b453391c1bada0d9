"""Which samples belong to which micro-batch, recomputed from the documented rule alone.

The data of a job is the concatenation of permutations of its dataset: pass k over it is
``numpy.random.Generator(numpy.random.PCG64([seed, k])).permutation(dataset_size)``. Step s takes the
positions [s*G, (s+1)*G), and its micro-batch i takes the positions [i*m, (i+1)*m) of the step. The trainers
have their own code for this rule; the audit verifies that both agree.

Other kinds of data have other rules:

- ``stream``: a sample is its position.
- ``order`` (the digest of a sampler's order): the first replica that lists the samples of a micro-batch is
  believed, and all others must list the same.
- ``epoch_end``: a pass is a whole number of steps. Under "short" its last step has the samples that are left,
  and a micro-batch may have fewer samples, or none. Under "drop" the samples that are left are dropped.
- ``shards``: the dataset and the micro-batches of a step are divided evenly among the shards. A micro-batch
  draws only from its shard, in the shard's own order (``PCG64([seed, k, shard + 1])``).
- ``sampler``: a pass is a whole number of steps.
"""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A run reads its passes in order, so two neighbouring passes are enough.
_CACHED_PASSES = 2


class DataOrder:
    """The data order of one job; ``data`` is the ``data`` field of a journal's ``start`` line."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.dataset_size = data["dataset_size"]
        self.global_batch_size = data["global_batch_size"]
        self.micro_batch_size = data["micro_batch_size"]
        self.micro_batches = data["micro_batches"]
        self.seed = data["seed"]
        self._passes: dict[int, NDArray[np.int64]] = {}
        self._learned: dict[tuple[int, int], list[int]] = {}

    def learn(self, step: int, micro_batch: int, samples: list[int]) -> None:
        """Believe the first list of a micro-batch's samples, where a sampler made the order."""
        if "order" in self.data:
            self._learned.setdefault((step - self.data.get("first_step", 0), micro_batch), samples)

    def samples(self, step: int, micro_batch: int) -> list[int]:
        """Return the dataset indices of micro-batch ``micro_batch`` of step ``step``, in order."""
        step -= self.data.get("first_step", 0)
        if "order" in self.data:
            return self._learned.get((step, micro_batch), [])
        if "shards" in self.data:
            return self._sharded(step, micro_batch)
        offset = micro_batch * self.micro_batch_size
        first, size = self._positions(step)
        return [self._at(first + i) for i in range(offset, min(offset + self.micro_batch_size, size))]

    def step_samples(self, step: int) -> list[int]:
        """Return the dataset indices of the whole global batch of step ``step``, in order."""
        return [i for number in range(self.micro_batches) for i in self.samples(step, number)]

    def _positions(self, step: int) -> tuple[int, int]:
        """Return the first position of a step, and how many it has."""
        if "epoch_end" not in self.data:
            return step * self.global_batch_size, self.global_batch_size
        steps, left = divmod(self.dataset_size, self.global_batch_size)
        is_short = left > 0 and self.data["epoch_end"] == "short"
        number, within = divmod(step, steps + is_short)
        first = number * self.dataset_size + within * self.global_batch_size
        return first, left if within == steps else self.global_batch_size

    def _sharded(self, step: int, micro_batch: int) -> list[int]:
        shards = self.data["shards"]
        size, larger = divmod(self.micro_batches, shards)
        counts = [size + (number < larger) for number in range(shards)]
        shard = next(n for n in range(shards) if micro_batch < sum(counts[: n + 1]))
        begin = shard * self.dataset_size // shards
        length = (shard + 1) * self.dataset_size // shards - begin
        number = step * counts[shard] + micro_batch - sum(counts[:shard])
        samples = []
        for position in range(number * self.micro_batch_size, (number + 1) * self.micro_batch_size):
            words = [self.seed, position // length, shard + 1]
            order = np.random.Generator(np.random.PCG64(words)).permutation(length)
            samples.append(begin + int(order[position % length]))
        return samples

    def _at(self, position: int) -> int:
        if "stream" in self.data:
            return position
        if "sampler" in self.data:
            step, within = divmod(position, self.global_batch_size)
            number, step = divmod(step, self.dataset_size // self.global_batch_size)
            offset = step * self.global_batch_size + within
        else:
            number, offset = divmod(position, self.dataset_size)
        if number not in self._passes:
            if len(self._passes) >= _CACHED_PASSES:
                del self._passes[min(self._passes)]
            generator = np.random.Generator(np.random.PCG64([self.seed, number]))
            self._passes[number] = generator.permutation(self.dataset_size)
        return int(self._passes[number][offset])


class StagedOrder:
    """The data order of a job whose loop changes its data: each stage begins at a step."""

    def __init__(self, first: Mapping[str, Any], later: Mapping[int, Mapping[str, Any]]) -> None:
        self._orders = [DataOrder(first), *(DataOrder(later[begin]) for begin in sorted(later))]
        self._begins = [0, *sorted(later)]

    def at(self, step: int) -> DataOrder:
        """Return the order of the stage that has ``step``."""
        return self._orders[bisect_right(self._begins, step) - 1]
