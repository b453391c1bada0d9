"""A digest of a state that is the same for every layout of ranks.

A rank's file and its digest depend on the layout. Where replicas have different layouts, this digest of the
content names a state. Its first half is a digest of the description without the shards. Its second half is a
sum over the elements of all tensors, modulo 2^64. The weight of an element in the sum follows from the
tensor's name and the element's index in the full tensor. So each rank sums the elements that it holds, and
the ranks' sums make the same total in every layout. Of ranks with the same part, only the lowest counts it.
Ranks may hold different entries of a module (pipeline stages). So the descriptions of these entries are in
the sum too, and those of their optimizer's state.

A change of one element always changes the sum. Other damage escapes with a probability of about 2^-60.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from msgspec import field

from fabric.ckpt_server.format.safetensors_file import canonical_json, parse_json, read_preamble
from fabric.ckpt_server.format.tensor_slices import without_shards
from fabric.ckpt_server.state.dtensor import describe_shard, is_sharded
from fabric.ckpt_server.state.encoding import bytes_of
from fabric.ckpt_server.state.training_state import StateView, tensors_of
from fabric.errors import StateError
from fabric.model import Value
from fabric.protocol.rules.lanes import ReplicaLayout

_CHUNK_ELEMENTS = 1 << 20
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def first_copies(parameters: Mapping[str, torch.Tensor], layout: ReplicaLayout, rank: int) -> dict[str, bool]:
    """Return, for each kind of sharding, whether this rank is the lowest that holds its part of a tensor."""
    holders: dict[tuple[str, object], int] = {}
    for number, row in enumerate(layout.ranks):
        for held in row:
            holders.setdefault((held.name, held.region), number)
    regions = {held.name: held.region for held in layout.ranks[rank]}
    return {
        _sharding(describe_shard(tensor)): holders[name, regions[name]] == rank
        for name, tensor in parameters.items()
        if is_sharded(tensor)
    }


class ContentDigests(Value):
    """Digests the part of rank ``rank``. ``first``: see ``first_copies``.

    Outside of modules and optimizers, tensors that are not sharded are the same at all ranks; only rank 0
    counts them.
    """

    rank: int
    first: Mapping[str, bool]
    # Each module of the state -> its entries at this rank -> whether this rank is the lowest with the entry.
    entries: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    optimizers: frozenset[str] = frozenset()  # names of the state's optimizers

    def of_view(self, view: StateView) -> str:
        header = read_preamble(memoryview(view.header), view.nbytes)
        return self._digest(header.metadata, view.tensors)

    def of_file(self, file: memoryview) -> str:
        header = read_preamble(file)
        return self._digest(header.metadata, tensors_of(file, header.tensors).items())

    def _digest(self, metadata: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
        shards: dict[str, dict[str, Any]] = {}
        description = without_shards(parse_json(metadata), shards)
        total, described = 0, []
        owned: dict[str, bool] = {}  # tensor -> whether this rank is the lowest with its entry
        for path, node, counts in self._take_entries(description["state"]):
            total += _digest_of([path, node]) if counts else 0
            owned.update(dict.fromkeys(_tensors_in(node), counts))
        for name, tensor in tensors:
            shard = shards.get(name)
            shape = tuple(shard["shape"]) if shard is not None else tuple(tensor.shape)
            if name not in owned:
                described.append([name, str(tensor.dtype), shape])
            elif owned[name]:
                total += _digest_of([name, str(tensor.dtype), shape])
            if self._counts(name, shard, owned.get(name, self.rank == 0)):
                offset = tuple(shard["offset"]) if shard is not None else (0,) * len(shape)
                total += _weighted_sum(name, tensor, offset)
        text = canonical_json([description, sorted(described)])
        return f"{xxhash.xxh3_64_hexdigest(text.encode())}{total % 2**64:016x}"

    def _take_entries(self, state: dict[str, Any]) -> Iterator[tuple[list[str], Any, bool]]:
        """Take the modules' entries and their optimizer state out of ``state``: path, description, whether
        this rank counts it."""
        for name, own in self.entries.items():
            node = state.pop(name)
            for entry, inner in node.get("$module", [node])[0].items():
                yield [name, entry], inner, own.get(entry, self.rank == 0)
        own = self.entries.get("model", {})
        for name in self.optimizers:
            node = state[name]
            for number, group in enumerate(node["param_groups"]):
                for key in ("params", "param_names"):
                    for parameter in group.pop(key, ()):
                        path = [name, key, str(number), str(parameter)]
                        yield path, None, own.get(parameter, self.rank == 0)
            values = node.pop("state")
            for parameter, inner in values.items():
                yield [name, "state", parameter], inner, own.get(parameter, self.rank == 0)

    def _counts(self, name: str, shard: Mapping[str, Any] | None, is_lowest: bool) -> bool:
        if shard is None:
            return is_lowest
        first = self.first.get(_sharding(shard))
        if first is None:
            raise StateError(
                f"{name} is sharded as no parameter is, so replicas of unequal layouts cannot compare it: "
                "place it as a parameter of its shape"
            )
        return first


def _digest_of(value: object) -> int:
    return xxhash.xxh3_64_intdigest(canonical_json(value).encode())


def _tensors_in(node: Any) -> Iterator[str]:
    """The names of the tensors in a description without shards."""
    if isinstance(node, dict) and "$tensor" in node:
        name = node["$tensor"]
        yield name if isinstance(name, str) else name[0]
    elif isinstance(node, dict | list):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from _tensors_in(inner)


def _sharding(shard: Mapping[str, Any]) -> str:
    return canonical_json([shard["shape"], shard["mesh"], shard["placements"]])


def _weighted_sum(name: str, tensor: torch.Tensor, offset: tuple[int, ...]) -> int:
    if not tensor.numel():
        return 0
    cpu = tensor.detach().to("cpu").contiguous()
    unsigned = _UNSIGNED.get(cpu.element_size(), np.uint8)
    elements = bytes_of(cpu).numpy().view(unsigned)
    sizes = (*cpu.shape, *(() if cpu.element_size() in _UNSIGNED else (cpu.element_size(),)))
    begins = (*offset, *(0 for _ in sizes[len(offset) :]))
    if not sizes:
        sizes, begins = (1,), (0,)
    weights = [
        _weights(name, dim, at, size) for dim, (at, size) in enumerate(zip(begins, sizes, strict=True))
    ]
    rows = elements.reshape(sizes[0], -1)
    step = max(1, _CHUNK_ELEMENTS // max(rows.shape[1], 1))
    total = 0
    for at in range(0, sizes[0], step):
        part = rows[at : at + step].astype(np.uint64).reshape(-1, *sizes[1:])
        for weight in reversed(weights[1:]):
            part = part @ weight
        total += int((part * weights[0][at : at + step]).sum(dtype=np.uint64))
    return total


def _weights(name: str, dim: int, begin: int, size: int) -> "np.ndarray[Any, Any]":
    """Return an odd pseudo-random number (splitmix64) for each index from ``begin`` on."""
    seed = np.uint64(xxhash.xxh3_64_intdigest(name.encode(), dim))
    z = np.arange(begin, begin + size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + seed
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)
