"""The loaders of ``session.steps``: the micro-batches of a plan, read on request or ahead of it."""

import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import xxhash
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from fabric.client.data.randomness import seed_everything
from fabric.client.data.sample_plan import SamplePlan, SamplerOrder, shuffles_all
from fabric.errors import ConfigError, FabricError
from fabric.model import EVERYTHING, Record, Sharing
from fabric.protocol.rules.spare import stack_of
from fabric.runtime.config import Settings, parse_replicas
from fabric.runtime.system_calls import die_with


class IterableStream:
    """Samples of an iterable data set by position. A read at an earlier position starts a new iteration.

    An iterable data set must give the same samples in the same order every time it is iterated, on every
    replica. A data set with ``set_epoch`` is told the number of the iteration first, so it may shuffle by
    that number. The iteration is repeated endlessly; position p is sample number p of the repetition. Step
    s covers the positions [s*G, (s+1)*G) for global batch size G. So the committed step gives the position,
    and no position is saved. A replica reads the whole global batch of a step, because it may inherit any
    part of it.

    A replica that joins, or a job that goes back to an earlier state, must get to its position. A data set
    with ``iterate_from(position)`` gives an iterator that begins there. Other data sets are read up to the
    position.
    """

    def __init__(self, dataset: Any, global_batch_size: int = 1) -> None:
        self._dataset, self._global_batch_size = dataset, global_batch_size
        self._from = getattr(dataset, "iterate_from", None)
        self._iterator: Iterator[Any] | None = None
        self._number = 0  # of the iteration
        self._next = 0  # the position that the iterator gives next
        self._kept: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Return the samples of a micro-batch."""
        # Keep the samples of the previous step: this member may still inherit a part of that step.
        step = positions[0] // self._global_batch_size
        return self.read(max(0, step - 1) * self._global_batch_size, list(positions))

    def read(self, first: int, positions: list[int]) -> list[Any]:
        """Return the samples at ``positions``, and forget those before ``first``; safe from any thread."""
        with self._lock:
            for position in [p for p in self._kept if p < first]:
                del self._kept[position]
            if any(p not in self._kept and p < self._next for p in positions) or self._iterator is None:
                self._begin(first)
            while self._next <= max(positions):
                sample = self._draw()
                if self._next >= first:
                    self._kept[self._next] = sample
                self._next += 1
            return [self._kept[p] for p in positions]

    def _begin(self, first: int) -> None:
        self._kept.clear()
        if self._from is not None:
            self._iterator, self._next = iter(self._from(first)), first
        else:
            self._iterator, self._next = self._iterate(0), 0

    def _iterate(self, number: int) -> Iterator[Any]:
        self._number = number
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(number)
        return iter(self._dataset)

    def _draw(self) -> Any:
        """Return the next sample; after the last comes the first."""
        assert self._iterator is not None
        for sample in self._iterator:
            return sample
        if self._from is not None:
            raise FabricError(
                f"iterate_from ended before position {self._next}: it must go on for ever (begin again after "
                "the last sample)"
            )
        self._iterator = self._iterate(self._number + 1)
        for sample in self._iterator:
            return sample
        raise ConfigError("the data set is empty: its iteration gives no sample")


Collate = Callable[[Sequence[Any]], Any]


@dataclass(slots=True)
class Fetcher:
    """Reads micro-batches of a data set with an index, or of a stream, whose indices are positions.

    A data set with ``set_epoch`` is told the number of each pass.
    """

    dataset: Any
    collate: Collate
    seed: int
    batched: bool = False  # the one item of a micro-batch is a list of indices, of a batch sampler
    pass_of: Callable[[int, int], int] | None = None  # if the data set has ``set_epoch``
    draws: int = 0  # see ``SampleSlice``
    _pass: int = -1  # that the data set was told last

    def read(self, items: Sequence[Any]) -> Any:
        """Return the collated micro-batch of these items."""
        indices = items[0] if self.batched else items
        together = getattr(self.dataset, "__getitems__", None)
        return self.collate(together(indices) if together else [self.dataset[i] for i in indices])

    def count(self, items: Sequence[Any]) -> int:
        return sum(len(batch) for batch in items) if self.batched else len(items)

    def seeded(self, step: int, micro_batch: int, items: Sequence[Any]) -> Any:
        """Seed every generator first, so that the micro-batch is the same on every replica."""
        if self.pass_of is not None and self._pass != (number := self.pass_of(step, micro_batch)):
            self._pass = number
            seed_everything(self.seed, number, -1)  # the same draws on replicas that begin it elsewhere
            self.dataset.set_epoch(number)
        seed_everything(self.seed, step, micro_batch, self.draws)
        return self.read(items)


Key = tuple[int, int]  # step and micro-batch


class _Requests(Sampler[Any]):
    """The order in which the workers read. It never ends: without anything to read it gives None."""

    def __init__(self, items: Callable[[int, int], Sequence[Any]], steps_to_try: int) -> None:
        self.sent: deque[Key | None] = deque()  # requests whose results have not come, oldest first
        self._items = items
        self._steps_to_try = steps_to_try  # so many steps may follow each other without a sample here
        self.known: set[Key] = set()  # requested, and not taken or dropped yet
        self._first: deque[Key] = deque()
        self._share: tuple[int, ...] = ()
        self._next: Key = 0, 0  # the next step, and the place in its share

    def ask(self, keys: Iterable[Key]) -> None:
        """Read these before all others."""
        self._first = deque(keys)

    def go_on(self, step: int, share: Iterable[int]) -> None:
        """Read ``share`` of each step from ``step`` on."""
        self._share, self._next = tuple(share), (step, 0)

    def __iter__(self) -> Iterator[Any]:
        while True:
            key = self._choose()
            self.sent.append(key)
            if key is None:
                yield None
            else:
                self.known.add(key)
                yield key, self._items(*key)

    def _choose(self) -> Key | None:
        while self._first:
            key = self._first.popleft()
            if key not in self.known:
                return key
        last = self._next[0] + self._steps_to_try
        while self._share and self._next[0] <= last:
            step, place = self._next
            self._next = (step, place + 1) if place + 1 < len(self._share) else (step + 1, 0)
            key = step, self._share[place]
            if key not in self.known and self._items(*key):
                return key
        return None


@dataclass(frozen=True, slots=True)
class _Failed:
    """An error of the data set or of the collate function, for the one that asks for this micro-batch."""

    error: ExceptionWrapper


class _Reading(Dataset[Any]):
    """In a worker: answers a request with the micro-batch."""

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher

    def __getitem__(self, request: Any) -> Any:
        if request is None:
            return None
        (step, micro_batch), items = request
        try:
            return self.fetcher.seeded(step, micro_batch, items)
        except Exception:  # noqa: BLE001  (raised in the trainer, where the micro-batch is needed)
            return _Failed(ExceptionWrapper(where="in a worker of session.loader"))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Begin:
    """In a worker: what it does before its first request."""

    dataset: Any
    user: Callable[[int], None] | None
    trainer: int  # process id, if the worker ends with the thread that starts it; else 0

    def __call__(self, worker: int) -> None:
        if os.getppid() == self.trainer:  # else a fork server started it, which ends with the trainer
            # A worker keeps the trainer's ports and memory open, so it must not outlive the trainer.
            die_with(self.trainer, signal.SIGKILL)()
        # The user's functions find their own data set, as without fabric.
        object.__setattr__(get_worker_info(), "dataset", self.dataset)
        if self.user is not None:
            self.user(worker)


class WorkerProcesses:
    """Reads micro-batches by ``count`` workers of torch's DataLoader. They start with the first request.

    The DataLoader reads without end, in the order of ``_Requests``: the micro-batches of the step under
    way, then this replica's share of the steps after it. After a change of the membership the requests
    change too. The micro-batches that were requested before and that nobody needs here any more are dropped
    as they come.

    Before each micro-batch a worker seeds the generators from (seed, step, micro-batch), so every replica
    that reads it draws the same numbers. A worker ends with its trainer, also where the trainer is killed.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        items: Callable[[int, int], Sequence[Any]],
        count: int,
        options: "LoaderOptions",
        replica: str,
        steps_to_try: int,
    ) -> None:
        self._fetcher, self._count, self._options, self._replica = fetcher, count, options, replica
        self._requests = _Requests(items, steps_to_try)
        self._ready: dict[Key, Any] = {}
        self._step = -1
        self._batches: Iterator[Any] | None = None

    def _start(self) -> Iterator[Any]:
        """Start the workers, which read the requests from now on."""
        fetcher, options = self._fetcher, self._options
        # Workers that seed a generator of their own by ``get_worker_info().seed`` differ between replicas.
        generator = torch.Generator()
        generator.manual_seed(xxhash.xxh3_64_intdigest(f"{fetcher.seed} {self._replica}".encode()) >> 1)
        # The kernel ends a worker with the thread that started it.
        main = threading.current_thread() is threading.main_thread()
        return iter(
            DataLoader(
                _Reading(fetcher),
                batch_size=None,
                sampler=self._requests,
                num_workers=self._count,
                collate_fn=_unchanged,
                pin_memory=options.pin_memory,
                timeout=options.timeout,
                worker_init_fn=_Begin(fetcher.dataset, options.worker_init_fn, os.getpid() if main else 0),
                multiprocessing_context=options.multiprocessing_context,
                generator=generator,
                prefetch_factor=options.prefetch_factor,
            )
        )

    def read_ahead(self, step: int, micro_batches: Sequence[int]) -> None:
        """These micro-batches of ``step`` are needed now; drop all others of it and of earlier steps."""
        wanted = [(step, i) for i in micro_batches]
        for key in [k for k in self._ready if k[0] <= step and k not in wanted]:
            self._drop(key)
        self._requests.ask(wanted)
        if step != self._step:
            self._step = step
            self.expect(step + 1, micro_batches)
        if wanted and self._batches is None:
            self._batches = self._start()

    def expect(self, step: int, micro_batches: Iterable[int]) -> None:
        """Read these micro-batches of ``step`` and of the steps after it while there is time."""
        self._requests.go_on(step, micro_batches)

    def fetch(self, step: int, micro_batch: int) -> Any:
        """Return one micro-batch, or raise the error with which a worker read it."""
        wanted = step, micro_batch
        if self._batches is None:
            self.read_ahead(step, [micro_batch])
        if wanted not in self._ready and wanted not in self._requests.sent:
            self._requests.ask([wanted])
        while wanted not in self._ready:
            assert self._batches is not None
            result, key = next(self._batches), self._requests.sent.popleft()
            if key is not None:
                self._ready[key] = result
                if key[0] < step:
                    self._drop(key)
        result = self._ready.pop(wanted)
        self._requests.known.discard(wanted)
        if isinstance(result, _Failed):
            result.error.reraise()  # type: ignore[no-untyped-call]
        return result

    def _drop(self, key: Key) -> None:
        del self._ready[key]
        self._requests.known.discard(key)

    def close(self) -> None:
        self._batches = None


def _unchanged(batch: Any) -> Any:
    return batch


class ReadingThreads:
    """Read micro-batches ahead; they share the data set and the process's random generators.

    ``items`` gives the items of a micro-batch; only the loop's thread calls it.
    """

    def __init__(self, fetcher: Fetcher, items: Callable[[int, int], Sequence[Any]], count: int) -> None:
        self._fetcher = fetcher
        self._items = items
        self._ahead: dict[tuple[int, int], Future[Any]] = {}
        self._pool = ThreadPoolExecutor(count, "fabric-loader")

    def expect(self, step: int, micro_batches: Iterable[int]) -> None:
        for micro_batch in micro_batches:
            if (step, micro_batch) not in self._ahead:
                items = self._items(step, micro_batch)
                self._ahead[step, micro_batch] = self._pool.submit(self._fetcher.read, items)

    def read_ahead(self, step: int, micro_batches: Iterable[int]) -> None:
        """Begin to read these micro-batches, and discard all others that were read ahead."""
        wanted = {(step, micro_batch) for micro_batch in micro_batches}
        for key in [k for k in self._ahead if k not in wanted]:
            self._ahead.pop(key).cancel()
        self.expect(step, sorted(micro_batch for _, micro_batch in wanted))

    def fetch(self, step: int, micro_batch: int) -> Any:
        future = self._ahead.pop((step, micro_batch), None)
        if future is not None:
            return future.result()
        # A data set or collate function that draws numbers draws the same ones on every replica.
        return self._fetcher.seeded(step, micro_batch, self._items(step, micro_batch))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


Workers = WorkerProcesses | ReadingThreads
_CHOICES = {
    "policy": ("constant", "shrink"),
    "on_poison": ("stop", "skip"),
    "on_loss": ("wait", "shrink", "stop"),
    "epoch_end": ("continue", "short", "drop"),
    "workers": ("processes", "threads"),
}


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How the batch is shared out and read ahead, as given to ``session.loader``.

    ``policy``: "constant" or "shrink". ``redundancy``: how many replicas can read each shard of the data; 0:
    all. ``data_slot``: this replica's shard under ``redundancy`` (default: the number at the end of its id;
    with ``FABRIC_RACK`` the lighthouse chooses a shard). ``on_poison``: "stop" or "skip". ``on_loss``, when
    no member can read a shard: "wait" for such a member, "shrink" (skip the shard's part) or "stop" the job.
    ``scale_lr``: under "shrink", scale the learning rate of a step by sqrt(present / all micro-batches).
    ``sampler`` or ``batch_sampler``: the order of the data, in place of a permutation for each pass.
    ``generator``: the one that a DataLoader has beside its sampler. ``epoch_end``: "continue", "short" or
    "drop", see ``fabric.client.data.sample_plan``.
    """

    policy: str = "constant"
    redundancy: int = 0
    data_slot: int | None = None
    on_poison: str = "stop"
    scale_lr: bool = False
    on_loss: str = "wait"
    sampler: Any = None
    batch_sampler: Any = None
    generator: Any = None
    epoch_end: str = "continue"
    workers: str = "processes"  # or "threads", which share the data set; the others are those of a DataLoader
    worker_init_fn: Callable[[int], None] | None = None
    prefetch_factor: int | None = None
    multiprocessing_context: Any = None
    pin_memory: bool = False
    timeout: float = 0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (given := getattr(self, name)) not in choices:
                *others, last = (f'"{x}"' for x in choices)
                raise ConfigError(f'{name} is "{given}": it must be {", ".join(others)} or {last}')
        if self.on_loss != "wait" and self.redundancy == 0:
            raise ConfigError("on_loss goes with redundancy: without it every replica can read every shard")
        if self.redundancy < 0 or (self.data_slot is not None and self.redundancy == 0):
            raise ConfigError(
                "redundancy must be 0 (all replicas can read all data) or a number of replicas; a data slot "
                "goes with redundancy"
            )

    def order(self, dataset: Any, seed: int) -> SamplerOrder | None:
        """Return the order of the sampler; None for a permutation of the data set in each pass."""
        if self.sampler is not None and self.batch_sampler is not None:
            raise ConfigError("session.loader has a sampler and a batch_sampler: give one of them")
        sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
        if sampler is None or shuffles_all(sampler, dataset):
            return None
        return SamplerOrder(sampler, seed, dataset, self.generator)

    def sharing(self, replicas: int) -> Sharing:
        """Return these options as the protocol's ``Sharing``, for a job that starts with ``replicas``."""
        if self.redundancy > replicas:
            raise ConfigError(f"redundancy is {self.redundancy}, the job has {replicas} replicas")
        return Sharing(self.policy, replicas, self.redundancy, self.on_poison, self.on_loss)


def parse_options(given: dict[str, Any]) -> LoaderOptions:
    """Check the arguments of ``session.loader`` besides the sizes. Raises ConfigError for an unknown one."""
    names = [f.name for f in fields(LoaderOptions)]
    if unknown := sorted(set(given) - set(names)):
        raise ConfigError(f"session.loader knows no {unknown[0]}: its options are {', '.join(names)}")
    return LoaderOptions(**given)


def describe_sharing(sharing: Sharing) -> dict[str, Any]:
    """Return, for the journal, the settings that differ from "every replica may compute all"."""
    body: dict[str, Any] = {}
    if sharing.policy != "constant" or sharing.readers:
        body |= {"policy": sharing.policy, "data_slots": sharing.data_slots, "redundancy": sharing.readers}
    if sharing.readers:
        body["on_loss"] = sharing.on_loss
    return body


def data_slot_of(replica: str, replicas: int, given: int | None) -> int:
    """Return the data slot that was given, or the number at the end of the replica's id. Raises
    ConfigError."""
    number = re.search(r"(\d+)$", replica)
    data_slot = given if given is not None else int(number[1]) if number else -1
    if not 0 <= data_slot < replicas:
        raise ConfigError(
            f"replica {replica} of {replicas} has no data slot: end its id with a number below {replicas}, "
            "or give data_slot="
        )
    return data_slot


@dataclass(frozen=True, slots=True)
class SampleSlice:
    """One of ``count`` equal slices of each micro-batch's samples.

    ``draws``: the rank's own, see ``RankGroup``.
    """

    index: int = 0
    count: int = 1
    draws: int = 0

    @classmethod
    def of(cls, mesh: Any, draws: int) -> "SampleSlice":
        """Return the slice of this rank in ``mesh``, a DeviceMesh of one dimension. Raises ConfigError.

        Without a mesh the slice is the whole micro-batch.
        """
        if mesh is None:
            return cls(draws=draws)
        if mesh.ndim != 1:
            raise ConfigError(
                f"samples are shared out over one dimension of a mesh, not {mesh.ndim}: give that one, as "
                'mesh["dp"]'
            )
        return cls(mesh.get_local_rank(), mesh.size(), draws)

    def check(self, plan: SamplePlan) -> None:
        """Raise ConfigError where micro-batches do not divide into these slices."""
        if self.count > 1 and plan.epoch_end == "short":
            raise ConfigError(
                f'epoch_end="short" does not go with {self.count} ranks that share each micro-batch, because '
                'a short one does not divide: say "drop" or "continue"'
            )
        if plan.micro_batch_size % self.count:
            raise ConfigError(
                f"micro_batch_size {plan.micro_batch_size} must be a multiple of the {self.count} ranks that "
                "share each micro-batch"
            )


def collate(samples: Sequence[Any]) -> Any:
    """Collate as torch does by default: stack tensors, keep the structure."""
    return torch.utils.data.default_collate(list(samples))


class Loader:
    """Micro-batches of a plan on request, read ahead by worker processes or threads.

    It discards a micro-batch that it has read ahead when the step is past or another member computes it.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        plan: SamplePlan,
        sharing: Sharing = EVERYTHING,
        data_slot: int = -1,
        scale_lr: bool = False,
        part: SampleSlice | None = None,
    ) -> None:
        self.plan = plan
        self.slice = part or SampleSlice()
        self.slice.check(plan)
        self.sharing = sharing
        self.data_slot = data_slot
        self.scale_lr = scale_lr
        self.fetcher = replace(fetcher, draws=self.slice.draws)
        self.workers: Workers | None = None
        self._pass = -1  # that began last here
        self._newest: tuple[tuple[int, int], list[Any]] = (-1, -1), []  # items of a micro-batch, asked twice

    @property
    def shards(self) -> list[tuple[int, int]]:
        """The index ranges [begin, end) that this replica must be able to read.

        With ``FABRIC_RACK`` the lighthouse chooses them before the first step. Raises FabricError earlier.
        """
        if not self.plan.shards:
            return [(0, self.plan.dataset_size)]
        if self.data_slot < 0:
            raise FabricError(
                "the shards of a replica with FABRIC_RACK are chosen when it joins: read `shards` inside the "
                "loop over session.steps, or give session.loader a data_slot"
            )
        if self.data_slot >= self.plan.shards:
            return []  # more members than shards: this member computes nothing
        stack = stack_of(self.data_slot, self.plan.shards, self.sharing.readers)
        return [self.plan.shard(number) for number in stack]

    def sit(self, record: Record | None, replica: str) -> None:
        """Read the shards of the data slot that ``record`` gives to ``replica``."""
        member = record.member(replica) if record is not None else None
        if member is not None and self.plan.shards:
            self.data_slot = member.data_slot

    def begin_step(self, step: int) -> None:
        """Check at each pass that the data set has the size of the plan. Raises ConfigError."""
        plan = self.plan
        if plan.is_stream or plan.order is not None:
            return
        number = step * plan.global_batch_size // plan.dataset_size
        if number != self._pass:
            self._pass, dataset = number, self.fetcher.dataset
            check_size(type(dataset).__name__, len(dataset), plan.dataset_size)

    def expect(self, step: int, micro_batches: Iterable[int]) -> None:
        """Begin to read the micro-batches that will come next if nothing changes."""
        if self.workers is not None:
            self.workers.expect(step, self.plan.with_samples(step, micro_batches))

    def read_ahead(self, step: int, micro_batches: Iterable[int]) -> None:
        """Begin to read these micro-batches, and discard all others that were read ahead."""
        if self.workers is not None:
            self.workers.read_ahead(step, self.plan.with_samples(step, micro_batches))

    def count(self, step: int, micro_batch: int) -> int:
        """Return the number of this rank's samples of a micro-batch."""
        return self.fetcher.count(self.items(step, micro_batch))

    def items(self, step: int, micro_batch: int) -> list[Any]:
        """Return the data set indices of this rank's part of a micro-batch; of a stream the positions."""
        at, items = self._newest
        if at != (step, micro_batch):
            items = self.plan.items(step, micro_batch)
            size = len(items) // self.slice.count
            items = list(items[self.slice.index * size : (self.slice.index + 1) * size])
            self._newest = (step, micro_batch), items
        return list(items)

    def samples(self, step: int, micro_batch: int) -> list[int]:
        """Return the samples of a micro-batch, with those of the ranks beside this one."""
        is_whole = self.plan.order is None and self.slice.count == 1
        return self.items(step, micro_batch) if is_whole else self.plan.samples(step, micro_batch)

    def fetch(self, step: int, micro_batch: int) -> Any:
        if self.workers is not None:
            return self.workers.fetch(step, micro_batch)
        return self.fetcher.seeded(step, micro_batch, self.items(step, micro_batch))

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()


def check_size(name: str, size: int, planned: int) -> None:
    """Raise ConfigError where data have another size than when the training began."""
    if size != planned:
        raise ConfigError(
            f"the {name} has {size} samples and had {planned} when the training began, and all replicas deal "
            "out the same ones: train on each size by a loop of its own, with a job or a loader of its own"
        )


def make_loader(
    dataset: Any,
    sizes: tuple[int, int, int],
    collate_fn: Callable[[Sequence[Any]], Any] | None,
    num_workers: int,
    options: LoaderOptions,
    settings: Settings,
    part: SampleSlice | None = None,
) -> Loader:
    """Make the loader of one rank. Raises ConfigError for sizes and options that do not fit.

    ``sizes``: global batch, micro-batch and seed. ``settings``: those of the replica that reads the data.
    ``part``: this rank's slice of a micro-batch.
    """
    streams, replicas = is_stream(dataset), parse_replicas(settings.replicas)[1]  # that the job starts with
    if streams and options.redundancy:
        raise ConfigError("redundancy is for data sets with len() and an index, not for iterable ones")
    shards = replicas if options.redundancy else 0
    order = options.order(dataset, sizes[2])
    size = order.size if order is not None else 0 if streams else len(dataset)
    plan = SamplePlan(size, *sizes, shards, streams, options.epoch_end, order)
    data_slot = -1
    if options.redundancy and (options.data_slot is not None or not settings.rack):
        data_slot = data_slot_of(settings.replica, replicas, options.data_slot)
    collate_fn, batched = collate_fn or collate, options.batch_sampler is not None
    if streams:
        fetcher = Fetcher(IterableStream(dataset, plan.global_batch_size), collate_fn, plan.seed)
    elif batched and plan.micro_batch_size != 1:
        raise ConfigError(
            f"micro_batch_size is {plan.micro_batch_size}, but a batch of the batch_sampler is "
            "one: give micro_batch_size=1, and global_batch_size as a number of batches"
        )
    else:
        has_epochs = hasattr(dataset, "set_epoch") and not plan.shards
        # Without the sampler the plan can go to a process that does not inherit it.
        pass_of = replace(plan, order=None).pass_of if has_epochs else None
        fetcher = Fetcher(dataset, collate_fn, plan.seed, batched, pass_of)
    loader = Loader(fetcher, plan, options.sharing(replicas), data_slot, options.scale_lr, part)
    loader.workers = _workers(loader, num_workers, options, settings.replica)
    return loader


def is_stream(dataset: Any) -> bool:
    """Whether the data set is iterated, not indexed. Raises ConfigError for an iterator, which ends."""
    if isinstance(dataset, Iterator):
        raise ConfigError(
            f"the data set is a {type(dataset).__name__}, an iterator that can be read only once: give an "
            "object whose __iter__ begins again, such as a class with `def __iter__(self): yield ...`"
        )
    # torch's IterableDataset inherits ``__getitem__``, although it cannot be indexed.
    indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, torch.utils.data.IterableDataset)
    return not indexed and hasattr(dataset, "__iter__")


def _workers(loader: Loader, count: int, options: LoaderOptions, replica: str) -> Workers | None:
    if not count:
        return None
    fetcher = loader.fetcher
    if loader.plan.is_stream or options.workers == "threads":
        if options.worker_init_fn is not None:
            kind = "an iterable data set" if loader.plan.is_stream else 'workers="threads"'
            raise ConfigError(
                f"worker_init_fn goes with worker processes, and {kind} is read in the trainer's own "
                "process: leave it out"
            )
        if fetcher.pass_of is not None:
            raise ConfigError(
                "the data set has set_epoch, and threads that share it may be in two passes at once: give "
                'workers="processes"'
            )
        return ReadingThreads(fetcher, loader.items, count)
    return WorkerProcesses(fetcher, loader.items, count, options, replica, loader.plan.steps_per_pass)
