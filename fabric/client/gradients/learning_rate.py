"""Scales the learning rate of a step that lacks micro-batches, by sqrt(present / all micro-batches).

Hooks apply the factor around the optimizer's own step and restore the rate exactly, so schedulers never see
it. The factor depends on the committed contributions alone, so a replayed step has the same factor.
"""

import math
from typing import Any

from fabric.errors import ConfigError


class PresenceFactor:
    """Set ``factor`` before the user's update code runs; optimizers scale by it in their ``step``."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.factor = 1.0
        self._kept: dict[int, list[Any]] = {}
        for optimizer in optimizers:
            if not hasattr(optimizer, "register_step_pre_hook"):
                raise ConfigError(
                    f"scale_lr needs a torch.optim.Optimizer, not a {type(optimizer).__name__}: scale its "
                    "learning rate in your loop"
                )
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def present(self, counted: int, total: int) -> None:
        """Set the factor of a step whose gradient has ``counted`` of ``total`` micro-batches."""
        self.factor = math.sqrt(counted / total)

    def _before(self, optimizer: Any, _arguments: object, _options: object) -> None:
        if self.factor != 1.0:
            self._kept[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.factor

    def _after(self, optimizer: Any, _arguments: object, _options: object) -> None:
        for group, rate in zip(optimizer.param_groups, self._kept.pop(id(optimizer), ()), strict=False):
            group["lr"] = rate
