"""The parts that a script gives a Manager: its model, its optimizers, and functions for the rest."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fabric.errors import ConfigError
from fabric.integrations.adopt.living_objects import living


class RegisteredState:
    """The shared state of a script besides model and optimizers, with ``state_dict`` and ``load_state_dict``.

    Entries of the script's functions that are the state of the model or of an optimizer are left out, because
    fabric carries these itself.
    """

    def __init__(self) -> None:
        self.batches_committed = 0
        self.is_loading = False  # the script's own functions are loading a state
        self._model: torch.nn.Module | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._functions: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}

    def set_model(self, model: torch.nn.Module) -> None:
        """Take the model. Raises ConfigError for a second one."""
        if self._model is not None:
            raise ConfigError(
                "two models are wrapped in DistributedDataParallel, and a Manager takes one: wrap a module "
                "that holds both"
            )
        self._model = model

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer."""
        self._optimizers.append(optimizer)

    def add(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """Take the two functions of a part of the state."""
        self._functions[key] = load, save

    def training_objects(self) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        """Return the model and the optimizers. Raises ConfigError where one is missing."""
        if self._model is None:
            raise ConfigError(
                "the Manager has no model: wrap it in fabric.integrations.torchft.DistributedDataParallel"
            )
        if not self._optimizers:  # a script that calls should_commit itself wraps none
            self._optimizers = _optimizers_of(self._model)
        if not self._optimizers:
            raise ConfigError(
                "the Manager has no optimizer: wrap it in fabric.integrations.torchft.OptimizerWrapper"
            )
        return self._model, self._optimizers

    def is_gradient(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is the ``.grad`` of a parameter of the model."""
        if self._model is None:
            return False
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        return any(x is tensor or x.data_ptr() == tensor.data_ptr() for x in gradients)

    def state_dict(self) -> dict[str, Any]:
        """Return what the script's functions give, without the states that fabric carries itself."""
        own = {key: self._own(save()) for key, (_, save) in self._functions.items()}
        return {"batches_committed": self.batches_committed, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hand a state to the script's functions, with the present states of model and optimizers."""
        self.batches_committed = int(state["batches_committed"])
        self.is_loading = True
        try:
            for key, own in state["own"].items():
                load, save = self._functions[key]
                if own:
                    load({**save(), **own})
        finally:
            self.is_loading = False

    def _own(self, saved: Any) -> dict[str, Any]:
        if not isinstance(saved, dict):
            raise ConfigError(
                f"the script's state_dict function returned a {type(saved).__name__}: return a dict"
            )
        memory = {x.data_ptr() for x in _tensors([*self._states()]) if x.numel()}
        return {key: value for key, value in saved.items() if not self._is_carried(value, memory)}

    def _states(self) -> Iterator[Mapping[str, Any]]:
        if self._model is not None:
            yield self._model.state_dict()
        for optimizer in self._optimizers:
            yield optimizer.state_dict()

    def _is_carried(self, value: Any, memory: set[int]) -> bool:
        """Whether ``value`` is the state of the model or of an optimizer."""
        if not isinstance(value, dict) or not value:
            return False
        if all(isinstance(x, torch.Tensor) for x in value.values()):
            return all(x.data_ptr() in memory for x in value.values() if x.numel())
        groups = [x.state_dict()["param_groups"] for x in self._optimizers]
        return set(value) == {"state", "param_groups"} and value["param_groups"] in groups


def _optimizers_of(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return the only living optimizer of ``model``, if there is one. Raises ConfigError for several."""
    held = {id(parameter) for parameter in model.parameters()}
    own = [x for x in living(torch.optim.Optimizer) if "param_groups" in vars(x)]
    optimizers = [x for x in own if any(id(p) in held for group in x.param_groups for p in group["params"])]
    if len(optimizers) > 1:
        raise ConfigError(
            f"{len(optimizers)} optimizers have parameters of the Manager's model: wrap each of them in "
            "fabric.integrations.torchft.OptimizerWrapper"
        )
    return optimizers


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
