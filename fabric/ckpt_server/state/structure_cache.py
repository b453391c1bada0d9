"""Tells whether a value's encoding has changed since the last time, without encoding the value.

The structure of a value is a flat list of everything its encoding depends on, except the elements of tensors:
types, keys, lengths, numbers, strings, and each tensor's memory and type. Making and comparing a structure
costs a fraction of an encoding. Values of unknown types have no structure and are encoded every time.
"""

import math
from collections import OrderedDict

import torch

from fabric.ckpt_server.state.dtensor import is_sharded, local_part
from fabric.ckpt_server.state.encoding import PLAIN_TENSORS, memory_key

_EXACT = frozenset((int, str, bool, type(None)))
_MAX_DEPTH = 20


def record_structure(value: object, words: list[object], tensors: list[torch.Tensor], depth: int = 0) -> bool:
    """Add the structure of ``value`` to ``words`` and its tensors (their local parts) to ``tensors``, in
    order.

    Returns False where the value has no structure. All recorded tensors are contiguous, so that each is
    stored as its memory.
    """
    kind = type(value)
    if kind in PLAIN_TENSORS:
        assert isinstance(value, torch.Tensor)
        return _record_tensor(value, words, tensors)
    words.append(kind)
    if kind in _EXACT:
        words.append(value)
        return True
    if kind is float:
        assert isinstance(value, float)
        words.append(value or value.hex())  # the hexadecimal form distinguishes 0.0 from -0.0
        return math.isfinite(value)
    if depth >= _MAX_DEPTH:
        return False
    if kind is dict or kind is OrderedDict:
        assert isinstance(value, dict)
        words.append(len(value))
        metadata = getattr(value, "_metadata", None)  # a module's state has its versions in this attribute
        if metadata is not None and not record_structure(dict(metadata), words, tensors, depth + 1):
            return False
        for key, item in value.items():
            if type(key) is not str and type(key) is not int:
                return False
            words.append(key)
            if not record_structure(item, words, tensors, depth + 1):
                return False
        return True
    if kind is list or kind is tuple:
        assert isinstance(value, list | tuple)
        words.append(len(value))
        return all(record_structure(item, words, tensors, depth + 1) for item in value)
    if isinstance(value, torch.Tensor) and is_sharded(value):
        words.append((value.shape, value.device_mesh, value.placements))  # type: ignore[attr-defined]
        return _record_tensor(local_part(value), words, tensors)
    return False


def _record_tensor(tensor: torch.Tensor, words: list[object], tensors: list[torch.Tensor]) -> bool:
    if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
        return False
    words.append(memory_key(tensor))
    tensors.append(tensor)
    return True
