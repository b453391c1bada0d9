"""torchft's OptimizerWrapper: ``zero_grad`` begins a step of the job, ``step`` ends it."""

from collections.abc import Mapping
from typing import Any

import torch

from fabric.errors import ConfigError
from fabric.integrations.torchft.managed_steps import Manager


class OptimizerWrapper(torch.optim.Optimizer):
    """``optim`` for the job of ``manager``; everything but the beginning and end of a step is its own."""

    def __init__(self, manager: Manager, optim: torch.optim.Optimizer) -> None:
        self.optim, self.manager = optim, manager  # torch's own constructor would make a second optimizer
        manager.register_optimizer(optim)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the wrapped optimizer."""
        return self.optim.param_groups

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the wrapped optimizer."""
        return self.optim.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's, before the first step."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step of the job, and drop the gradients."""
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update the parameters with the average of all replicas. Raises ConfigError for a closure."""
        if closure is not None:
            raise ConfigError(
                "the optimizer's step got a closure, which computes gradients on one replica's own data: "
                "leave it out"
            )
        if self.manager.should_commit():
            self.optim.step()
