"""The order of the data: a pure function of data set size, seed and step, the same on every replica.

Pass k over the data set is the permutation ``numpy.random.Generator(PCG64([seed, k])).permutation(size)``;
the passes are concatenated. Step s covers positions [s*G, (s+1)*G) of the passes, for global batch size G.
Its micro-batch i covers positions [i*m, (i+1)*m) of the step, for micro-batch size m. So the committed step
gives the data position.

Data that only some replicas can read (``redundancy`` above 0) are cut into n shards, one per data slot. Shard
h has the indices [h*size//n, (h+1)*size//n). The micro-batches of a step are divided among the shards in
order, as evenly as possible. Pass k of shard h has its own order, from ``PCG64([seed, k, h + 1])``.

A data set without a size is a stream: its samples are identified by position (see
``fabric.client.data.iterable_stream``).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fabric.client.data.iterable_stream import IterableStream
from fabric.client.data.randomness import seed_everything
from fabric.errors import ConfigError, FabricError
from fabric.model import EVERYTHING, Record, Sharing
from fabric.protocol.rules.assignment import cut
from fabric.protocol.rules.spare import best_offsets, has_distinct_differences, stack_of

ON_LOSS = ("wait", "shrink", "stop")


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
        indices.extend(int(i) for i in part)
        start += len(part)
        count -= len(part)
    return indices


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """How a data set is cut into steps and micro-batches."""

    dataset_size: int  # number of samples; 0 for a stream
    global_batch_size: int
    micro_batch_size: int
    seed: int
    shards: int = 0  # number of shards; 0: every replica can read all data
    is_stream: bool = False

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

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a step."""
        return self.global_batch_size // self.micro_batch_size

    def samples(self, step: int, micro_batch: int) -> list[int]:
        """Return the data set indices (of a stream: positions) of one micro-batch."""
        start = step * self.global_batch_size + micro_batch * self.micro_batch_size
        if self.is_stream:
            return list(range(start, start + self.micro_batch_size))
        if not self.shards:
            return sample_indices(self.dataset_size, self.seed, start, self.micro_batch_size)
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

    def describe(self) -> dict[str, int]:
        """Return all values that determine the order of the data, for the journal."""
        body = {
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
        return body


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How the batch is shared out, as given to ``session.loader``.

    ``policy``: "constant" or "shrink". ``redundancy``: how many replicas can read each shard of the data; 0:
    all. ``data_slot``: this replica's shard under ``redundancy`` (default: the number at the end of its id;
    with ``FABRIC_RACK`` the lighthouse chooses a shard). ``on_poison``: "stop" or "skip". ``on_loss``, when
    no member can read a shard: "wait" for such a member, "shrink" (skip the shard's part) or "stop" the job.
    ``scale_lr``: under "shrink", scale the learning rate of a step by sqrt(present / all micro-batches).
    """

    policy: str = "constant"
    redundancy: int = 0
    data_slot: int | None = None
    on_poison: str = "stop"
    scale_lr: bool = False
    on_loss: str = "wait"

    def __post_init__(self) -> None:
        if self.policy not in ("constant", "shrink"):
            raise ConfigError(f'policy is "{self.policy}": it must be "constant" or "shrink"')
        if self.on_poison not in ("stop", "skip"):
            raise ConfigError(f'on_poison is "{self.on_poison}": it must be "stop" or "skip"')
        if self.on_loss not in ON_LOSS:
            raise ConfigError(f'on_loss is "{self.on_loss}": it must be "wait", "shrink" or "stop"')
        if self.on_loss != "wait" and self.redundancy == 0:
            raise ConfigError("on_loss goes with redundancy: without it every replica can read every shard")
        if self.redundancy < 0 or (self.data_slot is not None and self.redundancy == 0):
            raise ConfigError(
                "redundancy must be 0 (all replicas can read all data) or a number of replicas; a data "
                "slot goes "
                "with redundancy"
            )

    def sharing(self, replicas: int) -> Sharing:
        """Return these options as the protocol's ``Sharing``, for a job that starts with ``replicas``."""
        if self.redundancy > replicas:
            raise ConfigError(f"redundancy is {self.redundancy}, the job has {replicas} replicas")
        return Sharing(self.policy, replicas, self.redundancy, self.on_poison, self.on_loss)


def parse_options(given: dict[str, Any]) -> LoaderOptions:
    """Check the arguments of ``session.loader`` besides the sizes. Raises ConfigError for an unknown one."""
    options = [f.name for f in fields(LoaderOptions)]
    unknown = sorted(set(given) - set(options))
    if unknown:
        raise ConfigError(f"session.loader knows no {unknown[0]}: its options are {', '.join(options)}")
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
    """One of ``count`` equal slices of each micro-batch's samples."""

    index: int = 0
    count: int = 1

    @classmethod
    def of(cls, mesh: Any) -> "SampleSlice":
        """Return the slice of this rank in ``mesh``, a DeviceMesh of one dimension. Raises ConfigError.

        Without a mesh the slice is the whole micro-batch.
        """
        if mesh is None:
            return cls()
        if mesh.ndim != 1:
            raise ConfigError(
                f"samples are shared out over one dimension of a mesh, not {mesh.ndim}: give that one, as "
                'mesh["dp"]'
            )
        return cls(mesh.get_local_rank(), mesh.size())

    def check(self, plan: SamplePlan) -> None:
        """Raise ConfigError where micro-batches do not divide into these slices."""
        if plan.micro_batch_size % self.count:
            raise ConfigError(
                f"micro_batch_size {plan.micro_batch_size} must be a multiple of the {self.count} ranks that "
                "share each micro-batch"
            )

    def cut(self, samples: Sequence[int]) -> list[int]:
        """Return this slice of ``samples``."""
        size = len(samples) // self.count
        return list(samples[self.index * size : (self.index + 1) * size])


def collate(samples: Sequence[Any]) -> Any:
    """Collate as torch does by default: stack tensors, keep the structure."""
    return torch.utils.data.default_collate(list(samples))


class Loader:
    """Micro-batches of a data set on request, read ahead by ``num_workers`` threads.

    It discards a micro-batch that it has read ahead when the step is past or another member computes it.
    """

    def __init__(
        self,
        dataset: Any,
        plan: SamplePlan,
        collate: Callable[[Sequence[Any]], Any],
        num_workers: int = 0,
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
        self._dataset = dataset
        self._stream = IterableStream(dataset) if plan.is_stream else None
        self._collate = collate
        self._ahead: dict[tuple[int, int], Future[Any]] = {}
        self._pool = ThreadPoolExecutor(num_workers, "fabric-loader") if num_workers > 0 else None

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

    @property
    def layout(self) -> str:
        """How the shards are placed on the replicas.

        "all": every replica reads all data. "golomb": any two shards share at most one reader. "consecutive":
        the job has too few replicas for "golomb".
        """
        if not self.plan.shards:
            return "all"
        offsets = best_offsets(self.plan.shards, self.sharing.readers)
        return "golomb" if has_distinct_differences(self.plan.shards, offsets) else "consecutive"

    def expect(self, step: int, micro_batches: Iterable[int]) -> None:
        """Begin to read the micro-batches that will come next if nothing changes."""
        if self._pool is not None:
            self._submit(step, micro_batches)

    def read_ahead(self, step: int, micro_batches: Iterable[int]) -> None:
        """Begin to read these micro-batches, and discard all others that were read ahead."""
        if self._pool is None:
            return
        wanted = {(step, micro_batch) for micro_batch in micro_batches}
        for key in [k for k in self._ahead if k not in wanted]:
            self._ahead.pop(key).cancel()
        self._submit(step, sorted(micro_batch for _, micro_batch in wanted))

    def _submit(self, step: int, micro_batches: Iterable[int]) -> None:
        assert self._pool is not None
        for micro_batch in micro_batches:
            if (step, micro_batch) not in self._ahead:
                future = self._pool.submit(self._read, step, micro_batch)
                self._ahead[step, micro_batch] = future

    def fetch(self, step: int, micro_batch: int) -> Any:
        """Return one collated micro-batch."""
        future = self._ahead.pop((step, micro_batch), None)
        if future is not None:
            return future.result()
        # A data set or collate function that draws numbers draws the same ones on every replica.
        seed_everything(self.plan.seed, step, micro_batch)
        return self._read(step, micro_batch)

    def _read(self, step: int, micro_batch: int) -> Any:
        indices = self.slice.cut(self.plan.samples(step, micro_batch))
        if self._stream is not None:
            # Keep the samples of the previous step: this member may still inherit a part of that step.
            first = max(0, step - 1) * self.plan.global_batch_size
            return self._collate(self._stream.read(first, indices))
        return self._collate([self._dataset[i] for i in indices])

    def close(self) -> None:
        """End the reading threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class DataReader:
    """The replica that reads the data, as the loader needs it."""

    replica: str
    replicas: int  # number of replicas with which the job starts
    rack: str = ""  # name of the rack of the replica's host


def make_loader(
    dataset: Any,
    sizes: tuple[int, int, int],
    collate_fn: Callable[[Sequence[Any]], Any] | None,
    num_workers: int,
    options: LoaderOptions,
    reader: DataReader,
    part: SampleSlice | None = None,
) -> Loader:
    """Make the loader of one rank. Raises ConfigError for sizes and options that do not fit.

    ``sizes``: global batch, micro-batch and seed. ``part``: this rank's slice of a micro-batch.
    """
    # torch's IterableDataset inherits ``__getitem__``, although it cannot be indexed.
    indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, torch.utils.data.IterableDataset)
    streams = not indexed and hasattr(dataset, "__iter__")
    if streams and options.redundancy:
        raise ConfigError("redundancy is for data sets with len() and an index, not for iterable ones")
    shards = reader.replicas if options.redundancy else 0
    plan = SamplePlan(0 if streams else len(dataset), *sizes, shards=shards, is_stream=streams)
    data_slot = -1
    if options.redundancy and (options.data_slot is not None or not reader.rack):
        data_slot = data_slot_of(reader.replica, reader.replicas, options.data_slot)
    sharing = options.sharing(reader.replicas)
    return Loader(
        dataset, plan, collate_fn or collate, num_workers, sharing, data_slot, options.scale_lr, part
    )
