"""Tells whether two replicas hold the same data, by a digest of a few samples that lie in memory.

A split by an unseeded ``np.random.permutation``, an unseeded ``random.shuffle(files)`` and ``os.listdir``
give each process other samples under the same index, and a vocabulary from a ``set`` gives them other
numbers. No sample is loaded for the digest, and the folders of files do not count.
"""

import ast
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from fabric.client.loop.loop_flow import GROWS, dotted, holder, stores, walked
from fabric.client.loop.user_functions import attributes_of, functions_in, methods_of, search

_SAMPLES = 16  # of a list or a tensor, evenly spread
_DEPTH = 6
_FILLS = {*GROWS, "update", "setdefault", "pop", "add"}


@search("")
def content_digest(dataset: Any) -> str:
    """Return a digest of some samples of a data set; empty for one that shows none without being read."""
    words = list(_data_set(dataset, _DEPTH))
    return xxhash.xxh3_64_hexdigest("\n".join(words).encode()) if words else ""


def _data_set(value: Any, depth: int) -> Iterator[str]:
    """Yield words about the samples of a data set, or of what one holds."""
    kind: Any = type(value)
    if depth == 0:
        return
    if isinstance(value, Subset):
        yield from _words(value.indices, depth)
        yield from _data_set(value.dataset, depth - 1)
    elif isinstance(value, TensorDataset | ConcatDataset):
        for part in value.tensors if isinstance(value, TensorDataset) else value.datasets:
            yield from _data_set(part, depth - 1)
    elif isinstance(value, torch.Tensor | np.ndarray | list | tuple):
        yield from _words(value, depth)
    elif hasattr(kind, "__getitem__") and methods_of(kind):
        changed, own = _changed_later(value), attributes_of(value)
        for name in sorted(own.keys() - changed):
            yield from _data_set(own[name], depth - 1)


def _changed_later(dataset: Any) -> set[str]:
    """Return the attributes that the data set's own methods change after it was made, such as a cache."""
    changed = set[str]()
    for method in functions_in(dataset):
        nodes = list(walked(method.node)) if method.name != "__init__" else []
        puts = [x for x in nodes if isinstance(x, ast.Subscript) and isinstance(x.ctx, ast.Store | ast.Del)]
        calls = [x.func for x in nodes if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute)]
        paths = {*stores(nodes), *map(holder, puts)}
        paths |= {dotted(x.value) for x in calls if x.attr in _FILLS or x.attr.endswith("_")}
        changed |= {x.split(".")[1] for x in paths if x.startswith(f"{method.me}.")}
    return changed


def _words(value: Any, depth: int) -> Iterator[str]:
    """Yield the content of a value, of large ones in part; of an object only the name of its class."""
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.layout != torch.strided or value.is_complex():
            return
        yield str(tuple(value.shape))
        rows = (value[i] for i in _spread(len(value))) if value.ndim else iter([value])
        for flat in (x.detach().reshape(-1) for x in rows):
            yield from (_number(flat[i].item()) for i in _spread(len(flat), 4))
    elif isinstance(value, np.ndarray):
        yield str(value.shape)
        if value.ndim and value.dtype.kind in "biufSU":
            flats = (np.atleast_1d(value[i]).reshape(-1) for i in _spread(len(value)))
            yield from (_number(flat[i].item()) for flat in flats for i in _spread(len(flat), 4))
    elif isinstance(value, list | tuple | range) and depth:
        yield str(len(value))
        for i in _spread(len(value)):
            yield from _words(value[i], depth - 1)
    else:
        yield _number(value)


def _number(value: Any) -> str:
    # Hosts may differ in the last digits of what they compute.
    if isinstance(value, float):
        return f"{value:.2e}"
    if isinstance(value, str):
        return value.rpartition("/")[2]
    return repr(value) if isinstance(value, bool | int | bytes | None) else type(value).__name__


def _spread(length: int, most: int = _SAMPLES) -> range:
    return range(0, length, max(1, -(-length // most)))
