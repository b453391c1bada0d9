"""A part of a tensor by index: ``0:10,:`` names rows and columns, of the rank's shard or of the whole tensor.

Slices have no steps. A single index is a slice of length one, so that the result keeps its dimensions. Only
``gather`` needs numpy, and imports it when called.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fabric.errors import ProtocolError

# The (begin, end) of the slice in every dimension.
SliceBounds = tuple[tuple[int, int], ...]

_ONE = re.compile(r"\s*(\d{0,18})\s*(:?)\s*(\d{0,18})\s*", re.ASCII)
_MAX_TEXT = 2000


@dataclass(frozen=True, slots=True)
class Shard:
    """Where a rank's part lies in a sharded tensor: the ``shape`` of the whole, and its ``offset`` in it."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def parse_slice(text: str, shape: tuple[int, ...]) -> SliceBounds:
    """Return the box that ``text`` names in a tensor of ``shape``; left-out dimensions are taken whole.

    Raises ProtocolError, with the shape, for malformed text and for a box outside of the tensor.
    """
    parts = text.split(",") if text.strip() and len(text) <= _MAX_TEXT else []
    if not 0 < len(parts) <= len(shape):
        raise _wrong(text, shape)
    box = [_one(part, text, shape, size) for part, size in zip(parts, shape, strict=False)]
    return (*box, *((0, size) for size in shape[len(box) :]))


def _one(part: str, text: str, shape: tuple[int, ...], size: int) -> tuple[int, int]:
    match = _ONE.fullmatch(part)
    if match is None or match.groups() == ("", "", ""):
        raise _wrong(text, shape)
    first, colon, last = match.groups()
    begin = int(first or 0)
    end = int(last) if last else (size if colon else begin + 1)
    if not begin <= end <= size or (not colon and last):
        raise _wrong(text, shape)
    return begin, end


def _wrong(text: str, shape: tuple[int, ...]) -> ProtocolError:
    return ProtocolError(
        f'the slice "{text[:80]}" is not one of a tensor of shape {list(shape)}: give up to {len(shape)} of'
        " BEGIN:END, each within its dimension, with commas between them"
    )


def slice_text(box: SliceBounds) -> str:
    """Return the box as text, in the form that ``parse_slice`` reads."""
    return ",".join(f"{begin}:{end}" for begin, end in box)


def local_part(box: SliceBounds, shard: Shard, shape: tuple[int, ...]) -> SliceBounds | None:
    """Return the part of ``box`` (in the whole tensor) that a shard of ``shape`` holds, in the shard's
    indices."""
    bounds = []
    for (begin, end), offset, size in zip(box, shard.offset, shape, strict=True):
        low, high = max(begin - offset, 0), min(end - offset, size)
        if low >= high:
            return None
        bounds.append((low, high))
    return tuple(bounds)


def in_whole(box: SliceBounds, shard: Shard) -> SliceBounds:
    """Return a box of the shard in the indices of the whole tensor."""
    return tuple((begin + o, end + o) for (begin, end), o in zip(box, shard.offset, strict=True))


def elements(box: SliceBounds) -> int:
    """Return the number of elements of the box."""
    return math.prod(end - begin for begin, end in box)


def contiguous_from(box: SliceBounds, shape: tuple[int, ...]) -> int | None:
    """Return the index of the box's first element in the flat tensor; None for gaps in the box."""
    if not elements(box):
        return 0
    first = 0
    for (begin, _), size in zip(box, shape, strict=True):
        first = first * size + begin
    # From the last dimension backwards: full dimensions, at most one cut dimension, then single elements.
    cut = False
    for (begin, end), size in reversed(list(zip(box, shape, strict=True))):
        if cut and end - begin != 1:
            return None
        cut = cut or (begin, end) != (0, size)
    return first


def gather(
    tensor: memoryview, width: int, shape: tuple[int, ...], box: SliceBounds, place: tuple[int, int]
) -> memoryview:
    """Return elements ``place`` (first, last + 1) of the box's elements. ``tensor``: its flat bytes,
    ``width`` per element. Allocates memory for the result only."""
    import numpy as np

    elements_of_tensor = np.frombuffer(tensor, dtype=np.dtype(("V", width))).reshape(shape)
    part = elements_of_tensor[tuple(slice(begin, end) for begin, end in box)]
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
        if isinstance(node, dict):
            shards.update(_shard(node.get("$shard")))
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
    return shards


def _shard(node: Any) -> dict[str, Shard]:
    try:
        local, described = node
        name = local["$tensor"]
        name = name if isinstance(name, str) else name[0]
        shape, offset = (tuple(int(n) for n in described[key]) for key in ("shape", "offset"))
    except (TypeError, KeyError, ValueError, IndexError, OverflowError):
        return {}
    if not isinstance(name, str) or len(shape) != len(offset) or min((*shape, *offset), default=0) < 0:
        return {}
    return {name: Shard(shape, offset)}
