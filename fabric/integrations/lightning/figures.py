"""The figures that ``training_step`` logs: those of the whole job, on every replica and in every step.

A replica computes some micro-batches of a step. So its own figures would differ from the others', and what
they steer would differ too. The sums travel with the gradient as the step's metrics. A step that is replayed
has them as well. ``self.log`` in ``training_step`` therefore gives the mean, or the sum, over the whole step,
and at the end of an epoch over the whole epoch.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from fabric.errors import ConfigError
from fabric.integrations.hook_source import logged_by
from fabric.integrations.lightning.release import ROOT
from fabric.integrations.lightning.torchmetrics_states import TorchmetricsStates

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
            self._check_steering(meta, is_tensor=item.is_tensor)
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
            if _reduction_of(name) == "mean":
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

    def _check_steering(self, meta: Any, is_tensor: bool) -> None:
        """Raise ConfigError for a replica's own figure that steers something."""
        steered = self.monitors.get(meta.name) or self.monitors.get(meta.forked_name(on_step=False))
        if steered and is_tensor:
            raise _of_one_replica(steered, meta.name, meta.fx)

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
        """Take over the job's figures."""
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


def _reduction_of(name: str) -> str:
    return name.split("|", 3)[2]


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
