"""Finds what a script trains with: its model, optimizer, schedulers and scaler, among all living objects.

Every object that a joining replica would need must be known. So a script with a second model, a second
optimizer or an object whose state the job cannot share is refused by name.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from fabric.errors import ConfigError
from fabric.runtime.living_objects import living

OWN_WAY = "change the script to call fabric.client.attach"


@dataclass(frozen=True, slots=True)
class TrainingObjects:
    """The objects of one script that the replicas of its job share."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedulers: Sequence[LRScheduler]
    scaler: torch.amp.GradScaler | None

    @classmethod
    def find(cls) -> "TrainingObjects":
        """Return the objects of this process's script. Raises ConfigError where they are not unique."""
        gc.collect()  # an object that the script has replaced must not count
        optimizer = _only_optimizer()
        schedulers = schedulers_of([optimizer])
        if any(isinstance(x, ReduceLROnPlateau) for x in schedulers):
            raise ConfigError(
                "--adopt cannot advance a ReduceLROnPlateau in a replica that joins, because it follows "
                f"measured losses: {OWN_WAY}"
            )
        scalers = [x for x in living(torch.amp.GradScaler) if x.is_enabled()]
        if len(scalers) > 1:
            raise ConfigError(
                f"--adopt takes a script with one GradScaler, and this one has {len(scalers)}: {OWN_WAY}"
            )
        return cls(_only_model(optimizer), optimizer, schedulers, scalers[0] if scalers else None)

    @property
    def schedule(self) -> dict[str, Any]:
        """The schedulers, which the script's own loop advances, by name."""
        return {f"scheduler.{n}": x for n, x in enumerate(self.schedulers)}

    @property
    def state(self) -> dict[str, Any]:
        """The objects for ``attach(..., state=)``."""
        return self.schedule | ({"scaler": self.scaler} if self.scaler is not None else {})

    def describe(self) -> str:
        """Name the objects for a sentence."""
        rest = [self.optimizer, *self.schedulers, *([self.scaler] if self.scaler is not None else [])]
        return f"the model {_name(self.model)} with " + ", ".join(map(_name, rest))


def _only_optimizer() -> torch.optim.Optimizer:
    # A framework's wrapper is an optimizer too, and holds the one that it wraps.
    optimizers: list[torch.optim.Optimizer] = [
        x
        for x in living(torch.optim.Optimizer)
        if not any(isinstance(value, torch.optim.Optimizer) for value in vars(x).values())
    ]
    if not optimizers:
        raise ConfigError(
            "--adopt takes a script with one optimizer, and this one has none: let an optimizer such as "
            f"torch.optim.SGD change the parameters, or {OWN_WAY}"
        )
    if len(optimizers) > 1:
        names = ", ".join(sorted(map(_name, optimizers)))
        raise ConfigError(f"--adopt takes a script with one optimizer, and this one has {names}: {OWN_WAY}")
    return optimizers[0]


def outermost_modules() -> list[torch.nn.Module]:
    """Return the modules with parameters that are part of no other module."""
    modules = living(torch.nn.Module)
    inside = {id(child) for module in modules for child in module.children()}
    return [m for m in modules if id(m) not in inside and next(m.parameters(), None) is not None]


def _only_model(optimizer: torch.optim.Optimizer) -> torch.nn.Module:
    outermost = outermost_modules()
    if len(outermost) != 1:
        names = ", ".join(sorted(map(_name, outermost))) or "none"
        raise ConfigError(f"--adopt takes a script with one model, and this one has {names}: {OWN_WAY}")
    model = outermost[0]
    held = {id(parameter) for parameter in model.parameters()}
    if any(id(p) not in held for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            f"the optimizer of the script has parameters that {_name(model)} has not, and --adopt shares one "
            f"model: {OWN_WAY}"
        )
    return model


def schedulers_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[LRScheduler]:
    """Return the living schedulers of these optimizers that are part of no other one, by their names."""
    steered = {id(x.param_groups) for x in optimizers}
    steering = [x for x in living(LRScheduler) if id(x.optimizer.param_groups) in steered]
    within = {id(part) for x in steering for part in getattr(x, "_schedulers", ())}
    return sorted((x for x in steering if id(x) not in within), key=_name)


def is_in_order(loader: DataLoader[Any]) -> bool:
    """Whether each pass of a DataLoader has the order of the data set, as in most evaluations."""
    batches = loader.batch_sampler
    sampler = (
        loader.sampler if batches is None else batches.sampler if type(batches) is BatchSampler else batches
    )
    if isinstance(sampler, DistributedSampler):
        return not sampler.shuffle
    return type(sampler) is SequentialSampler


def wrapped(value: Any) -> Any:
    """Return the module in a wrapper for several processes; else the object itself."""
    is_wrapper = type(value).__name__ in ("DistributedDataParallel", "_FabricModule")
    return getattr(value, "module", value) if is_wrapper else value


def _name(value: object) -> str:
    kind, inner = type(value).__name__, wrapped(value)
    return kind if inner is value else f"{kind}({type(inner).__name__})"
