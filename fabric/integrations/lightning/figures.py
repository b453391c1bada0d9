"""The figures that ``training_step`` logs: those of the whole job, on every replica and in every step.

A replica computes some micro-batches of a step. So its own figures would differ from the others', and what
they steer would differ too. The sums travel with the gradient as the step's metrics. A step that is replayed
has them as well. ``self.log`` in ``training_step`` therefore gives the mean, or the sum, over the whole step,
and at the end of an epoch over the whole epoch.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fabric.errors import ConfigError
from fabric.integrations.lightning.release import ROOT
from fabric.integrations.user_source import logged_by

# The states of the torchmetrics in a LightningModule, which each replica changes by its own
# micro-batches.
#
# The change that a micro-batch makes to a state travels as a metric of the step. After the commit all
# replicas have the state before the step and what all micro-batches of the job have added.

_torchmetrics: Any = importlib.import_module("torchmetrics")
_sum: Any = importlib.import_module("torchmetrics.utilities").dim_zero_sum
METRIC: Any = _torchmetrics.Metric
_METRIC_PREFIX = "metric:"
_UPDATES = "#"  # in place of a state's name: the number of updates
MOST_NUMBERS = 4096  # that all changes of a micro-batch may have

_States = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of a metric's state, which nothing changes, and how to see that it is still true."""

    updates: int  # of the metric
    source: torch.Tensor
    version: int  # of the source
    value: torch.Tensor


class TorchmetricsStates:
    """The metrics among the parts of ``module``, by the names of its attributes."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.metrics = {name: x for name, x in module.named_modules() if isinstance(x, METRIC)}
        self._trained: set[str] = set()  # metrics that a training step has changed
        self._copies: dict[tuple[str, str], _Copy] = {}  # the newest, by metric and state
        self._before: dict[str, tuple[int, _States]] = {}  # updates and states when the step began
        self._seen: dict[str, tuple[int, _States]] = {}  # those that have been told to the others

    def begin(self) -> None:
        self._before = {name: self._state_of(name) for name in self.metrics}
        self._seen = dict(self._before)

    def take_changes(self) -> dict[str, float]:
        """Return what micro-batches have added since the last call. Raises ConfigError."""
        changes: dict[str, float] = {}
        for name, metric in self.metrics.items():
            updates, seen = self._seen[name]
            if metric._update_count == updates:  # noqa: SLF001
                continue
            _check(name, metric)
            now = self._seen[name] = self._state_of(name)
            changes[f"{_METRIC_PREFIX}{name}|{_UPDATES}|0"] = float(now[0] - updates)
            for state, value in now[1].items():
                added = (value.double() - seen[state].double()).flatten().tolist()
                kept = {i: x for i, x in enumerate(added) if x}
                changes |= {f"{_METRIC_PREFIX}{name}|{state}|{i}": x for i, x in kept.items()}
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
            if key.startswith(_METRIC_PREFIX):
                name, state, place = key.removeprefix(_METRIC_PREFIX).rsplit("|", 2)
                added.setdefault(name, {})[state, int(place)] = value
        self._trained |= added.keys()
        values = {}
        for name, changes in added.items():
            metric, (updates, before) = self.metrics[name], self._before[name]
            new = round(changes.pop((_UPDATES, 0), 0.0))
            _put(metric, new, {k: torch.zeros_like(x) for k, x in before.items()}, changes)
            values[name] = metric.compute()
            _put(metric, updates + new, before, changes)
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the metrics that training steps change."""
        states = {name: self._state_of(name) for name in sorted(self._trained)}
        return {name: {"updates": updates, "states": values} for name, (updates, values) in states.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._trained = set(state)
        for name, saved in state.items():
            _put(self.metrics[name], saved["updates"], saved["states"], {})
        self.begin()

    def _state_of(self, name: str) -> tuple[int, _States]:
        """Return the number of updates, and copies of the states. Most metrics change in evaluations only."""
        metric, tensors = self.metrics[name], dict[str, torch.Tensor]()
        updates: int = metric._update_count  # noqa: SLF001
        for state in metric._defaults:  # noqa: SLF001
            value = getattr(metric, state)
            if not isinstance(value, torch.Tensor):
                continue
            version = -1 if value.is_inference() else value._version  # noqa: SLF001
            kept = self._copies.get((name, state))
            is_true = kept is not None and kept.source is value and version == kept.version >= 0
            if kept is None or not is_true or kept.updates != updates:
                kept = self._copies[name, state] = _Copy(updates, value, version, value.detach().clone())
            tensors[state] = kept.value
        return updates, tensors


def _check(name: str, metric: Any) -> None:
    wrong = next((x for x, how in metric._reductions.items() if how is not _sum), None)  # noqa: SLF001
    if wrong is not None:
        raise ConfigError(
            f"training_step updates the {type(metric).__name__} {name!r}, whose {wrong!r} is no sum, so that "
            "FabricStrategy cannot add up the replicas' parts: update it in validation_step"
        )


def _put(
    metric: Any, updates: int, states: Mapping[str, torch.Tensor], added: Mapping[tuple[str, int], float]
) -> None:
    """Put ``states`` and what is ``added`` into ``metric``."""
    metric._update_count, metric._computed = updates, None  # noqa: SLF001
    for name, value in states.items():
        own = getattr(metric, name)
        flat = value.to("cpu", torch.float64, copy=True).flatten()
        for (state, place), change in added.items():
            if state == name:
                flat[place] += change
        setattr(metric, name, flat.view(value.shape).to(own.device, own.dtype))


_result: Any = importlib.import_module(f"{ROOT}.trainer.connectors.logger_connector.result")
# Hooks that run for every micro-batch that this replica computes.
OF_MICRO_BATCH = ("training_step", "on_before_backward", "on_after_backward")
# Hooks of the training that see this replica's micro-batches.
_OF_REPLICA = ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end")
_PREFIX = "log:"
_COUNT = "#"
_FLAGS = ("prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_COUNTERS = ("epoch", "step")  # equal on all replicas, whichever hook logs them
_REDUCTIONS = {"mean": torch.mean, "sum": torch.sum}


class JobResults(_result._ResultCollection):  # type: ignore[misc]  # noqa: SLF001
    """The results of Lightning's training loop. It tells ``figures`` what the hooks log."""

    def __init__(self, figures: "JobFigures") -> None:
        super().__init__(training=True)
        self._figures = figures

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """As Lightning's. Raises ConfigError, see ``JobFigures.note``."""
        if self._figures.note(self[key], value, batch_size):
            super().update_metrics(key, value, batch_size)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """As Lightning's. A reset of everything is the end of an epoch."""
        if fx in OF_MICRO_BATCH:
            return  # Lightning's for the first batch of an epoch; a replayed step has its figures before that
        if metrics is None and fx is None:
            self._figures.totals.clear()
        super().reset(metrics, fx)


class JobFigures:
    """Collects the figures of micro-batches, and puts those of the job into Lightning's results."""

    def __init__(self, trainer: Any) -> None:
        self.totals: dict[str, list[float]] = {}  # name -> sum and weight since the epoch began
        self.results = JobResults(self)
        self.samples: float | None = None  # of the micro-batch under way; None while none is computed
        self._standing: dict[str, Any] | None = None  # the state at the boundary, while a step is computed
        self.idle = False  # the loop's batch is none of the job's
        self.monitors = monitors_of(trainer)  # name of a figure -> the thing that it steers
        self._trainer = trainer
        self._states = TorchmetricsStates(trainer.lightning_module)
        self._noted: list[tuple[str, Any, float]] = []
        trainer.fit_loop.epoch_loop._results = self.results  # noqa: SLF001

    # --- a step -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Remember the states of the module's metrics, which the step's micro-batches change."""
        self._states.begin()
        self._standing = self._now()

    def note(self, item: Any, value: Any, batch_size: float) -> bool:
        """Take a figure that a hook logs; return whether this replica has it for itself.

        Raises ConfigError where replicas cannot agree about it.
        """
        meta = item.meta
        if self.idle and meta.fx in OF_MICRO_BATCH:
            return False
        if self.samples is None or meta.fx not in OF_MICRO_BATCH:
            # A replica's own figure must steer nothing.
            steered = self.monitors.get(meta.name) or self.monitors.get(meta.forked_name(on_step=False))
            if steered and item.is_tensor:
                raise _of_one_replica(steered, meta.name, meta.fx)
            return True
        if not item.is_tensor:
            self._noted.append((_name(meta, "metric"), 0.0, 0.0))
            return True
        reduction = meta.reduce_fx.__name__
        if reduction not in _REDUCTIONS:
            raise ConfigError(
                f"{meta.fx} logs {meta.name!r} with reduce_fx={reduction!r}, which FabricStrategy cannot "
                'take over all replicas: log it with "mean" or "sum", or in validation_step'
            )
        weight = float(batch_size) if meta.on_epoch else self.samples
        self._noted.append((_name(meta, reduction), value.detach(), weight))
        return True

    def flush(self, session: Any) -> None:
        """Add the figures of the micro-batches computed so far to the step's metrics."""
        noted, self._noted = self._noted, []
        for name, value, weight in noted:
            if name.split("|", 3)[2] == "mean":  # the reduction, as ``_name`` has written it
                session.metrics(**{name: float(value) * weight, name + _COUNT: weight})
            else:
                session.metrics(**{name: float(value)})
        changes = self._states.take_changes()
        if changes:
            session.metrics(**changes)

    def commit(self, metrics: Mapping[str, float]) -> None:
        """Put the figures of a committed step into Lightning's results."""
        self._standing = None
        values = self._states.commit(metrics)
        for name, total in metrics.items():
            if name.startswith(_PREFIX) and not name.endswith(_COUNT):
                weight = metrics.get(name + _COUNT, 1.0)
                sums = self.totals.setdefault(name, [0.0, 0.0])
                sums[0], sums[1] = sums[0] + total, sums[1] + weight
                self._show(name, total / (weight or 1.0))
        for item in self.results.values():
            if not item.is_tensor and item.meta.on_step and item.meta.metric_attribute in values:
                item._forward_cache = values[item.meta.metric_attribute]  # noqa: SLF001

    def _show(self, name: str, of_step: float | None) -> None:
        """Let the result ``name`` show the figures of the job. ``of_step``: the figure of the newest step."""
        total, weight = self.totals[name]
        meta, device = _meta(name, self._trainer), self._trainer.strategy.root_device
        key, is_tensor = f"{meta.fx}.{meta.name}", meta.metric_attribute is None
        item = self.results.get(key)
        if item is None:
            item = self.results[key] = _result._ResultMetric(meta, is_tensor).to(device)  # noqa: SLF001
        item._computed, item._update_count, item.has_reset = None, 1, False  # noqa: SLF001
        if not is_tensor:
            item.value = self._states.metrics[meta.metric_attribute]
            return
        if meta.on_step and of_step is not None:
            item._forward_cache = torch.tensor(of_step, device=device)  # noqa: SLF001
        item.value = torch.tensor(total if meta.on_epoch else of_step or 0.0, device=device)
        if item.meta.is_mean_reduction:
            item.cumulated_batch_size = torch.tensor(weight, device=device)

    def check_sources(self) -> None:
        """Raise ConfigError for a figure that steers and that the user's hooks log for a replica alone.

        Lightning tells of such a figure when it is logged, which may be at the end of the first epoch.
        """
        for thing in (self._trainer.lightning_module, *self._trainer.callbacks):
            for name, hook, value in logged_by(thing):
                if hook in _OF_REPLICA and name in self.monitors and not isinstance(value, torch.nn.Module):
                    raise _of_one_replica(self.monitors[name], name, hook)

    # --- shared state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the step boundary; forward passes change what Lightning shows meanwhile."""
        return self._standing if self._standing is not None else self._now()

    def _now(self) -> dict[str, Any]:
        """Return the sums of the epoch, the states of metrics, and the newest figures that steer."""
        newest = self._trainer._logger_connector._callback_metrics  # noqa: SLF001
        steering = {name: float(newest[name]) for name in sorted(self.monitors) if name in newest}
        totals = {name: list(sums) for name, sums in self.totals.items()}
        return {"totals": totals, "metrics": self._states.state_dict(), "steering": steering}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._standing = None
        self.totals = {name: list(sums) for name, sums in state["totals"].items()}
        self._states.load_state_dict(state["metrics"])
        for name in self.totals:
            self._show(name, None)
        steering = {name: torch.tensor(value, device="cpu") for name, value in state["steering"].items()}
        self._trainer._logger_connector._callback_metrics.update(steering)  # noqa: SLF001


def _of_one_replica(steered: str, name: str, hook: str) -> ConfigError:
    return ConfigError(
        f"{steered} follows {name!r}, which {hook} logs from what this replica alone has seen: log it in "
        "training_step with on_epoch=True, or in validation_step"
    )


def monitors_of(trainer: Any) -> dict[str, str]:
    """Return the names of figures that steer the training, and what each steers."""
    callbacks = {str(x.monitor): type(x).__name__ for x in trainer.callbacks if getattr(x, "monitor", None)}
    schedulers = [x for x in trainer.strategy.lr_scheduler_configs if x.reduce_on_plateau]
    monitors = {**callbacks, **{x.monitor: type(x.scheduler).__name__ for x in schedulers}}
    return {name: steered for name, steered in monitors.items() if name not in _COUNTERS}


def _name(meta: Any, reduction: str) -> str:
    """Return the metric's name on the way between replicas: all that a replica needs to make the result."""
    flags = "".join(str(int(getattr(meta, flag))) for flag in _FLAGS) + str(int(meta.sync.rank_zero_only))
    return _PREFIX + "|".join((meta.fx, flags, reduction, meta.metric_attribute or "", meta.name))


def _meta(name: str, trainer: Any) -> Any:
    """Return Lightning's description of a figure, as ``self.log`` would have made it."""
    fx, flags, reduction, attribute, shown = name.removeprefix(_PREFIX).split("|", 4)
    chosen = {flag: digit == "1" for flag, digit in zip(_FLAGS, flags, strict=False)}
    meta = _result._Metadata(  # noqa: SLF001
        fx=fx,
        name=shown,
        reduce_fx=_REDUCTIONS.get(reduction, torch.mean),
        metric_attribute=attribute or None,
        **chosen,
    )
    meta.sync = _result._Sync(fn=trainer.strategy.reduce, rank_zero_only=flags[-1] == "1")  # noqa: SLF001
    return meta
