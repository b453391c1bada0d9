"""The shared state of a job: model, optimizers and the objects of ``state=``, equal on all replicas."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fabric.ckpt_server.state.optimizer_extras import put
from fabric.client.gradients.forward_buffers import BufferChoices
from fabric.errors import ConfigError

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


def shared_state(
    model: torch.nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    state: Mapping[str, Any],
    buffers: BufferChoices,
) -> dict[str, object]:
    """Return the objects of the shared state by name. Raises ConfigError for one that cannot be shared."""
    state = {name: with_state(value) for name, value in state.items()}
    for name, value in state.items():
        if name == "model" or name in optimizers:
            raise ConfigError(f'state has the name "{name}", which is taken: use another one')
        if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
            raise ConfigError(
                f"state[{name!r}] is a {type(value).__name__} without state_dict and load_state_dict: give "
                "an object that has both, a dict or a torch.Generator"
            )
    shared: object = WithoutBuffers(model, buffers.local) if buffers.local else model
    for value in state.values():
        if isinstance(value, torch.amp.GradScaler):
            # A scaler makes its state when it first scales a loss, but a joining replica unscales first.
            value.scale(torch.zeros((), device=next(model.parameters()).device))
    return {"model": shared, **optimizers, **state}


def optimizers_by_name(optimizer: Optimizers) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers by their names in the shared state. Raises ConfigError."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return {"optimizer": optimizer}
    named = optimizer if isinstance(optimizer, Mapping) else dict(enumerate(optimizer))
    wrong = next((x for x in named.values() if not isinstance(x, torch.optim.Optimizer)), None)
    if not named or wrong is not None:
        raise ConfigError(
            f"attach takes an optimizer, or several of them in a sequence or by name, not "
            f"{'none' if wrong is None else 'a ' + type(wrong).__name__}"
        )
    return {f"optimizer.{name}": value for name, value in named.items()}


def with_state(value: Any) -> Any:
    """Return ``value`` as an object with a state: a dict and a ``torch.Generator`` have no ``state_dict``."""
    return SharedValue(value) if type(value) is dict or isinstance(value, torch.Generator) else value


class SharedValue:
    """A dict or a ``torch.Generator`` as shared state.

    Loading keeps the user's dict, and its tensors where the shapes are equal.
    """

    def __init__(self, value: dict[Any, Any] | torch.Generator) -> None:
        self._value = value

    def state_dict(self) -> dict[Any, Any]:
        return self._value if isinstance(self._value, dict) else {"generator": self._value.get_state()}

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        if isinstance(self._value, dict):
            put(self._value, dict(state))  # ``state`` may be the dict itself
        else:
            self._value.set_state(state["generator"].cpu())


class WithoutBuffers:
    """A module's state without the buffers that stay local."""

    def __init__(self, model: torch.nn.Module, names: frozenset[str]) -> None:
        self._model = model
        self._names = names

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self._model.named_parameters()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {k: v for k, v in self._model.state_dict().items() if k not in self._names}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the state of everything but the local buffers, which keep their values."""
        own = {k: v for k, v in self._model.state_dict().items() if k in self._names}
        self._model.load_state_dict({**state, **own})
