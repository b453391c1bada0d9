"""The state of an optimizer by the names of its parameters.

torch numbers the parameters of an optimizer, and the numbers depend on the layout: each pipeline stage counts
from 0. With unequal replicas a state is described by the parameters' names, as in
``torch.distributed.checkpoint.state_dict``. torch loads such a state by the order of the parameters.
"""

from collections.abc import Mapping
from typing import Any

import torch


def parameter_names(objects: Mapping[str, object]) -> dict[int, str]:
    """Return the name in the model of each parameter, by its ``id``."""
    named = getattr(objects.get("model"), "named_parameters", None)
    return {id(parameter): name for name, parameter in named()} if callable(named) else {}


def names_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of the optimizer's parameters by group; a parameter outside the model has a number."""
    by_group: list[list[str]] = []
    for group in optimizer.param_groups:
        first = sum(map(len, by_group))
        by_group.append([names.get(id(p), f"#{n}") for n, p in enumerate(group["params"], first)])
    return by_group


def named_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the optimizer's ``state_dict`` with names in place of numbers."""
    state: dict[str, Any] = optimizer.state_dict()
    by_group = names_of(optimizer, names)
    groups: list[dict[str, Any]] = []
    by_number: dict[Any, str] = {}
    for group, own in zip(state["param_groups"], by_group, strict=True):
        by_number.update(zip(group["params"], own, strict=True))
        groups.append({**group, "params": own})
    values = {by_number.get(number, number): value for number, value in state["state"].items()}
    return {**state, "param_groups": groups, "state": values}
