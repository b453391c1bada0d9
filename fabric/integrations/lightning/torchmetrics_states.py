"""The states of the torchmetrics in a LightningModule, which each replica changes by its own micro-batches.

The change that a micro-batch makes to a state travels as a metric of the step. After the commit all replicas
have the state before the step and what all micro-batches of the job have added.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from fabric.errors import ConfigError

_torchmetrics: Any = importlib.import_module("torchmetrics")
_sum: Any = importlib.import_module("torchmetrics.utilities").dim_zero_sum
METRIC: Any = _torchmetrics.Metric
_PREFIX = "metric:"
_UPDATES = "#"  # in place of a state's name: the number of updates
MOST_NUMBERS = 4096  # that all changes of a micro-batch may have

_States = dict[str, torch.Tensor]


class TorchmetricsStates:
    """The metrics among the parts of ``module``, by the names of its attributes."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.metrics = {name: x for name, x in module.named_modules() if isinstance(x, METRIC)}
        self._trained: set[str] = set()  # metrics that a training step has changed
        self._before: dict[str, tuple[int, _States]] = {}  # updates and states when the step began
        self._seen: dict[str, tuple[int, _States]] = {}  # those that have been told to the others

    def begin(self) -> None:
        """Remember the states at a step boundary."""
        self._before = {name: _state_of(metric) for name, metric in self.metrics.items()}
        self._seen = dict(self._before)

    def take_changes(self) -> dict[str, float]:
        """Return what micro-batches have added since the last call. Raises ConfigError."""
        changes: dict[str, float] = {}
        for name, metric in self.metrics.items():
            updates, seen = self._seen[name]
            if metric._update_count == updates:  # noqa: SLF001
                continue
            _check(name, metric)
            now = self._seen[name] = _state_of(metric)
            changes[f"{_PREFIX}{name}|{_UPDATES}|0"] = float(now[0] - updates)
            for state, value in now[1].items():
                added = (value.double() - seen[state].double()).flatten().tolist()
                kept = {i: x for i, x in enumerate(added) if x}
                changes |= {f"{_PREFIX}{name}|{state}|{i}": x for i, x in kept.items()}
        if len(changes) > MOST_NUMBERS:
            raise ConfigError(
                f"the torchmetrics that training_step updates change {len(changes)} numbers in a batch, and "
                f"FabricStrategy carries {MOST_NUMBERS}: update large ones in validation_step"
            )
        return changes

    def commit(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Give all metrics the job's states; return the value of each over the step alone."""
        added: dict[str, dict[tuple[str, int], float]] = {}
        for key, value in metrics.items():
            if key.startswith(_PREFIX):
                name, state, place = key.removeprefix(_PREFIX).rsplit("|", 2)
                added.setdefault(name, {})[state, int(place)] = value
        self._trained |= added.keys()
        values = {}
        for name, changes in added.items():
            metric, (updates, before) = self.metrics[name], self._before[name]
            new = round(changes.pop((_UPDATES, 0), 0.0))
            values[name] = _with_state(
                metric, new, {k: torch.zeros_like(x) for k, x in before.items()}, changes
            )
            _with_state(metric, updates + new, before, changes, wanted=False)
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the metrics that training steps change."""
        states = {name: _state_of(self.metrics[name]) for name in sorted(self._trained)}
        return {name: {"updates": updates, "states": values} for name, (updates, values) in states.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the job's states."""
        self._trained = set(state)
        for name, saved in state.items():
            _with_state(self.metrics[name], saved["updates"], saved["states"], {}, wanted=False)
        self.begin()


def _check(name: str, metric: Any) -> None:
    wrong = next((x for x, how in metric._reductions.items() if how is not _sum), None)  # noqa: SLF001
    if wrong is not None:
        raise ConfigError(
            f"training_step updates the {type(metric).__name__} {name!r}, whose {wrong!r} is no sum, so that "
            "FabricStrategy cannot add up the replicas' parts: update it in validation_step"
        )


def _state_of(metric: Any) -> tuple[int, _States]:
    names = metric._defaults  # noqa: SLF001
    states = {x: getattr(metric, x) for x in names}
    tensors = {x: value.detach().clone() for x, value in states.items() if isinstance(value, torch.Tensor)}
    return metric._update_count, tensors  # noqa: SLF001


def _with_state(
    metric: Any,
    updates: int,
    states: Mapping[str, torch.Tensor],
    added: Mapping[tuple[str, int], float],
    wanted: bool = True,
) -> Any:
    """Put ``states`` and what is ``added`` into ``metric``; return its value, where it is ``wanted``."""
    metric._update_count, metric._computed = updates, None  # noqa: SLF001
    for name, value in states.items():
        own = getattr(metric, name)
        flat = value.double().flatten().cpu()
        for (state, place), change in added.items():
            if state == name:
                flat[place] += change
        setattr(metric, name, flat.view(value.shape).to(own.device, own.dtype))
    if not wanted:
        return None
    value = metric.compute()
    metric._computed = None  # noqa: SLF001
    return value
