"""The state of an optimizer that its ``state_dict`` leaves out, part of the shared state where it exists.

``state_dict`` has neither the numbers and tensors that an optimizer keeps as attributes, nor the state of an
inner optimizer (SAM), nor the names of the parameters in groups that were added in mid-training. The
optimizer is compared with itself at ``attach``, so most optimizers have no extras.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from fabric.errors import StateError
from fabric.model import Value

# Puts values into the objects that hold them, because user code may refer to these objects.


def put(live: Any, wanted: Any) -> Any:
    """Return ``wanted``, in the tensors, arrays, dicts, lists and generators of ``live`` where they fit."""
    if isinstance(live, torch.Generator):
        live.set_state(wanted.cpu())
        return live
    if isinstance(wanted, torch.Tensor) and isinstance(live, torch.Tensor):
        if (live.shape, live.dtype) != (wanted.shape, wanted.dtype):
            return wanted.to(live.device)
        with torch.no_grad():
            live.copy_(wanted)
        return live
    if isinstance(wanted, np.ndarray) and isinstance(live, np.ndarray) and live.flags.writeable:
        if (live.shape, live.dtype) == (wanted.shape, wanted.dtype):
            live[...] = wanted
            return live
    elif isinstance(wanted, dict) and isinstance(live, dict):
        content = {key: put(live.get(key), part) for key, part in wanted.items()}
        live.clear()
        live.update(content)
        return live
    elif type(wanted) in (list, tuple) and isinstance(live, list | tuple):
        paired = [put(live[at] if at < len(live) else None, part) for at, part in enumerate(wanted)]
        if type(live) is list and type(wanted) is list:
            live[:] = paired
            return live
        return type(wanted)(paired)
    return wanted


EXTRAS = "fabric.extras"
# torch's own attributes, which have no influence on training.
_OF_TORCH = ("_step_count", "_opt_called")
_DEPTH = 4


class _Attached(Value):
    """An optimizer as it was at ``attach``."""

    attributes: dict[str, Any]  # copies of the attributes that count
    numbers: list[list[int]]  # the ``id`` of each parameter, by group
    parameters: dict[str, torch.Tensor]  # parameters of the model and of the optimizer, by name
    names: dict[int, str]  # the name of each of these parameters, by its ``id``
    changed: set[str]  # attributes that have changed since


_attached: "weakref.WeakKeyDictionary[torch.optim.Optimizer, _Attached]" = weakref.WeakKeyDictionary()


def remember(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]] = ()) -> None:
    """Remember the optimizer as it is now. ``named``: the parameters of the model."""
    parameters: dict[str, torch.Tensor] = dict(named)
    names = {id(parameter): name for name, parameter in parameters.items()}
    for at, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            name = names.setdefault(id(parameter), f"#{at}.{number}")
            parameters[name] = parameter
    attributes = {name: _copied(value) for name, value in _attributes(optimizer, parameters.values()).items()}
    _attached[optimizer] = _Attached(attributes, _ids(optimizer.param_groups), parameters, names, set())
    for inner in _inner_optimizers(optimizer).values():
        remember(inner, parameters.items())  # type: ignore[arg-type]


def held_optimizers(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that ``optimizer`` wraps, by the names of the attributes that hold them."""
    held = [pair for name, value in vars(optimizer).items() for pair in _numbered(name, value)]
    return {name: part for name, part in held if isinstance(part, torch.optim.Optimizer)}


def _inner_optimizers(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return the held optimizers whose state the optimizer's own ``state_dict`` leaves out."""
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        return {}
    return {name: x for name, x in held_optimizers(optimizer).items() if x.state is not optimizer.state}


def optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state``, the optimizer's ``state_dict``, with its extras where it has any."""
    attached = _attached.get(optimizer)
    if attached is None:
        return state
    extras: dict[str, Any] = {}
    if attributes := _changed(optimizer, attached):
        extras["attributes"] = attributes
    if (numbers := _ids(optimizer.param_groups)) != attached.numbers:
        extras["groups"] = [[attached.names.get(x, "outside the model") for x in group] for group in numbers]
    inner = {
        name: optimizer_state(x, dict(x.state_dict())) for name, x in _inner_optimizers(optimizer).items()
    }
    if any(x["state"] or EXTRAS in x for x in inner.values()):
        extras["inner"] = inner
    return {**state, EXTRAS: extras} if extras else state


def groups_of(live: torch.optim.Optimizer, value: Mapping[str, Any]) -> list[list[torch.Tensor]] | None:
    """Return the parameters by group of the optimizer whose state is ``value``; None where it is unknown.

    Raises StateError for a parameter that does not exist here.
    """
    attached = _attached.get(live)
    if attached is None:
        return None
    groups = value.get(EXTRAS, {}).get("groups")
    if groups is None:
        groups = [[attached.names[number] for number in group] for group in attached.numbers]
    missing = next((x for names in groups for x in names if x not in attached.parameters), None)
    if missing is not None:
        raise StateError(
            f"a group that the optimizer got in mid-training has the parameter {missing}, which the model "
            "here lacks: make the same model on every replica, and add its own parameters only"
        )
    return [[attached.parameters[name] for name in names] for names in groups]


def kept_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state, with copies of what ``load_extras`` writes to, to load it again."""
    state = optimizer_state(optimizer, optimizer.state_dict())
    return {**state, EXTRAS: copy.deepcopy(state[EXTRAS])} if EXTRAS in state else state


def load_extras(
    live: torch.optim.Optimizer,
    value: Mapping[str, Any],
    load: Callable[[torch.optim.Optimizer, dict[str, Any]], None],
) -> None:
    """Give ``live`` the groups, the attributes and, by ``load``, the inner states of ``value``."""
    attached = _attached.get(live)
    if attached is None:
        return
    extras = value.get(EXTRAS, {})
    groups = groups_of(live, value)
    assert groups is not None
    if _ids(live.param_groups) != [list(map(id, parameters)) for parameters in groups]:
        del live.param_groups[len(groups) :]
        live.param_groups += [{} for _ in groups[len(live.param_groups) :]]
        for group, parameters in zip(live.param_groups, groups, strict=True):
            group["params"] = parameters
    for name, inner in _inner_optimizers(live).items():
        state = extras.get("inner", {}).get(name)
        if state is not None:
            load(inner, state)
        else:
            inner.state.clear()
    attributes = extras.get("attributes", {})
    for name in attached.changed - set(attributes):
        attributes = {**attributes, name: _copied(attached.attributes.get(name))}
    for name, wanted in attributes.items():
        setattr(live, name, put(vars(live).get(name), wanted))
    attached.changed.clear()
    attached.changed.update(extras.get("attributes", {}))


def _ids(groups: list[dict[str, Any]]) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in groups]


# --- attributes -------------------------------------------------------------------------------------


def _attributes(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Return the attributes that are numbers, tensors or generators, or containers with some of these."""
    skipped = {"defaults", "state", "param_groups", *_OF_TORCH}
    held = {name: x for name, x in vars(optimizer).items() if name not in skipped and _counts(x, _DEPTH)}
    if not held:
        return {}
    memory = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return {name: value for name, value in held.items() if _is_plain(value, memory, _DEPTH)}


def _counts(value: object, depth: int) -> bool:
    """Whether there is a number, a tensor or a generator in ``value``."""
    if isinstance(value, dict):
        return depth > 0 and any(_counts(part, depth - 1) for part in value.values())
    if isinstance(value, list | tuple):
        return depth > 0 and any(_counts(part, depth - 1) for part in value)
    return type(value) in (int, float) or isinstance(value, torch.Tensor | torch.Generator | np.ndarray)


def _is_plain(value: object, memory: set[int], depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.untyped_storage().data_ptr() not in memory
    if type(value) is dict and depth:
        return all(type(k) in (str, int) and _is_plain(x, memory, depth - 1) for k, x in value.items())
    if isinstance(value, list | tuple) and type(value) in (list, tuple) and depth:
        return all(_is_plain(part, memory, depth - 1) for part in value)
    return value is None or type(value) in (bool, int, float, str, torch.Generator, np.ndarray)


def _changed(optimizer: torch.optim.Optimizer, attached: _Attached) -> dict[str, Any]:
    now = _attributes(optimizer, attached.parameters.values())
    for name, value in now.items():
        if name not in attached.changed and not _equal(value, attached.attributes.get(name)):
            attached.changed.add(name)
    return {name: _described(now[name]) for name in sorted(attached.changed & set(now))}


def _described(value: Any) -> Any:
    """Return ``value`` with the state of each generator in place of the generator."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, dict):
        return {key: _described(part) for key, part in value.items()}
    return type(value)(map(_described, value)) if type(value) in (list, tuple) else value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return _described(value) if isinstance(value, torch.Generator) else copy.deepcopy(_described(value))


def _equal(now: Any, then: Any) -> bool:
    if isinstance(now, torch.Generator):
        return _equal(now.get_state(), then)
    if isinstance(now, torch.Tensor):
        return isinstance(then, torch.Tensor) and now.dtype == then.dtype and torch.equal(now, then)
    if isinstance(now, np.ndarray):
        return isinstance(then, np.ndarray) and np.array_equal(now, then)
    if isinstance(now, dict) and isinstance(then, dict):
        return now.keys() == then.keys() and all(_equal(part, then[key]) for key, part in now.items())
    if isinstance(now, list | tuple) and isinstance(then, list | tuple):
        return len(now) == len(then) and all(map(_equal, now, then))
    return type(now) is type(then) and repr(now) == repr(then)


def _numbered(name: str, value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, list | tuple):
        return [(f"{name}[{at}]", part) for at, part in enumerate(value)]
    if isinstance(value, dict) and name not in ("defaults", "state"):
        return [(f"{name}[{key}]", part) for key, part in value.items()]
    return [(name, value)]
