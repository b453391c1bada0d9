"""The small entries of a shared state, by path. When the states of members differ, they show where."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fabric.protocol.rules.divergence import MAX_ENTRIES, Entries, bounded

_DEPTH = 4


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
            if len(entries) == MAX_ENTRIES:
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
        for number, part in enumerate(value[:MAX_ENTRIES]):
            yield from _walk(f"{path}/{number}", part, depth + 1)
