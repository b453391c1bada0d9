"""A part of a tensor by index: ``0:10,:`` names rows and columns, of the rank's shard or of the whole tensor.

Slices have no steps. A single index is a slice of length one, so that the result keeps its dimensions. Only
``gather`` needs numpy, and imports it when called.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from fabric.errors import ProtocolError
from fabric.model import Value
from fabric.protocol.rules.lanes import TensorRegion

_ONE = re.compile(r"\s*(\d{0,18})\s*(:?)\s*(\d{0,18})\s*", re.ASCII)
_MAX_TEXT = 2000


class Shard(Value):
    """Where a rank's part lies in a sharded tensor: the ``shape`` of the whole, and its ``offset`` in it."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def parse_slice(text: str, shape: tuple[int, ...]) -> TensorRegion:
    """Return the region that ``text`` names in a tensor of ``shape``; left-out dimensions are taken whole.

    Raises ProtocolError, with the shape, for malformed text and for a region outside of the tensor.
    """
    parts = text.split(",") if text.strip() and len(text) <= _MAX_TEXT else []
    if not 0 < len(parts) <= len(shape):
        raise _wrong(text, shape)
    bounds = []
    for part, size in zip(parts, shape, strict=False):
        match = _ONE.fullmatch(part)
        if match is None or match.groups() == ("", "", ""):
            raise _wrong(text, shape)
        first, colon, last = match.groups()
        begin = int(first or 0)
        end = int(last) if last else (size if colon else begin + 1)
        if not begin <= end <= size or (not colon and last):
            raise _wrong(text, shape)
        bounds.append((begin, end - begin))
    bounds += [(0, size) for size in shape[len(bounds) :]]
    return TensorRegion(tuple(begin for begin, _ in bounds), tuple(size for _, size in bounds))


def _wrong(text: str, shape: tuple[int, ...]) -> ProtocolError:
    return ProtocolError(
        f'the slice "{text[:80]}" is not one of a tensor of shape {list(shape)}: give up to {len(shape)} of'
        " BEGIN:END, each within its dimension, with commas between them"
    )


def slice_text(region: TensorRegion) -> str:
    """Return the region as text, in the form that ``parse_slice`` reads."""
    return ",".join(f"{begin}:{end}" for begin, end in zip(region.begin, region.end, strict=True))


def contiguous_from(region: TensorRegion, shape: tuple[int, ...]) -> int | None:
    """Return the index of the region's first element in the flat tensor; None for gaps in the region."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    reach = 1 + sum((size - 1) * stride for size, stride in zip(region.sizes, strides, strict=True))
    if region.elements not in (0, reach):
        return None
    return sum(at * stride for at, stride in zip(region.begin, strides, strict=True))


def gather(
    tensor: memoryview, width: int, shape: tuple[int, ...], region: TensorRegion, place: tuple[int, int]
) -> memoryview:
    """Return elements ``place`` (first, last + 1) of the region's elements. ``tensor``: its flat bytes,
    ``width`` per element. Allocates memory for the result only."""
    import numpy as np

    elements_of_tensor = np.frombuffer(tensor, dtype=np.dtype(("V", width))).reshape(shape)
    part = elements_of_tensor[region.within(TensorRegion.whole(shape))]
    where = np.unravel_index(np.arange(*place), part.shape)
    return memoryview(part[where].tobytes())


def find_shards(metadata: str) -> Mapping[str, Shard]:
    """Return the shards that a state's description names, by tensor; leave out malformed ones."""
    if '"$shard"' not in metadata:
        return {}
    shards: dict[str, Shard] = {}
    try:
        waiting: list[Any] = [json.loads(metadata)]
    except (ValueError, RecursionError):
        return {}
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(node)
        elif isinstance(node, dict):
            waiting.extend(node.values())
            try:
                name, described = shard_of(node)
                shape, offset = (tuple(int(n) for n in described[key]) for key in ("shape", "offset"))
            except (TypeError, KeyError, ValueError, IndexError, OverflowError):
                continue
            if isinstance(name, str) and len(shape) == len(offset) and min((*shape, *offset), default=0) >= 0:
                shards[name] = Shard(shape, offset)
    return shards


def shard_of(node: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the tensor's name and the description of the shard that ``node`` of a description is.

    Raises LookupError, TypeError or ValueError for another node."""
    local, described = node["$shard"]
    name = local["$tensor"]
    return name if isinstance(name, str) else name[0], described


def without_shards(node: Any, shards: dict[str, dict[str, Any]]) -> Any:
    """Return a description with whole tensors in place of shards; add these to ``shards`` by tensor.

    Raises as ``shard_of``, and RecursionError."""
    if isinstance(node, dict) and "$shard" in node:
        name, shards[name] = shard_of(node)
        return node["$shard"][0]
    if isinstance(node, dict):
        return {key: without_shards(inner, shards) for key, inner in node.items()}
    return [without_shards(inner, shards) for inner in node] if isinstance(node, list) else node
