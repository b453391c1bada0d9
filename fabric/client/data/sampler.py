"""``StepSampler``: the data order for the DataLoader of a loop that is not ``session.steps``.

The sampler uses policy shrink: the global batch of a step is cut into one part per data slot. This replica
draws the part of its data slot. The part of an absent replica is skipped, which the commit records. A pass
over the data set is a permutation, or the list that another sampler yields for this pass. It has ``size //
global_batch_size`` steps and leaves out the remaining samples.

A DataLoader draws ahead of the computation. The part of a data slot does not depend on the roster, so batches
drawn ahead stay valid while this replica makes every step. After an absence the batches drawn for past steps
are discarded: their gradient gets no weight.

A loop whose batch size times its accumulation differs from ``per_step`` is refused with both numbers. Too few
samples show in the number drawn. Too many samples show only in the DataLoader's batch size, because a
DataLoader may draw ahead without limit.

With FABRIC_DISABLE=1 this process draws the whole global batch. A loop that takes ``per_step`` samples for
each step then gets the same steps as the job. A loop with another batch size goes through every pass in
order, as with any sampler.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler

from fabric.client.data.loader import data_slot_of
from fabric.client.data.sample_plan import SamplePlan, SamplerOrder
from fabric.errors import ConfigError, FabricError
from fabric.model import Value
from fabric.runtime import config
from fabric.runtime.config import Settings, parse_replicas
from fabric.runtime.living_objects import of_types


class BatchPart(Value):
    """The part of every global batch that this process draws: number ``data_slot`` of ``data_slots``."""

    data_slot: int
    data_slots: int
    alone: bool = False  # FABRIC_DISABLE=1: this process draws the whole global batch

    @classmethod
    def of(cls, settings: Settings, data_slot: int | None) -> "BatchPart":
        """Return the part of the replica that ``settings`` name. Raises ConfigError."""
        if settings.disable:
            return cls(0, 1, alone=True)
        replicas = parse_replicas(settings.replicas)[1]
        return cls(data_slot_of(settings.replica, replicas, data_slot), replicas)


class StepSampler(torch.utils.data.Sampler[int]):
    """The indices of this data slot, from the committed step to the end of the pass over the data.

    Every step gives ``per_step`` indices, which must equal the loop's batch size times its accumulation.
    The sampler may be made before the session: give it to ``attach(..., sampler=)`` then.
    """

    def __init__(
        self,
        size: int,
        *,
        global_batch_size: int,
        seed: int = 0,
        data_slot: int | None = None,
        settings: Settings | None = None,
        sampler: Any = None,
    ) -> None:
        """Make the sampler of a data set with ``size`` samples. Raises ConfigError.

        ``sampler``: the order, by default a permutation for each pass; its pass has ``size`` indices.

        ``data_slot``: the number of the part, by default the number at the end of the replica's id.
        ``settings``: those that ``attach`` gets, by default those of the environment.
        """
        self._asked_slot = data_slot
        self.part = BatchPart.of(settings or config.settings(), data_slot)
        data_slots = self.part.data_slots
        if not 0 < global_batch_size <= size or global_batch_size % data_slots:
            raise ConfigError(
                f"global_batch_size {global_batch_size} must be from 1 to the data set's size, {size}, and a "
                f"multiple of the {data_slots} replicas"
            )
        if seed < 0:
            raise ConfigError("the seed must not be negative")
        self.size, self.global_batch_size, self.seed = size, global_batch_size, seed
        order = SamplerOrder(sampler, seed) if sampler is not None else None
        if order is not None and order.size != size:
            raise ConfigError(
                f"StepSampler has size {size}, and a pass of the sampler {order.name} has {order.size} "
                "indices: give len(sampler) as the size"
            )
        if order is not None and isinstance(order.items([0])[0], list | tuple):
            raise ConfigError(
                f"the sampler {order.name} gives batches, and StepSampler cuts steps into single samples: "
                "give a sampler of indices, or use session.loader(batch_sampler=)"
            )
        self.per_step = global_batch_size // data_slots
        # A micro-batch of the plan is the part of a data slot.
        self._plan = SamplePlan(size, global_batch_size, self.per_step, seed, epoch_end="drop", order=order)
        self.steps_per_pass = self._plan.steps_per_pass
        self._step_of_job: Callable[[], int] | None = None
        self._drawn: deque[int] = deque()  # steps of drawn samples that are not exchanged yet
        # With FABRIC_DISABLE=1: the next iteration's first step, if the loop's batches are not whole steps.
        self._begun, self._whole_steps = 0, True
        self._begin()

    def check(self, settings: Settings) -> None:
        """Raise ConfigError unless the sampler was made for the replica that ``settings`` name."""
        part = BatchPart.of(settings, self._asked_slot)
        if part != self.part:
            raise ConfigError(
                f"the sampler draws part {self.part.data_slot} of {self.part.data_slots}, and this replica "
                f"has part {part.data_slot} of {part.data_slots}: set FABRIC_REPLICA and FABRIC_REPLICAS in "
                "the environment before StepSampler is made"
            )

    def bind(self, step_of_job: Callable[[], int]) -> None:
        """Follow the session whose committed step ``step_of_job`` returns."""
        self._step_of_job = step_of_job

    def _committed_step(self) -> int:
        if self._step_of_job is None:
            raise FabricError(
                "the sampler has no session yet: give it to attach(..., sampler=) before the first batch"
            )
        return self._step_of_job()

    def _begin(self) -> None:
        """Begin an iteration, and forget the samples drawn in the one before: the loop never uses them."""
        self._drawn.clear()
        self._yielded = self._exchanged = 0

    def __len__(self) -> int:
        """Return the number of indices of one pass on this data slot."""
        return self.steps_per_pass * self.per_step

    def __iter__(self) -> Iterator[int]:
        self._begin()
        alone = self.part.alone
        step = self._begun if alone and not self._whole_steps else self._committed_step()
        number = step // self.steps_per_pass
        while step // self.steps_per_pass == number:
            self._begun = step + 1
            if not alone:
                self._drawn.append(step)
            for index in self.indices(step):
                self._yielded += 1
                yield index
            step = step + 1 if alone else self._committed_step() + len(self._drawn)

    def indices(self, step: int) -> list[int]:
        """Return the data set indices of this data slot's part of ``step``."""
        return [int(i) for i in self._plan.items(step, self.part.data_slot)]

    def take(self, step: int) -> bool:
        """Return whether the oldest batches that the loop drew are those of ``step``, which it exchanges now.

        Raises ConfigError where the loop did not draw a whole step. Alone, all samples drawn count.
        """
        if self.part.alone:
            self._whole_steps = self._whole_steps and not self._mistake()
            self._exchanged += 1
            return True
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
            sizes = {x.batch_size for x in of_types({BatchSampler}) if x.sampler is self}
            size = min((x for x in sizes if self.per_step % x), default=0)
            if size:
                return f"the DataLoader has batch_size {size}"
        drawn = self._yielded - self._exchanged * self.per_step
        return f"the loop drew {drawn} samples for this step" if drawn < self.per_step else ""

    def describe(self) -> dict[str, Any]:
        described = {k: v for k, v in self._plan.describe().items() if k != "epoch_end"}
        return described | {"policy": "shrink", "sampler": 1, "data_slots": self.part.data_slots}
