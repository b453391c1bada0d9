"""Finds gradients that a loop keeps from one step to the next, and refuses the update that would use them.

Backward adds to ``.grad``. If the gradient of the step before is still there, every member would add it to
its own part, and the sum would have it once per member. Without fabric the sum has it once.
"""

from collections.abc import Iterable, Iterator

import torch

from fabric.errors import ConfigError

_LOOKS = 64  # steps of this process that are looked at
_SAMPLED = 1024  # elements that are looked at in each gradient


class StaleGradients:
    """``begin`` notes which gradients of ``optimizers`` are left over; their optimizer's step is refused."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._step = -1
        self._looks = 0
        self._stale: set[int] = set()
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._before)

    def begin(self, step: int) -> None:
        """Look at the gradients before the first backward pass of ``step``."""
        if step == self._step or self._looks >= _LOOKS:
            return
        self._step = step
        gradients = [(p, p.grad) for o in self._optimizers for p in _parameters(o) if p.grad is not None]
        self._looks += 1
        self._stale = {id(p) for p, gradient in gradients if _has_value(gradient)}

    def end(self) -> None:
        """Note that a replayed step follows: its gradient is written over what is there."""
        self._stale = set()

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._stale and any(id(p) in self._stale for p in _parameters(optimizer)):
            raise ConfigError(
                "the gradient of the step before was still there when this step began, and each replica "
                "would add it once: call optimizer.zero_grad() after each step, and in place of an "
                "accumulation over steps choose a larger global batch"
            )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _has_value(gradient: torch.Tensor) -> bool:
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    if local.layout != torch.strided:
        return False
    flat = local.detach().reshape(-1)
    return bool(flat[:: max(1, flat.numel() // _SAMPLED)].any())
