"""Wrappers by torchft's names: of a script's model, of its optimizer, and of the sampler of its data.

The gradients are averaged over the job when backward ends. ``zero_grad`` begins a step of the job, and
``step`` ends it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils.data import Dataset
from torch.utils.data import DistributedSampler as TorchSampler

from fabric.errors import ConfigError
from fabric.integrations.torchft.managed_steps import Manager

# Arguments of torch's DistributedDataParallel that change how it sends, and not what the result is.
_WITHOUT_EFFECT = {
    *("broadcast_buffers", "bucket_cap_mb", "check_reduction", "device_ids", "dim"),
    *("find_unused_parameters", "gradient_as_bucket_view", "init_sync", "output_device"),
    *("skip_all_reduce_unused_params", "static_graph"),
}


class DistributedDataParallel(torch.nn.Module):
    """``module`` in the job of ``manager``. Its state has torch's names, with ``module.`` in front.

    Raises ConfigError for an argument that fabric cannot honour.
    """

    def __init__(self, manager: Manager, module: torch.nn.Module, **kwargs: Any) -> None:
        super().__init__()
        unknown = sorted(set(kwargs) - _WITHOUT_EFFECT)
        if unknown:
            raise ConfigError(
                f"DistributedDataParallel got {unknown[0]}=, which fabric cannot honour: leave it out"
            )
        manager.registered.set_model(module)
        self.module = module
        self._manager = manager
        self._averages = True
        self._is_due = False  # the backward pass under way ends with an exchange
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the module. The first forward of a step with gradients joins the step."""
        if torch.is_grad_enabled():
            self._manager.begin_step()
        return self.module(*arguments, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context a backward adds to the gradients, and averages nothing."""
        before, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = before

    def _on_gradient(self, _: torch.Tensor) -> None:
        if self._averages and not self._is_due:
            self._is_due = True
            # torch's own way to act when a backward pass has accumulated all of its gradients.
            Variable._execution_engine.queue_callback(self._end_backward)  # noqa: SLF001

    def _end_backward(self) -> None:
        self._is_due = False
        self._manager.average_gradients()


class OptimizerWrapper(torch.optim.Optimizer):
    """``optim`` for the job of ``manager``; everything but the beginning and end of a step is its own."""

    def __init__(self, manager: Manager, optim: torch.optim.Optimizer) -> None:
        self.optim, self.manager = optim, manager  # torch's own constructor would make a second optimizer
        manager.registered.optimizers.append(optim)

    def __getattr__(self, name: str) -> Any:
        """Return what the wrapped optimizer has, such as ``param_groups``, ``state`` and ``defaults``."""
        if name == "optim":
            raise AttributeError(name)  # of a copy that is being made
        return getattr(self.optim, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
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


class DistributedSampler(TorchSampler[Any]):
    """The samples of rank ``group_rank`` of ``num_replicas`` ranks in replica ``replica_rank`` of
    ``num_replica_groups``.

    The parts are fixed: as with torchft, nobody reads the part of a replica that is away.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        replica_rank: int,
        num_replica_groups: int,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        **kwargs: Any,
    ) -> None:
        ranks = 1 if num_replicas is None else num_replicas
        super().__init__(
            dataset,
            num_replicas=ranks * num_replica_groups,
            rank=(group_rank or 0) + ranks * replica_rank,
            **kwargs,
        )
