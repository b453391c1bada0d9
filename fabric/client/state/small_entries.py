"""Entries of a shared state, by path: small ones, and samples of tensors. They show where states differ."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from fabric.ckpt_server.state.training_state import StateView
from fabric.client.state.mutation_guard import SAMPLE_BYTES, sample_count, samples
from fabric.protocol.rules.divergence import MAX_NUMBERS, MAX_TENSORS, TENSOR_MARK, Entries, bounded

_DEPTH = 4
# Of the groups of tensors, as many are of the model.
_MODEL_GROUPS = 48


def small_entries(objects: Mapping[str, object]) -> Entries:
    """Return the numbers, strings and booleans of everything but the model, as (path, value)."""
    entries: list[tuple[str, str]] = []
    for name, value in objects.items():
        if name == "model":
            continue  # a module's state has tensors only
        if isinstance(value, torch.optim.Optimizer):
            groups: Any = {
                "param_groups": [{k: v for k, v in x.items() if k != "params"} for x in value.param_groups]
            }
        else:
            groups = getattr(value, "state_dict", dict)()
        for entry in _walk(name, groups, 0):
            entries.append(entry)
            if len(entries) == MAX_NUMBERS:
                return bounded(tuple(entries))
    return bounded(tuple(entries))


def _walk(path: str, value: object, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, bool | int | float | str):
        yield path, repr(value)
    elif isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        yield path, repr(value.item())
    elif isinstance(value, Mapping) and depth < _DEPTH:
        for name, part in value.items():
            yield from _walk(f"{path}/{name}", part, depth + 1)
    elif isinstance(value, list | tuple) and depth < _DEPTH:
        for number, part in enumerate(value[:MAX_NUMBERS]):
            yield from _walk(f"{path}/{number}", part, depth + 1)


def tensor_entries(objects: Mapping[str, object], view: StateView) -> Entries:
    """Return a hash of samples of each tensor on the host; of a large state for each few neighbours."""
    count = sample_count(len(view.tensors))
    parameters = {
        f"{name}/{own}"
        for name, value in objects.items()
        for own, _ in (value.named_parameters() if hasattr(value, "named_parameters") else ())
    }
    of_model: list[tuple[str, str, bytes]] = []
    others: list[tuple[str, str, bytes]] = []
    for name, tensor in sorted(view.tensors, key=lambda pair: pair[0]):
        if tensor.device.type != "cpu":
            return ()
        root = name.partition("/")[0]
        if root == "model":
            kind = "parameter" if name in parameters else "buffer"
        else:
            kind = "optimizer" if root.startswith("optimizer") else "object"
        step = tensor.nbytes / count
        last = max(0, tensor.nbytes - SAMPLE_BYTES)  # a sample that begins here ends with the tensor
        places = sorted({min(int((at + 0.5) * step), last) for at in range(count)})
        (of_model if root == "model" else others).append((kind, name, samples(tensor, places)))
    return (*_grouped(of_model, _MODEL_GROUPS), *_grouped(others, MAX_TENSORS - _MODEL_GROUPS))


def _grouped(tensors: list[tuple[str, str, bytes]], most: int) -> Iterator[tuple[str, str]]:
    length = -(-len(tensors) // most) or 1
    for at in range(0, len(tensors), length):
        group = tensors[at : at + length]
        kind, first, _ = group[0]
        until = f" to {group[-1][1]}" if len(group) > 1 else ""
        digest = xxhash.xxh32(b"".join(part for _, _, part in group)).hexdigest()
        yield f"{TENSOR_MARK}{kind} {first}{until}", digest
