"""An epoch of Lightning's Trainer as steps of a job, and what a micro-batch counts for in its step.

A batch of the Trainer is a batch of all replicas together, as with DistributedDataParallel. The last batch of
an epoch may be smaller, and the last step may have fewer batches. Lightning takes the mean over each batch,
adds the batches of a step up and divides by ``accumulate_grad_batches``, also in a shorter step.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpochShape:
    """The shape of every epoch."""

    positions: int  # samples of a whole pass over the data
    batch_size: int  # samples of a micro-batch
    replicas: int  # with which the job starts
    accumulation: int  # batches of a step
    drop_last: bool = False
    limit: int | float | None = None  # as ``limit_train_batches``: a number of batches, or a part of them

    @property
    def batch(self) -> int:
        """Samples of a batch of the Trainer, on all replicas together."""
        return self.batch_size * self.replicas

    @property
    def whole(self) -> int:
        """Batches of a pass over the data, before the limit."""
        exact = self.positions / self.batch
        return math.floor(exact) if self.drop_last else math.ceil(exact)

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        if isinstance(self.limit, int):
            return min(self.whole, self.limit)
        return self.whole if self.limit is None else int(self.whole * self.limit)

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return min(self.positions, self.batches * self.batch)

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        return math.ceil(self.batches / self.accumulation)

    @property
    def step_samples(self) -> int:
        """Samples of a full step."""
        return self.batch * self.accumulation

    def batches_before(self, step: int) -> int:
        """Return the number of batches, over all epochs, before the job's step ``step``."""
        epoch, within = divmod(step, self.steps)
        return epoch * self.batches + within * self.accumulation

    def batches_of(self, step: int) -> int:
        """Return the number of batches of the job's step ``step``."""
        return min(self.accumulation, self.batches - step % self.steps * self.accumulation)

    def factor(self, step: int) -> float:
        """Return by what factor Lightning's gradient of ``step`` differs from a mean over its batches."""
        return self.batches_of(step) / self.accumulation

    def weight(self, step: int, micro_batch: int, samples: int) -> float:
        """Return what ``samples`` samples of a micro-batch weigh: all batches of a step weigh the same."""
        left = self.samples - step % self.steps * self.step_samples
        size = min(self.batch, left - micro_batch // self.replicas * self.batch)
        return samples * self.batch / size
