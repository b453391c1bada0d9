"""The data and the steps of a job, for a loop that a framework owns.

A torch DataLoader is taken whole: its order, its batches and its workers, as a loader of the job.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

import fabric.client
from fabric.client.data.loader import Loader, is_stream
from fabric.client.data.sample_plan import length_of
from fabric.client.gradients.forward_buffers import default_buffers
from fabric.client.loop.session import Session
from fabric.client.loop.step import Step
from fabric.errors import ConfigError
from fabric.integrations.arguments import ArgumentTable

DATALOADER = ArgumentTable(
    "DataLoader",
    "fabric",
    """
    dataset | kept | recipe accelerate_scaler
    batch_size collate_fn | kept | test_a_loader_in_a_fixed_order_has_the_batches_that_it_has_without_fabric
    shuffle generator | kept |
        test_a_loader_that_shuffles_with_a_generator_has_the_passes_that_it_has_without_fabric
    sampler | kept | recipe sampler_weighted
    batch_sampler | kept | recipe sampler_batches_by_length
    num_workers | kept | recipe workers_lazy_file
    drop_last | kept | recipe uneven_last_batch_dropped
    worker_init_fn | kept | test_the_data_set_and_worker_init_fn_find_what_torch_tells_them
    multiprocessing_context | kept | test_workers_draw_the_same_numbers_as_the_trainer_itself
    pin_memory pin_memory_device | idle | it puts batches into other memory
    timeout | idle | it ends a trainer whose workers hang
    prefetch_factor | idle | it says how far workers read ahead
    persistent_workers | idle | workers live as long as the loader
    in_order | refused | batches that come as they are ready have no order that replicas could share: leave it
        out
    snapshot_every_n_steps | idle | the committed step gives the position
    """,
    methods="check_worker_number_rationality | idle | it warns",
)


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The data of a DataLoader in positions: a position is a sample, or a batch of a ``batch_sampler``."""

    dataset: Any
    collate_fn: Callable[[Sequence[Any]], Any]
    sampler: Any  # None: a stream
    batched: bool  # the sampler gives batches
    batch_size: int  # positions of a batch of the DataLoader
    drop_last: bool
    size: int  # positions of a pass; 0 for a stream
    num_workers: int
    generator: Any
    reading: dict[str, Any]  # the options of the workers

    @classmethod
    def of(cls, loader: Any, ranks: int = 1) -> "TrainingData":
        """Take a DataLoader or StatefulDataLoader whole. Raises ConfigError for what cannot be kept.

        ``ranks``: the number of ranks of a replica, among which a DistributedSampler may divide the data.
        """
        if not isinstance(loader, DataLoader):
            raise ConfigError(
                f"fabric deals out the data of one DataLoader, and got a {type(loader).__name__}: give a "
                "torch.utils.data.DataLoader"
            )
        kind = type(loader)
        names = [*DATALOADER.rows, *DATALOADER.unknown(kind)]
        given = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
        base = next(x for x in kind.__mro__ if x.__module__.split(".")[0] in ("torch", "torchdata"))
        DATALOADER.check(base, given)
        DATALOADER.check_methods(base, kind)
        batches: Any = loader.batch_sampler
        collate: Any = loader.collate_fn if batches is not None else _Single(loader.collate_fn)
        is_plain, streams = type(batches) is BatchSampler, is_stream(loader.dataset)
        order = loader.sampler if batches is None else batches.sampler if is_plain else batches
        sampler = None if streams else _whole(order, ranks)
        return cls(
            loader.dataset,
            collate,
            sampler,
            batched=not (streams or is_plain or batches is None),
            batch_size=batches.batch_size if is_plain else 1,
            drop_last=is_plain and batches.drop_last,
            size=0 if sampler is None else length_of(sampler),
            num_workers=loader.num_workers,
            generator=None if sampler is None else loader.generator,
            reading={name: given[name] for name in READING if name in given} if loader.num_workers else {},
        )

    @property
    def single(self) -> bool:
        """Whether the data set gives whole batches, with batch_size=None."""
        return isinstance(self.collate_fn, _Single)

    @property
    def is_stream(self) -> bool:
        """Whether the data set is iterated and has no known end."""
        return self.sampler is None

    def limited(self, size: int) -> "TrainingData":
        """Return these data with the first ``size`` positions of each pass."""
        return self if size == self.size else replace(self, sampler=FirstOf(self.sampler, size), size=size)

    def epochs(self, replicas: int, accumulation: int, limit: int | float | None = None) -> "EpochShape":
        """Return the shape of a pass, in steps of ``accumulation`` batches of all replicas together.

        Raises ConfigError for a pass without a batch.
        """
        shape = EpochShape(self.size, self.batch_size, replicas, accumulation, self.drop_last, limit)
        if not shape.batches:
            larger = "" if limit is None else ", or a larger limit_train_batches"
            raise ConfigError(
                f"a batch of the job has {shape.batch} samples, and a pass over the data {self.size}: take a "
                f"smaller batch_size{larger}"
            )
        return shape

    def feed(
        self, session: Any, until: int, *, global_batch_size: int, epoch_end: str = "continue", **options: Any
    ) -> "StepFeed":
        """Return the job's steps up to ``until`` with these data; the size is a number of positions."""
        order = {"batch_sampler" if self.batched else "sampler": self.sampler}
        made: Loader = session.loader(
            self.dataset,
            global_batch_size=global_batch_size,
            micro_batch_size=self.batch_size,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            epoch_end=epoch_end,
            generator=self.generator,
            **order,
            **self.reading,
            **options,
        )
        return StepFeed(session, made, until)


@dataclass(frozen=True)
class EpochShape:
    """A pass over the data as a framework divides it, in steps of the job.

    A batch of the framework is a batch of all replicas together, as with DistributedDataParallel. The last
    batch of a pass may be smaller, and the last step may have fewer batches. A framework takes the mean over
    each batch, adds the batches of a step up and divides by ``accumulation``, also in a shorter step.
    """

    positions: int  # samples of a whole pass over the data
    batch_size: int  # samples of a micro-batch
    replicas: int  # with which the job starts
    accumulation: int  # batches of a step
    drop_last: bool = False
    limit: int | float | None = None  # as Lightning's ``limit_train_batches``: batches, or a part of them

    @cached_property
    def batch(self) -> int:
        """Samples of a batch of the framework, on all replicas together."""
        return self.batch_size * self.replicas

    @cached_property
    def whole(self) -> int:
        """Batches of a pass over the data, before the limit."""
        exact = self.positions / self.batch
        return math.floor(exact) if self.drop_last else math.ceil(exact)

    @cached_property
    def batches(self) -> int:
        """Batches of an epoch."""
        if isinstance(self.limit, int):
            return min(self.whole, self.limit)
        return self.whole if self.limit is None else int(self.whole * self.limit)

    @cached_property
    def samples(self) -> int:
        """Samples of an epoch."""
        return min(self.positions, self.batches * self.batch)

    @cached_property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        return math.ceil(self.batches / self.accumulation)

    @cached_property
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

    def place(self, step: int) -> float:
        """Return the number of epochs, with a part of one, that ``step`` steps are."""
        epoch, within = divmod(step, self.steps)
        return epoch + within * self.accumulation / self.batches

    def factor(self, step: int) -> float:
        """Return by what factor the framework's gradient of ``step`` differs from a mean over its batches."""
        return self.batches_of(step) / self.accumulation

    def weight(self, step: int, micro_batch: int, samples: int) -> float:
        """Return what ``samples`` samples of a micro-batch weigh: all batches of a step weigh the same."""
        left = self.samples - step % self.steps * self.step_samples
        size = min(self.batch, left - micro_batch // self.replicas * self.batch)
        return samples * self.batch / size


READING = ("worker_init_fn", "prefetch_factor", "multiprocessing_context", "pin_memory", "timeout")


class FirstOf(Sampler[Any]):
    """The first ``size`` positions of each pass of ``sampler``."""

    def __init__(self, sampler: Any, size: int) -> None:
        self.sampler, self._size = sampler, size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self._size)


@dataclass(frozen=True, slots=True)
class _Single:
    """Collates a micro-batch of one item, as a DataLoader with batch_size=None does."""

    collate_fn: Callable[[Any], Any]

    def __call__(self, samples: Sequence[Any]) -> Any:
        return self.collate_fn(samples[0])


def _whole(sampler: Any, ranks: int) -> Any:
    """Return a sampler of all data. Raises ConfigError for one that gives a part of them."""
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        if type(sampler) is DistributedSampler and sampler.num_replicas == ranks:
            return DistributedSampler(sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed)
        raise ConfigError(
            f"the DistributedSampler gives part {sampler.rank} of {sampler.num_replicas} of the data, and "
            "fabric deals out every batch itself: give the DataLoader shuffle=True, or the sampler "
            "num_replicas=1 and rank=0"
        )
    return sampler


# Data that are read in order and dealt out in lanes: one lane for each replica that a job starts with.
#
# Micro-batch m of a step belongs to lane m // n, for n micro-batches of a lane in each step. It is number
# ``step * n + m % n`` of its lane. So the committed step gives the position in every lane.


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
        self._batches: dict[int, Iterator[Any]] = {}  # by lane
        self._next: dict[int, int] = {}  # the number of the next of these
        self._kept: dict[int, dict[int, Any]] = {}  # those of the step under way, which may be computed again

    def micro_batch(self, positions: Sequence[int]) -> Any:
        """Return the micro-batch at the one position in ``positions``."""
        step, number = divmod(positions[0], self.lanes * self._per_step)
        lane, part = divmod(number, self._per_step)
        first = step * self._per_step
        kept = {n: batch for n, batch in self._kept.get(lane, {}).items() if n >= first}
        self._kept[lane] = kept
        if first + part not in kept:
            self._go_to(lane, first + part)
            kept[first + part] = next(self._batches[lane])
            self._next[lane] += 1
        return kept[first + part]

    def read_past(self, lane: int, step: int) -> None:
        """Read the lane up to the beginning of ``step``, so that a micro-batch of the step comes at once."""
        first = step * self._per_step
        if lane < self.lanes and first not in self._kept.get(lane, {}):
            self._go_to(lane, first)

    def _go_to(self, lane: int, number: int) -> None:
        """Let micro-batch ``number`` come next. The lane is read again where it has come already."""
        if number < self._next.get(lane, number + 1):
            self._batches[lane], self._next[lane] = self._read(lane, number), number
        while self._next[lane] < number:
            next(self._batches[lane])
            self._next[lane] += 1


def attach_in(
    words: Mapping[str, str],
    model: Any,
    optimizers: Any,
    state: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> Any:
    """Attach for the loop of a framework, which calls the parts of fabric by ``words`` of its own.

    ``arguments``: those of ``attach``. Buffers that forward changes are treated as torch's modules need it.
    """
    session = fabric.client.attach(
        model, optimizers, state=state, **{"buffers": default_buffers(model), **arguments}
    )
    if isinstance(session, Session):
        session.say_in(words)
    return session


class StepFeed:
    """Goes through ``session.steps``, for a loop that asks for one micro-batch after another.

    A step that this replica replays has no micro-batches.
    """

    def __init__(self, session: Session, data: Loader, until: int) -> None:
        self.session, self.data = session, data
        self.step: Step | None = None  # the step under way; None after the job's last
        session.stale.own_loop = False
        self._steps = session.steps(data, until)
        self._micro_batches: Iterator[Any] = iter(())

    def advance(self) -> Step | None:
        """Go on to the next step of the job, which follows a load of a fetched state at any number."""
        self.step = next(self._steps, None)
        self._micro_batches = iter(self.step) if self.step is not None else iter(())
        return self.step

    def micro_batch(self) -> Any:
        """Return the step's next micro-batch; None where none is left, and ``.grad`` is the average then."""
        return next(self._micro_batches, None)

    def rest(self) -> Iterator[Any]:
        """Yield the micro-batches that are left, those of lost members included."""
        yield from self._micro_batches

    def batch(self, epochs: EpochShape) -> int:
        """Return the number within its epoch of the framework's batch that the micro-batch is a part of."""
        at = self.session._progress.at  # noqa: SLF001
        assert at is not None
        return at[0] % epochs.steps * epochs.accumulation + at[1] // epochs.replicas

    def weight(self, epochs: EpochShape) -> float:
        """Return what the micro-batch under way weighs. Batches of a ``batch_sampler`` weigh the same too."""
        at = self.session._progress.at  # noqa: SLF001
        assert self.step is not None and at is not None
        (number, micro_batch), samples = at, self.step.weight.samples
        if not self.data.fetcher.batched:
            return epochs.weight(number, micro_batch, samples)
        first = micro_batch // epochs.replicas * epochs.replicas
        together = sum(self.data.count(number, first + i) for i in range(epochs.replicas))
        return samples * epochs.batch / together
