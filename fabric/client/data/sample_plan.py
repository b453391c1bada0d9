"""The order of the data: a pure function of data set size, seed and step, the same on every replica.

Pass k over the data set is the permutation ``numpy.random.Generator(PCG64([seed, k])).permutation(size)``.
With a sampler it is the list that the sampler yields for pass k (``SamplerOrder``). Position p is
number ``p % size`` of pass ``p // size``.

``epoch_end`` says what the last step of a pass has, for global batch size G. "continue": the passes are
concatenated, and step s covers the positions [s*G, (s+1)*G). With "short" and "drop" a pass is a whole number
of steps. "short": its last step has the samples that are left. "drop": these samples are dropped.

Micro-batch i of a step covers positions [i*m, (i+1)*m) of the step, for micro-batch size m. In a short step a
micro-batch may have fewer samples, or none. So the committed step gives the data position.

Data that only some replicas can read (``redundancy`` above 0) are cut into n shards, one per data slot. Shard
h has the indices [h*size//n, (h+1)*size//n). The micro-batches of a step are divided among the shards in
order, as evenly as possible. Pass k of shard h has its own order, from ``PCG64([seed, k, h + 1])``.

A data set without a size is a stream: its samples are identified by position (``IterableStream``).
"""

import contextlib
import copy
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fabric.client.data.randomness import keep_generators, seed_all
from fabric.errors import ConfigError
from fabric.protocol.rules.assignment import cut

# Samplers whose pass depends on the seed and the number of the pass alone, unless they have a generator.
_WITHOUT_STATE = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
_KEPT_PASSES = 2
_WHOLE = 1 << 31  # the longest pass that is read whole
_PART, _KEPT_PARTS = 4096, 512  # items of a longer pass that are read together, and parts that are kept


class SamplerOrder:
    """The items of a sampler by position: pass k over the data is the list that it yields for pass k.

    Every replica must get the same lists, also a replica that joins in pass 40. So the generators of torch,
    numpy and random are seeded from (seed, k) before pass k, and ``set_epoch(k)`` is called where it exists.
    A sampler with a state of its own (a generator, a counter) is copied first. The copy is iterated pass
    after pass from that state, as a DataLoader iterates the sampler, and again from pass 0 for an earlier
    pass. At most two passes are kept. The digest of pass 0 belongs to the description of the data, which must
    be equal on all members. A pass that no training ends, as minGPT's of 10 billion draws, is read in parts.

    ``generator``: that of the DataLoader, which draws one number from it for each pass. ``dataset``: it is
    shared with the sampler's copies. Safe from any thread.
    """

    def __init__(self, sampler: Any, seed: int, dataset: Any = None, generator: Any = None) -> None:
        self.name = type(sampler).__name__
        length_of(sampler)
        self._seed, self._dataset = seed, dataset
        self._given, self._contents = sampler, _contents(sampler)
        self._jumps = _has_no_state(sampler)
        self._origin = (sampler, None) if self._jumps else self._copy((sampler, generator))
        self._walker, self._next = self._origin, 0
        self._passes: dict[int, Sequence[Any]] = {}
        self._lock = threading.Lock()
        self._begin()
        first = self._iterate(0)
        if not len(first):
            raise ConfigError(f"the sampler {self.name} gives no index: give one with at least one")
        self.size, self.digest = len(first), _digest(first)
        self._passes[0] = first
        if self._jumps:
            return
        self._pass(1)  # has the length of pass 0
        self._begin()
        if _digest(self._iterate(0)) != self.digest:
            raise ConfigError(
                f"the sampler {self.name} gives another order each time it begins, so replicas would get "
                "different orders: let it draw from the generator of torch, numpy or random, or from one "
                "that is its attribute"
            )

    def items(self, positions: Sequence[int]) -> list[Any]:
        """Return what the sampler yields at ``positions``, which count through all passes."""
        passes = {number: self._pass(number) for number in {p // self.size for p in positions}}
        return [passes[p // self.size][p % self.size] for p in positions]

    def _pass(self, number: int) -> Sequence[Any]:
        with self._lock:
            if number not in self._passes:
                if _contents(self._given) != self._contents:
                    raise ConfigError(
                        f"the sampler {self.name} was changed in the training, and each replica would change "
                        "it by its own samples: give session.steps another loader for the next stage, with a "
                        "sampler that all replicas make alike"
                    )
                if not self._jumps and number < self._next:
                    self._begin()
                while not self._jumps and self._next < number:
                    self._iterate(self._next)
                items = self._iterate(number)
                if len(items) != self.size:
                    raise ConfigError(
                        f"pass {number} of the sampler {self.name} has {len(items)} entries, and pass 0 had "
                        f"{self.size}: give a sampler whose passes have one length"
                    )
                self._passes[number] = items
                for old in sorted(self._passes)[:-_KEPT_PASSES]:
                    if old != number:
                        del self._passes[old]
            return self._passes[number]

    def _begin(self) -> None:
        self._walker, self._next = self._origin if self._jumps else self._copy(self._origin), 0

    def _iterate(self, number: int) -> Sequence[Any]:
        """Return the list of pass ``number``, which comes next."""
        sampler, generator = self._walker
        self._next = number + 1
        if type(sampler) is SequentialSampler:
            return range(len(sampler))
        if isinstance(sampler, range | list | tuple):
            return sampler
        if len(sampler) > _WHOLE:
            return _LongPass(lambda: _start(*self._copy(self._origin), number), len(sampler), self._seed)
        with _seeded(self._seed, number):
            items = list(islice(_start(sampler, generator, number), len(sampler) + 1))
        if len(items) > len(sampler):
            raise ConfigError(
                f"the sampler {self.name} gives more indices than its len(), {len(sampler)}: let __len__ "
                "return the number of indices in a pass"
            )
        return array("q", items) if all(type(i) is int for i in items) else items

    def _copy(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        """Copy a sampler with its generators; both go on to share the data."""
        shared = [self._dataset, *_data_of(pair[0])]
        try:
            return copy.deepcopy(pair, {id(x): x for x in shared if x is not None})
        except Exception as error:
            raise ConfigError(
                f"the sampler {self.name} cannot be copied ({error}), and a replica that joins needs it "
                "as it was at the start: keep what copy.deepcopy cannot copy out of the sampler"
            ) from error


def length_of(sampler: Any) -> int:
    """Return the length of a pass. Raises ConfigError for a sampler without one."""
    if not (hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
        raise ConfigError(
            f"the sampler {type(sampler).__name__} has no len(), and every replica must know how long a pass "
            "is: give it __len__, the number of its indices in a pass"
        )
    return len(sampler)


def indices_of(items: Sequence[Any], positions: Sequence[int]) -> list[int]:
    """Return the data set indices among a sampler's ``items`` at ``positions``, those of a batch one by one.

    A sampler that yields other things than numbers has positions instead.
    """
    indices = [i for x in items for i in (x if isinstance(x, list | tuple) else (x,))]
    return indices if all(type(i) is int and i >= 0 for i in indices) else list(positions)


def shuffles_all(sampler: Any, dataset: Any) -> bool:
    """Whether the sampler is a uniform shuffling of the whole data set without a generator of its own."""
    return (
        type(sampler) is RandomSampler
        and sampler.generator is None
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source) == len(dataset)
    )


def _has_no_state(sampler: Any) -> bool:
    if type(sampler) is BatchSampler:
        return _has_no_state(sampler.sampler)
    if isinstance(sampler, range | list | tuple):
        return True
    return type(sampler) in _WITHOUT_STATE and getattr(sampler, "generator", None) is None


def _contents(sampler: Any) -> dict[str, int]:
    """Return digests of the weights in a sampler: tensors, arrays and lists of floating-point numbers."""
    contents: dict[str, int] = {}
    data = {id(x) for x in _data_of(sampler)}
    while hasattr(sampler, "__dict__"):
        for name, value in vars(sampler).items():
            if isinstance(value, torch.Tensor | np.ndarray) and id(value) not in data:
                numbers = torch.as_tensor(value if "float" in str(value.dtype) else [], device="cpu")
                contents[name] = xxhash.xxh3_64_intdigest(numbers.double().numpy(force=True).tobytes())
            elif isinstance(value, list) and value and type(value[0]) is float:
                contents[name] = _digest(value)
        sampler = getattr(sampler, "sampler", None)
    return contents


def _data_of(sampler: Any) -> Iterator[Any]:
    """Yield the data sets that a sampler holds, which its copies need not copy."""
    while sampler is not None:
        for value in vars(sampler).values() if hasattr(sampler, "__dict__") else ():
            if isinstance(value, torch.utils.data.Dataset):
                yield value
        yield from (getattr(sampler, name, None) for name in ("data_source", "dataset"))
        sampler = getattr(sampler, "sampler", None)


def _digest(items: Sequence[Any]) -> int:
    """Return a number of 62 bits that tells one list of items from another, a long one by its first."""
    if isinstance(items, _LongPass):
        items = [items[i] for i in range(_PART)]
    content = items.tobytes() if isinstance(items, array) else repr(items).encode()
    return xxhash.xxh3_64_intdigest(content) >> 2


def _start(sampler: Any, generator: Any, number: int) -> Iterator[Any]:
    """Start pass ``number`` of the sampler, as a DataLoader does."""
    within = sampler
    while within is not None:
        if hasattr(within, "set_epoch"):
            within.set_epoch(number)
        within = getattr(within, "sampler", None)
    iterator: Iterator[Any] = iter(sampler)
    if generator is not None:
        draw = torch.empty((), dtype=torch.int64, device=generator.device)
        draw.random_(generator=generator)
    return iterator


class _LongPass(Sequence[Any]):
    """The items of a pass that no training ends. They are read in parts, for which generators are seeded."""

    def __init__(self, start: Callable[[], Iterator[Any]], size: int, seed: int) -> None:
        self._start, self._size, self._seed = start, size, seed
        self._iterator: Iterator[Any] = iter(())
        self._next = 1  # the number of the part that it gives next
        self._parts: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: Any) -> Any:
        part, place = divmod(position, _PART)
        if part not in self._parts and part < self._next:
            self._next, self._parts = 0, {}
        while self._next <= part:
            with _seeded(self._seed, self._next):
                self._iterator = self._iterator if self._next else self._start()
                self._parts[self._next] = list(islice(self._iterator, _PART))
            self._parts.pop(self._next - _KEPT_PARTS, None)
            self._next += 1
        return self._parts[part][place]


@contextlib.contextmanager
def _seeded(seed: int, number: int) -> Iterator[None]:
    """Seed the generators of this process for pass ``number``; afterwards they are as before."""
    give_back = keep_generators()
    seed_all(xxhash.xxh3_64_intdigest(f"{seed} pass {number}".encode()) >> 1)
    try:
        yield
    finally:
        give_back()


@lru_cache(maxsize=32)
def _permutation(size: int, seed: int, number: int, shard: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    words = [seed, number] if shard < 0 else [seed, number, shard + 1]
    return np.random.Generator(np.random.PCG64(words)).permutation(size)


def sample_indices(dataset_size: int, seed: int, start: int, count: int, shard: int = -1) -> list[int]:
    """Return ``count`` data set indices from position ``start`` of the concatenated permutations."""
    indices: list[int] = []
    while count > 0:
        number, offset = divmod(start, dataset_size)
        part = _permutation(dataset_size, seed, number, shard)[offset : offset + count]
        indices.extend(part.tolist())
        start += len(part)
        count -= len(part)
    return indices


@dataclass(frozen=True)
class SamplePlan:
    """How a data set is cut into steps and micro-batches."""

    dataset_size: int  # positions of a pass: samples, or what a sampler yields; 0 for a stream
    global_batch_size: int
    micro_batch_size: int
    seed: int
    shards: int = 0  # number of shards; 0: every replica can read all data
    is_stream: bool = False
    epoch_end: str = "continue"
    order: SamplerOrder | None = None  # None: each pass is a permutation of the data set

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
        if self.epoch_end != "continue" and (self.is_stream or self.shards):
            kind = "redundancy" if self.shards else "an iterable data set"
            raise ConfigError(f'epoch_end="{self.epoch_end}" does not go with {kind}: say "continue"')
        if self.order is not None and (self.is_stream or self.shards):
            kind = "redundancy, whose shards have an order of their own" if self.shards else "iterable data"
            raise ConfigError(f"the sampler {self.order.name} does not go with {kind}: leave it out")
        if self.epoch_end == "drop" and self.dataset_size < self.global_batch_size:
            raise ConfigError(
                f"a pass has {self.dataset_size} samples, too few for one step of {self.global_batch_size}: "
                "take a smaller batch, or keep the short last step"
            )

    @cached_property
    def micro_batches(self) -> int:
        return self.global_batch_size // self.micro_batch_size

    @cached_property
    def steps_per_pass(self) -> int:
        """The number of steps of a pass; 0 where passes are concatenated."""
        full = self.dataset_size // self.global_batch_size
        if self.epoch_end == "short":
            return full + bool(self.dataset_size % self.global_batch_size)
        return full if self.epoch_end == "drop" else 0

    def positions(self, step: int, micro_batch: int) -> range:
        """Return the positions of one micro-batch; without shards."""
        first, end = step * self.global_batch_size, None
        if self.steps_per_pass:
            number, within = divmod(step, self.steps_per_pass)
            first = number * self.dataset_size + within * self.global_batch_size
            end = (number + 1) * self.dataset_size
        start = first + micro_batch * self.micro_batch_size
        stop = start + self.micro_batch_size
        return range(start, stop if end is None else max(start, min(stop, end)))

    def pass_of(self, step: int, micro_batch: int) -> int:
        """Return the number of the pass in which a micro-batch begins; without shards."""
        return self.positions(step, micro_batch).start // self.dataset_size

    def samples(self, step: int, micro_batch: int) -> list[int]:
        """Return the data set indices of one micro-batch, for the journal; of a stream the positions."""
        if self.shards:
            return self._sharded(step, micro_batch)
        positions = self.positions(step, micro_batch)
        if self.order is not None:
            return indices_of(self.order.items(positions), positions)
        if self.is_stream:
            return list(positions)
        return sample_indices(self.dataset_size, self.seed, positions.start, len(positions))

    def items(self, step: int, micro_batch: int) -> list[Any]:
        """Return what the data set is indexed with, for one micro-batch; of a stream positions."""
        if self.order is None:
            return self.samples(step, micro_batch)
        return self.order.items(self.positions(step, micro_batch))

    def with_samples(self, step: int, micro_batches: Iterable[int]) -> list[int]:
        """Return those of ``micro_batches`` that have a sample."""
        return [i for i in micro_batches if self.positions(step, i)]

    def _sharded(self, step: int, micro_batch: int) -> list[int]:
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
        size, shards = self.dataset_size, self.shards
        return number * size // shards, (number + 1) * size // shards

    def describe(self) -> dict[str, Any]:
        """Return all values that determine the order of the data, for the journal."""
        names = ("dataset_size", "global_batch_size", "micro_batch_size", "seed", "micro_batches", "shards")
        body: dict[str, Any] = {
            name: getattr(self, name) for name in names if name != "shards" or self.shards
        }
        if self.is_stream:
            body["stream"] = 1
        if self.epoch_end != "continue":
            body["epoch_end"] = self.epoch_end
        if self.order is not None:
            body["order"] = self.order.digest
        return body
