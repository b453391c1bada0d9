"""The DataLoaders and schedulers that ``prepare`` returns."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate.scheduler import AcceleratedScheduler
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from fabric.integrations.training_data import TrainingData

if TYPE_CHECKING:
    from fabric.integrations.accelerate.replica import AcceleratedReplica


class JobDataLoader(DataLoader[Any]):
    """A DataLoader of the script: the training's follows the job's steps, any other stays whole.

    ``complete``: the DataLoader as accelerate prepares it.
    """

    def __init__(self, source: Any, complete: Any, replica: "AcceleratedReplica") -> None:
        super().__init__(source.dataset, source.batch_size, collate_fn=source.collate_fn)
        self.source, self.complete, self._replica = source, complete, replica
        self._begun = False

    @property
    def is_in_order(self) -> bool:
        """Whether each pass has the same order, as a DataLoader for evaluations has it."""
        batches = self.source.batch_sampler
        sampler = batches.sampler if type(batches) is BatchSampler else batches
        return type(sampler) is SequentialSampler

    @property
    def data(self) -> TrainingData:
        """The data as the job deals them out. Raises ConfigError for data that it cannot deal out."""
        return TrainingData.of(self.source)

    @property
    def epoch_end(self) -> str:
        """The form of a pass's last step, as ``session.loader`` names it."""
        data = self.data
        return "continue" if data.is_stream else "drop" if data.drop_last else "short"

    @property
    def steps_per_pass(self) -> int:
        """The number of steps of a pass; 0 where there are no passes."""
        return self.data.steps_per_pass(self._replica.global_batch(self.data), self.epoch_end)

    def __len__(self) -> int:
        if not self._replica.trains_on(self):
            return len(self.complete)
        if self.data.is_stream:
            return len(self.source)  # raises the TypeError of a stream without a length
        return self.steps_per_pass * int(self._replica.accumulation)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not self._replica.trains_on(self):
            return self._read_whole()
        first, self._begun = not self._begun, True
        return self._replica.micro_batches(self, first)

    def _read_whole(self) -> Iterator[Any]:
        self._replica.open_reads, self._replica.evaluates = self._replica.open_reads + 1, True
        try:
            yield from self.complete
        finally:
            self._replica.open_reads -= 1

    def end_of_pass(self, step: int, is_first: bool) -> float:
        """Return the step at which a pass ends that begins at ``step``; the first may begin in its middle."""
        steps = self.steps_per_pass
        if not steps:
            return math.inf
        return (step // steps + 1) * steps if is_first else step + steps

    def set_epoch(self, epoch: int) -> None:
        """Do nothing for the training: the order of its data follows the job's step."""
        if not self._replica.trains_on(self) and hasattr(self.complete, "set_epoch"):
            self.complete.set_epoch(epoch)

    @property
    def total_batch_size(self) -> int:
        """The number of samples of a micro-batch of all replicas, as accelerate counts it."""
        return int(self.data.batch_size * self._replica.replicas)

    @property
    def total_dataset_length(self) -> int:
        """The number of samples of the data set."""
        return len(self.dataset)  # type: ignore[arg-type]


class JobScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """Steps as often per step of the job as accelerate does on that many processes."""

    def __init__(self, prepared: Any, replica: "AcceleratedReplica") -> None:
        super().__init__(
            prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, prepared.split_batches
        )
        self._replica = replica

    def step(self, *arguments: Any, **named: Any) -> None:
        """Step where the optimizer has stepped. Micro-batches leave no trace: their number differs."""
        scheduler = self.scheduler
        if self._replica.goes_over:
            return
        if not self.step_with_optimizer:
            scheduler.step(*arguments, **named)
            return
        if not self.gradient_state.sync_gradients or any(x.step_was_skipped for x in self.optimizers):
            return
        for _ in range(self._replica.replicas):
            # OneCycle refuses a step beyond its last.
            if scheduler._step_count <= getattr(scheduler, "total_steps", math.inf):  # noqa: SLF001
                scheduler.step(*arguments, **named)
