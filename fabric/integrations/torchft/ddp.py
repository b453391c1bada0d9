"""torchft's DistributedDataParallel: gradients are averaged over the job when backward ends."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import Variable

from fabric.errors import ConfigError
from fabric.integrations.torchft.managed_steps import Manager

# Arguments of torch's DistributedDataParallel that change how it sends, and not what the result is.
_WITHOUT_EFFECT = {
    "broadcast_buffers",
    "bucket_cap_mb",
    "check_reduction",
    "device_ids",
    "dim",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "init_sync",
    "output_device",
    "skip_all_reduce_unused_params",
    "static_graph",
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
        manager.register_model(module)
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
