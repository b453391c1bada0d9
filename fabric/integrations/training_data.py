"""The data and the steps of a job, for a loop that a framework owns.

A torch DataLoader is taken whole: its order, its batches and its workers, as a loader of the job.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from fabric.client.data.loader import Loader, is_stream
from fabric.client.loop.session import Session
from fabric.client.loop.step import Step
from fabric.errors import ConfigError
from fabric.integrations.arguments import ArgumentTable, rows_of

DATALOADER = ArgumentTable(
    "DataLoader",
    "fabric",
    rows_of("""
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
    """),
    rows_of("check_worker_number_rationality | idle | it warns"),
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
        kind, given = type(loader), _given(loader)
        base = next(x for x in kind.__mro__ if x.__module__.split(".")[0] in ("torch", "torchdata"))
        DATALOADER.check(base, given)
        DATALOADER.check_methods(base, kind)
        order = _Sampling.of(loader, ranks)
        collate: Any = _Single(loader.collate_fn) if order.single else loader.collate_fn
        reading = {name: given[name] for name in _READING if name in given} if loader.num_workers else {}
        return cls(
            loader.dataset,
            collate,
            order.sampler,
            order.batched,
            order.batch_size,
            order.drop_last,
            0 if order.sampler is None else _length(order.sampler),
            loader.num_workers,
            None if order.sampler is None else loader.generator,
            reading,
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

    def steps_per_pass(self, global_batch_size: int, epoch_end: str) -> int:
        """Return the number of steps of a pass; 0 where there are no passes."""
        steps, left = divmod(self.size, global_batch_size)
        return steps + (epoch_end == "short" and left > 0)

    def loader(
        self,
        session: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int,
        epoch_end: str = "continue",
        **options: Any,
    ) -> Loader:
        """Make the job's loader of these data; the sizes are numbers of positions."""
        order = {"batch_sampler" if self.batched else "sampler": self.sampler}
        made: Loader = session.loader(
            self.dataset,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            seed=seed,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            epoch_end=epoch_end,
            generator=self.generator,
            **order,
            **self.reading,
            **options,
        )
        return made


_READING = ("worker_init_fn", "prefetch_factor", "multiprocessing_context", "pin_memory", "timeout")


@dataclass(frozen=True, slots=True)
class _Sampling:
    """The sampler of a DataLoader and what it gives."""

    sampler: Any
    batch_size: int
    batched: bool = False
    single: bool = False  # batch_size=None: what the data set gives is a batch already
    drop_last: bool = False

    @classmethod
    def of(cls, loader: "DataLoader[Any]", ranks: int) -> "_Sampling":
        batches = loader.batch_sampler
        if is_stream(loader.dataset):
            size = 1 if loader.batch_size is None else loader.batch_size
            return cls(None, size, single=batches is None, drop_last=loader.drop_last)
        if batches is None:
            return cls(_whole(loader.sampler, ranks), 1, single=True)
        if type(batches) is BatchSampler:
            return cls(_whole(batches.sampler, ranks), batches.batch_size, drop_last=batches.drop_last)
        return cls(_whole(batches, ranks), 1, batched=True)


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


def _length(sampler: Any) -> int:
    if not hasattr(sampler, "__len__"):
        raise ConfigError(
            f"the sampler {type(sampler).__name__} has no len(), and every replica must know how long a pass "
            "is: give it __len__, the number of its indices in a pass"
        )
    return len(sampler)


def _given(loader: "DataLoader[Any]") -> dict[str, Any]:
    """Return the arguments of a DataLoader as its attributes have them."""
    names = [*DATALOADER.rows, *DATALOADER.unknown(type(loader))]
    return {name: getattr(loader, name) for name in names if hasattr(loader, name)}


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
        self._readers: dict[int, _LaneReader] = {}

    def micro_batch(self, positions: Sequence[int]) -> Any:
        """Return the micro-batch at the one position in ``positions``."""
        step, number = divmod(positions[0], self.lanes * self._per_step)
        lane, part = divmod(number, self._per_step)
        return self._reader(lane).take(step * self._per_step + part, step * self._per_step)

    def read_past(self, lane: int, step: int) -> None:
        """Read the lane up to the beginning of ``step``, so that a micro-batch of the step comes at once."""
        if lane < self.lanes:
            self._reader(lane).read_past(step * self._per_step)

    def _reader(self, lane: int) -> "_LaneReader":
        if lane not in self._readers:
            self._readers[lane] = _LaneReader(lambda begin: self._read(lane, begin))
        return self._readers[lane]


class _LaneReader:
    """Micro-batches of a lane by number. For a number before those that are kept it reads again."""

    def __init__(self, read: Callable[[int], Iterator[Any]]) -> None:
        self._read = read
        self._batches: Iterator[Any] | None = None
        self._next = 0
        self._kept: dict[int, Any] = {}  # those of the step under way, which may be computed again

    def take(self, number: int, first: int) -> Any:
        """Return micro-batch ``number``; forget those before ``first``."""
        self._kept = {n: batch for n, batch in self._kept.items() if n >= first}
        if number not in self._kept:
            self.read_past(number)
            assert self._batches is not None
            self._kept[number] = next(self._batches)
            self._next += 1
        return self._kept[number]

    def read_past(self, number: int) -> None:
        """Go on to ``number``, which comes next then, unless it is kept."""
        if number in self._kept:
            return
        if self._batches is None or number < self._next:
            self._batches, self._next = self._read(number), number
        while self._next < number:
            next(self._batches)
            self._next += 1


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
