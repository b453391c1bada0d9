"""The order that a sampler gives: pass k over the data is the list of positions that it yields for pass k.

Every replica must get the same lists, also a replica that joins in pass 40. So the generators of torch, numpy
and random are seeded from (seed, k) before pass k, and ``set_epoch(k)`` is called where it exists. A sampler
with a state of its own (a generator, a counter) is copied first. The copy is iterated pass after pass from
that state, as a DataLoader iterates the sampler, and again from pass 0 for an earlier pass.

At most two passes are kept. The digest of pass 0 belongs to the description of the data, which must be equal
on all members.
"""

import contextlib
import copy
import threading
from array import array
from collections.abc import Iterator, Sequence
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

from fabric.client.data.randomness import Generators, seed_all
from fabric.errors import ConfigError, FabricError

# Samplers whose pass depends on the seed and the number of the pass alone, unless they have a generator.
_WITHOUT_STATE = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
_KEPT_PASSES = 2


class SamplerOrder:
    """The items of a sampler by position. Safe from any thread.

    ``generator``: that of the DataLoader, which draws one number from it for each pass. ``dataset``: it is
    shared with the sampler's copies.
    """

    def __init__(self, sampler: Any, seed: int, dataset: Any = None, generator: Any = None) -> None:
        self.name = type(sampler).__name__
        if not (hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
            raise ConfigError(
                f"the sampler {self.name} has no len(), and every replica must know how long a pass is: give "
                "it __len__, the number of its indices in a pass"
            )
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
        if not self._jumps:
            self._try_again()
        self._passes[0] = first

    def items(self, positions: Sequence[int]) -> list[Any]:
        """Return what the sampler yields at ``positions``, which count through all passes."""
        return [self._pass(p // self.size)[p % self.size] for p in positions]

    def indices(self, positions: Sequence[int]) -> list[int]:
        """Return the data set indices at ``positions``, those of a batch one by one.

        A sampler that yields other things than numbers has positions instead.
        """
        entries = [x if isinstance(x, list | tuple) else [x] for x in self.items(positions)]
        indices = [i for entry in entries for i in entry]
        return indices if all(type(i) is int and i >= 0 for i in indices) else list(positions)

    def _pass(self, number: int) -> Sequence[Any]:
        with self._lock:
            if number not in self._passes:
                if _contents(self._given) != self._contents:
                    raise ConfigError(
                        f"the sampler {self.name} was changed in the training, and each replica would change "
                        "it by its own samples: give session.steps another loader for the next stage, with a "
                        "sampler that all replicas make alike"
                    )
                items = self._walk_to(number)
                if len(items) != self.size:
                    raise FabricError(
                        f"pass {number} of the sampler {self.name} has {len(items)} entries, and pass 0 had "
                        f"{self.size}: give a sampler whose passes have one length"
                    )
                self._passes[number] = items
                for old in sorted(self._passes)[:-_KEPT_PASSES]:
                    if old != number:
                        del self._passes[old]
            return self._passes[number]

    def _walk_to(self, number: int) -> Sequence[Any]:
        if self._jumps:
            return self._iterate(number)
        if number < self._next:
            self._begin()
        while self._next < number:
            self._iterate(self._next)
        return self._iterate(number)

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
        with _seeded(self._seed, number):
            _set_epoch(sampler, number)
            iterator = iter(sampler)
            if generator is not None:
                draw = torch.empty((), dtype=torch.int64, device=generator.device)
                draw.random_(generator=generator)  # as a DataLoader does
            items = list(islice(iterator, len(sampler) + 1))
        if len(items) > len(sampler):
            raise ConfigError(
                f"the sampler {self.name} gives more indices than its len(), {len(sampler)}: let __len__ "
                "return the number of indices in a pass"
            )
        return array("q", items) if all(type(i) is int for i in items) else items

    def _try_again(self) -> None:
        """Refuse a sampler whose passes cannot be had again. Leave it after pass 0."""
        second = len(self._iterate(1))
        self._begin()
        if _digest(self._iterate(0)) != self.digest:
            raise ConfigError(
                f"the sampler {self.name} gives another order each time it begins, so replicas would get "
                "different orders: let it draw from the generator of torch, numpy or random, or from one "
                "that is its attribute"
            )
        if second != self.size:
            raise ConfigError(
                f"pass 0 of the sampler {self.name} has {self.size} entries, and pass 1 has {second}: give a "
                "sampler whose passes have one length"
            )

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


def _set_epoch(sampler: Any, number: int) -> None:
    while sampler is not None:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)
        sampler = getattr(sampler, "sampler", None)


def _digest(items: Sequence[Any]) -> int:
    """Return a number of 62 bits that tells one list of items from another."""
    content = items.tobytes() if isinstance(items, array) else repr(items).encode()
    return xxhash.xxh3_64_intdigest(content) >> 2


@contextlib.contextmanager
def _seeded(seed: int, number: int) -> Iterator[None]:
    """Seed the generators of this process for pass ``number``; afterwards they are as before."""
    states = Generators.now()
    seed_all(xxhash.xxh3_64_intdigest(f"{seed} pass {number}".encode()) >> 1)
    try:
        yield
    finally:
        states.restore()
