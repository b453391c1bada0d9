"""Loads decoded state into live objects: either all of it, or nothing changes.

``check_fit`` first compares the state with the live object. A module must have the same names, shapes, dtypes
and tied weights. An optimizer must have the same groups, parameters and options. Per-parameter state may be
missing on either side, because an optimizer creates it at its first step. In other objects, entries of both
sides must be of the same kind; the object itself may still refuse.

``load_all`` loads first the objects that are most likely to refuse: other objects, then optimizers, then
modules. It can undo each load until the last object is loaded. For an optimizer it keeps the optimizer's
``state_dict`` (loading replaces its tensors). A plain torch module that passed the check cannot refuse, so
``load_all`` keeps a copy of a module only if loading runs the module's own code.
"""

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from fabric.ckpt_server.state.dtensor import is_sharded, placement_key
from fabric.ckpt_server.state.encoding import memory_key
from fabric.ckpt_server.state.optimizer_extras import (
    EXTRAS,
    groups_of,
    held_optimizers,
    kept_state,
    load_extras,
)
from fabric.errors import StateError

# Loads an optimizer's state exactly, and keeps the objects that others refer to.
#
# torch's ``load_state_dict`` casts each floating tensor of a parameter's state to the parameter's dtype,
# also in lists and dicts, and makes other containers of some containers. This module puts the exact values
# back. The optimizer keeps its list of groups, each group and its dict of states, because a wrapper may
# share them.


class _Hidden:
    """Hides a value from torch, which would take a string or an array apart."""


_TAKEN_APART = (str, bytes, bytearray, np.ndarray, np.generic, deque, torch.Size)


def load_optimizer(live: torch.optim.Optimizer, value: dict[str, Any]) -> None:
    """Load ``value``, as ``optimizer_state`` gives it, into ``live``."""
    load_extras(live, value, load_optimizer)
    plain = {key: part for key, part in value.items() if key != EXTRAS}  # the part that torch knows
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
    """Return ``value`` as ``live`` has it: tensors on its device, the keys of a dict in its order."""
    if isinstance(value, torch.Tensor):
        return value.to(live.device) if isinstance(live, torch.Tensor) else value
    if isinstance(value, dict) and isinstance(live, dict):
        own_order = () if isinstance(value, OrderedDict) else live  # that of an OrderedDict is in the file
        for key in [*(x for x in own_order if x in value), *(x for x in value if x not in own_order)]:
            value[key] = place(value.pop(key), live.get(key))
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
        parts = loaded if isinstance(loaded, dict) else {}
        for key in exact:
            exact[key] = _exact(parts.get(key), exact[key], device)
        return exact
    if isinstance(exact, list | tuple | deque) and not isinstance(exact, torch.Size):
        before = list(loaded) if isinstance(loaded, list | tuple) else []
        items = [
            _exact(before[at] if at < len(before) else None, item, device) for at, item in enumerate(exact)
        ]
        if isinstance(exact, tuple):
            return tuple(items)
        exact.clear()
        exact.extend(items)
    return exact


_T = TypeVar("_T")


class WorkRunner(Protocol):
    """Runs heavy work that calls no code of the objects; it may use another thread."""

    def __call__(self, work: Callable[[], _T]) -> _T: ...


def at_once(work: Callable[[], _T]) -> _T:
    return work()


def check_fit(name: str, live: object, value: Any) -> None:
    """Raises StateError that names the first difference between decoded ``value`` and ``live``."""
    if isinstance(live, torch.nn.Module):
        _check_module(name, live.state_dict(), value)
    elif isinstance(live, torch.optim.Optimizer):
        _check_optimizer(name, live, value)
    else:
        _check_other(name, live.state_dict(), value)  # type: ignore[attr-defined]


def load_all(objects: Mapping[str, Any], decoded: Mapping[str, Any], run: WorkRunner) -> None:
    """Load every object, or raise StateError with all objects as they were.

    Work that runs only torch's own code goes through ``run``.
    """

    def caution(name: str) -> tuple[int, str]:
        live = objects[name]
        if isinstance(live, torch.nn.Module):
            return 3 if _loads_plainly(live) else 2, name
        return 1 if isinstance(live, torch.optim.Optimizer) else 0, name

    undo: list[Callable[[], object]] = []
    for name in sorted(decoded, key=caution):
        live, value = objects[name], decoded[name]
        try:
            way_back = _way_back(live)
            if way_back is not None:
                undo.append(way_back)
            if isinstance(live, torch.nn.Module) and way_back is None:
                run(partial(_load, live, value))
            else:
                _load(live, value)
        except BaseException as error:
            for back in reversed(undo):
                back()
            if not isinstance(error, Exception):
                raise
            raise StateError(
                f"{name} ({type(live).__qualname__}) refused its state, so nothing was loaded:"
                f" {' '.join(f'{type(error).__name__}: {error}'.split())[:500]}"
            ) from error


def _load(live: Any, value: Any) -> None:
    if isinstance(live, torch.nn.Module):
        # Copy extra state out of the file's memory, because the module may keep it.
        for key in [key for key in value if key.endswith("_extra_state")]:
            value[key] = copy.deepcopy(value[key])
        live.load_state_dict(value)
    elif isinstance(live, torch.optim.Optimizer):
        load_optimizer(live, value)
    else:
        live.load_state_dict(place(value, live.state_dict()))


def _way_back(live: Any) -> Callable[[], object] | None:
    if isinstance(live, torch.nn.Module):
        if _loads_plainly(live):
            return None
        kept = copy.deepcopy(live.state_dict())
        return lambda: live.load_state_dict(kept)
    if isinstance(live, torch.optim.Optimizer):
        before = kept_state(live)
        return lambda: load_optimizer(live, before)
    state = copy.deepcopy(live.state_dict())
    return lambda: live.load_state_dict(state)


def _loads_plainly(module: torch.nn.Module) -> bool:
    """Whether loading runs torch's own code only."""
    overridable = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
    for part in module.modules():
        if part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks:  # noqa: SLF001
            return False
        is_torchs = type(part).__module__.startswith("torch.")
        if not is_torchs and any(
            getattr(type(part), name) is not getattr(torch.nn.Module, name) for name in overridable
        ):
            return False
    return True


def _differ(path: str, what: str, there: object, here: object) -> StateError:
    return StateError(
        f"{path} has {what} {there} in the snapshot and {here} here; nothing was loaded: run the same model"
        " and optimizer on every replica."
    )


def _check_tensor(path: str, live: torch.Tensor, value: torch.Tensor) -> None:
    if value.shape != live.shape:
        raise _differ(path, "shape", tuple(value.shape), tuple(live.shape))
    if value.dtype != live.dtype:
        raise _differ(path, "dtype", value.dtype, live.dtype)
    here, there = (placement_key(x) if is_sharded(x) else "whole" for x in (live, value))
    if here != there:
        raise _differ(path, "the placement", there, here)


def _ties(state: Mapping[str, Any]) -> dict[str, str]:
    """Map each tensor that shares an earlier one's memory to the earlier one's name."""
    first: dict[object, str] = {}
    ties = {}
    for name in sorted(state):
        tensor = state[name]
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            owner = first.setdefault(memory_key(tensor), name)
            if owner != name:
                ties[name] = owner
    return ties


def _check_module(path: str, live: Mapping[str, Any], value: Any) -> None:
    if not isinstance(value, dict):
        raise StateError(f"{path} is a module here and none in the snapshot; nothing was loaded.")
    missing, unknown = sorted(map(str, live.keys() - value)), sorted(map(str, value.keys() - live))
    if missing:
        raise StateError(
            f"{path} has the entry {missing[0]!r} here and the snapshot has not; nothing was loaded."
        )
    if unknown:
        raise StateError(f"{path} has no entry {unknown[0]!r} here and the snapshot has; nothing was loaded.")
    for name, now in live.items():
        if isinstance(now, torch.Tensor) != isinstance(value[name], torch.Tensor):
            raise _differ(f"{path}.{name}", "a value of type", type(value[name]).__name__, type(now).__name__)
        if isinstance(now, torch.Tensor):
            _check_tensor(f"{path}.{name}", now, value[name])
    here, there = _ties(live), _ties(value)
    for name in sorted(set(here) | set(there)):
        if here.get(name) != there.get(name):
            raise _differ(f"{path}.{name}", "its memory shared with", there.get(name), here.get(name))


def _check_optimizer(path: str, live: torch.optim.Optimizer, value: Any) -> None:
    try:
        state, groups = value["state"], value["param_groups"]
        options = [set(group) for group in groups]
        indices = [list(group["params"]) for group in groups]
        listed = {index for group in indices for index in group}
        strays = sorted(index for index in state if type(index) is int and index not in listed)
        kept = {x: state[x] for x in listed if isinstance(state.get(x), dict)}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(
            f"{path} is an optimizer here and none in the snapshot; nothing was loaded."
        ) from error
    parameters = groups_of(live, value) or [group["params"] for group in live.param_groups]
    if len(groups) != len(parameters):
        raise _differ(path, "parameter groups:", len(groups), len(parameters))
    for index, held in enumerate(parameters):
        if len(indices[index]) != len(held):
            raise _differ(f"{path}.param_groups[{index}]", "parameters:", len(indices[index]), len(held))
    for index, group in enumerate(live.param_groups[: len(groups)]):
        missing = sorted(set(group) - options[index] - {"initial_lr"})  # a scheduler adds this option
        if missing:
            raise StateError(
                f"{path}.param_groups[{index}] has the option {missing[0]!r} here and not in the snapshot;"
                " nothing was loaded: use the same optimizer and torch version on every replica."
            )
    if strays:
        raise StateError(
            f"{path} has state of parameter {strays[0]}, which is in no group; the snapshot is damaged."
        )
    for held, numbers in zip(parameters, indices, strict=True):
        for index, parameter in zip(numbers, held, strict=True):
            state = live.state.get(parameter, {})
            for key, now in state.items() if isinstance(state, dict) else ():
                then = kept.get(index, {}).get(key)
                if isinstance(now, torch.Tensor) and isinstance(then, torch.Tensor):
                    _check_tensor(f"{path}.state[{index}].{key}", now, then)


def _check_other(path: str, live: Any, value: Any) -> None:
    if isinstance(live, torch.Tensor) or isinstance(value, torch.Tensor):
        if live is None or value is None:
            return
        both = isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor)
        if not both or live.dtype != value.dtype:
            raise _differ(path, "a value of type", _kind(value), _kind(live))
    elif isinstance(live, dict) != isinstance(value, dict) and live is not None and value is not None:
        raise _differ(path, "a value of type", _kind(value), _kind(live))
    elif isinstance(live, dict):
        if not isinstance(value, dict):
            return
        for key in live:
            if key not in value and "." not in path and "[" not in path:
                raise StateError(
                    f"{path} has the entry {key!r} here and the snapshot has not; nothing was loaded."
                )
            if key in value:
                _check_other(f"{path}.{key}", live[key], value[key])


def _kind(value: Any) -> str:
    return f"tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
