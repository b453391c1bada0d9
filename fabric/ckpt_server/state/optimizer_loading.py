"""Loads an optimizer's state exactly, and keeps the objects that others refer to.

torch's ``load_state_dict`` casts each floating tensor of a parameter's state to the parameter's dtype, also
in lists and dicts, and makes other containers of some containers. This module puts the exact values back. The
optimizer keeps its list of groups, each group and its dict of states, because a wrapper may share them.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from fabric.ckpt_server.state.optimizer_extras import held_optimizers, load_extras, without_extras


class _Hidden:
    """Hides a value from torch, which would take a string or an array apart."""


_TAKEN_APART = (str, bytes, bytearray, np.ndarray, np.generic, deque, torch.Size)


def load_optimizer(live: torch.optim.Optimizer, value: dict[str, Any]) -> None:
    """Load ``value``, as ``optimizer_state`` gives it, into ``live``."""
    load_extras(live, value, load_optimizer)
    plain = without_extras(value)
    groups = [
        place(group, {key: now for key, now in live_group.items() if key != "params"})
        for group, live_group in zip(plain["param_groups"], live.param_groups, strict=True)
    ]
    shared = _SharedObjects(live)
    hidden = {
        key: part if key == "param_groups" else _hide(part)
        for key, part in {**plain, "param_groups": groups}.items()
    }
    live.load_state_dict(hidden)
    parameters = [parameter for group in live.param_groups for parameter in group["params"]]
    indices = [index for group in groups for index in group["params"]]
    by_index = dict(zip(indices, parameters, strict=True))
    _correct(live, plain, by_index)
    shared.put_back(live)


def _correct(
    live: torch.optim.Optimizer, plain: dict[str, Any], parameters: Mapping[Any, torch.Tensor]
) -> None:
    """Put the exact values into the dicts of a parameter each, which ``state_dict`` hands out."""
    loaded = live.state_dict()
    keeps_its_own = type(live).state_dict is torch.optim.Optimizer.state_dict
    for name, part in plain.items():
        now = loaded.get(name)
        if name == "param_groups" or not isinstance(part, dict) or not isinstance(now, dict):
            continue
        for index, exact in part.items():
            device = parameters[index].device if index in parameters else torch.device("cpu")
            if isinstance(now.get(index), dict) and isinstance(exact, dict):
                content = _exact(now[index], exact, device)
                now[index].clear()
                now[index].update(content)
            elif name == "state" and keeps_its_own:
                live.state[parameters.get(index, index)] = _exact(now.get(index), exact, device)


class _SharedObjects:
    """The groups and the dict of states of an optimizer, which the optimizers that it holds may share."""

    def __init__(self, live: torch.optim.Optimizer) -> None:
        self._all = [live, *held_optimizers(live).values()]
        self._groups = [(x, x.param_groups, list(x.param_groups)) for x in self._all]
        self._state = live.state
        self._of_state = [x for x in self._all if x.state is live.state]

    def put_back(self, live: torch.optim.Optimizer) -> None:
        """Move what was loaded into the objects from before."""
        for optimizer, groups, each in self._groups:
            # A wrapper may have a property in place of this attribute.
            if "param_groups" in vars(optimizer) and optimizer.param_groups is not groups:
                for before, loaded in zip(each, optimizer.param_groups, strict=True):
                    if before is not loaded:
                        content = dict(loaded)
                        before.clear()
                        before.update(content)
                groups[:] = each
                optimizer.param_groups = groups
        if live.state is not self._state:
            states = dict(live.state)
            self._state.clear()
            self._state.update(states)
        for optimizer in self._of_state:
            if "state" in vars(optimizer):
                optimizer.state = self._state


def place(value: Any, live: Any) -> Any:
    """Return ``value`` with every tensor on the device where ``live`` has its counterpart."""
    if isinstance(value, torch.Tensor):
        return value.to(live.device) if isinstance(live, torch.Tensor) else value
    if isinstance(value, dict) and isinstance(live, dict):
        for key in value:
            value[key] = place(value[key], live.get(key))
        return value
    if type(value) in (list, tuple) and isinstance(live, (list, tuple)):
        paired = [place(item, live[i] if i < len(live) else None) for i, item in enumerate(value)]
        return type(value)(paired)
    return value


def _hide(value: Any) -> Any:
    """Return a copy of the containers of ``value``, without the values that torch would take apart."""
    if isinstance(value, _TAKEN_APART):
        return _Hidden()
    if isinstance(value, dict):
        return {key: _hide(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_hide, value))
    return value


def _exact(loaded: Any, exact: Any, device: torch.device) -> Any:
    """Return ``exact`` with the tensors that torch loaded with the right dtype; others go to its device."""
    if isinstance(exact, torch.Tensor):
        if not isinstance(loaded, torch.Tensor):
            return exact.to(device)
        return loaded if loaded.dtype == exact.dtype else exact.to(loaded.device)
    if isinstance(exact, dict):
        before = loaded if isinstance(loaded, dict) else {}
        for key in exact:
            exact[key] = _exact(before.get(key), exact[key], device)
        return exact
    if isinstance(exact, list | tuple | deque) and not isinstance(exact, torch.Size):
        items = list(_pairs(loaded, exact, device))
        if isinstance(exact, tuple):
            return tuple(items)
        exact.clear()
        exact.extend(items)
    return exact


def _pairs(loaded: Any, exact: Iterable[Any], device: torch.device) -> Iterable[Any]:
    before = list(loaded) if isinstance(loaded, list | tuple) else []
    for at, item in enumerate(list(exact)):
        yield _exact(before[at] if at < len(before) else None, item, device)
