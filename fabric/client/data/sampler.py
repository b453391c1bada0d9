"""``session.sampler``: the data order for the DataLoader of a loop that is not ``session.steps``.

The sampler uses policy shrink: the global batch of a step is cut into one part per data slot. This replica
draws the part of its data slot. The part of an absent replica is skipped, which the commit records. A pass
over the data set has ``size // global_batch_size`` steps and leaves out the remaining samples.

A DataLoader draws ahead of the computation. The part of a data slot does not depend on the roster, so batches
drawn ahead stay valid while this replica makes every step. After an absence the batches drawn for past steps
are discarded: their gradient gets no weight.

A loop whose batch size times its accumulation differs from ``per_step`` is refused with both numbers. Too few
samples show in the number drawn. Too many samples show only in the DataLoader's batch size, because a
DataLoader may draw ahead without limit.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler

from fabric.client.data.loader import sample_indices
from fabric.errors import ConfigError
from fabric.protocol.rules.assignment import cut


class StepSampler(torch.utils.data.Sampler[int]):
    """The indices of this data slot, from the committed step to the end of the pass over the data.

    Every step gives ``per_step`` indices, which must equal the loop's batch size times its accumulation.
    ``committed_step`` returns the job's step.
    """

    def __init__(
        self,
        size: int,
        global_batch_size: int,
        seed: int,
        data_slot: tuple[int, int],
        committed_step: Callable[[], int],
    ) -> None:
        number, data_slots = data_slot
        if not 0 < global_batch_size <= size or global_batch_size % data_slots:
            raise ConfigError(
                f"global_batch_size {global_batch_size} must be from 1 to the data set's size, {size}, and a "
                f"multiple of the {data_slots} replicas"
            )
        if seed < 0:
            raise ConfigError("the seed must not be negative")
        self.size, self.global_batch_size, self.seed = size, global_batch_size, seed
        self.data_slot, self.data_slots = number, data_slots
        self.steps_per_pass = size // global_batch_size
        self.per_step = global_batch_size // data_slots
        self._part = cut(global_batch_size, [1] * data_slots)[number]
        self._committed_step = committed_step
        self._drawn: deque[int] = deque()  # steps of drawn samples that are not exchanged yet
        self._begin()

    def _begin(self) -> None:
        """Begin an iteration, and forget the samples drawn in the one before: the loop never uses them."""
        self._drawn.clear()
        self._yielded = self._exchanged = 0

    def __len__(self) -> int:
        """Return the number of indices of one pass on this data slot."""
        return self.steps_per_pass * self.per_step

    def __iter__(self) -> Iterator[int]:
        self._begin()
        number = self._committed_step() // self.steps_per_pass
        while True:
            step = self._committed_step() + len(self._drawn)
            if step // self.steps_per_pass != number:
                return
            self._drawn.append(step)
            yield from self._counted(step)

    def _counted(self, step: int) -> Iterator[int]:
        for index in self.indices(step):
            self._yielded += 1
            yield index

    def indices(self, step: int) -> list[int]:
        """Return the data set indices of this data slot's part of ``step``."""
        number, within = divmod(step, self.steps_per_pass)
        start = number * self.size + within * self.global_batch_size
        batch = sample_indices(self.size, self.seed, start, self.global_batch_size)
        return batch[self._part.start : self._part.stop]

    def take(self, step: int) -> bool:
        """Return whether the oldest batches that the loop drew are those of ``step``, which it exchanges now.

        Raises ConfigError where the loop did not draw a whole step.
        """
        mistake = self._mistake()
        if mistake:
            raise ConfigError(
                f"{mistake}, and sampler.per_step is {self.per_step}: give the DataLoader "
                f"batch_size=sampler.per_step, or a part of it and as many micro-batches before each "
                f"session.exchange"
            )
        self._exchanged += 1
        return self._drawn.popleft() == step

    def _mistake(self) -> str:
        """Return how the loop's batches differ from a whole step, or an empty string."""
        if self._exchanged == 0:
            size = next((x for x in _batch_sizes(self) if self.per_step % x), None)
            if size is not None:
                return f"the DataLoader has batch_size {size}"
        drawn = self._yielded - self._exchanged * self.per_step
        return f"the loop drew {drawn} samples for this step" if drawn < self.per_step else ""

    def describe(self) -> dict[str, Any]:
        """Describe the sampler for the journal."""
        return {
            "policy": "shrink",
            "sampler": 1,
            "dataset_size": self.size,
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.per_step,
            "seed": self.seed,
            "data_slots": self.data_slots,
            "micro_batches": self.data_slots,
        }


class SoloSampler(StepSampler):
    """The sampler with FABRIC_DISABLE=1: this process draws the whole global batch.

    A loop that takes ``per_step`` samples for each step gets the same steps as the job. A loop with another
    batch size goes through every pass in order, as with any sampler.
    """

    _begun = 0  # first step of the next iteration, where the loop's batches are not whole steps
    _whole = True

    def __iter__(self) -> Iterator[int]:
        self._begin()
        step = self._committed_step() if self._whole else self._begun
        number = step // self.steps_per_pass
        while step // self.steps_per_pass == number:
            self._begun = step + 1
            yield from self._counted(step)
            step += 1

    def take(self, step: int) -> bool:
        """Count the samples drawn, and accept them whatever their step."""
        if self._whole and self._mistake():
            self._whole = False
        self._exchanged += 1
        return True


def _batch_sizes(sampler: StepSampler) -> list[int]:
    """Return the batch sizes of the DataLoaders that draw from ``sampler``."""
    batch_samplers = [x for x in gc.get_objects() if type(x) is BatchSampler and x.sampler is sampler]
    return sorted({x.batch_size for x in batch_samplers})
