"""Refuses optimizers and models that cannot stay equal on all replicas, and names them.

Refused are optimizers that evaluate the loss again, and models whose parameters changed after ``attach``.
"""

from collections.abc import Iterable, Sequence

import torch

from fabric.client.loop.unshared_schedulers import UnsharedWatch
from fabric.errors import ConfigError, StateError

# Number of steps between two searches for new parameters: a search walks over every module.
LOOK_EVERY = 10


def refuse_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise ConfigError for an optimizer that computes gradients of its own inside ``step``."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ConfigError(
            "torch.optim.LBFGS evaluates the loss again inside step, on one replica's own data, so that the "
            "replicas would part: use an optimizer that takes the gradient as it is, such as AdamW or SGD"
        )


class ModelWatch:
    """Remembers which parameters were attached; ``check`` raises StateError naming the first that changed."""

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        unshared: UnsharedWatch,
    ) -> None:
        self._model = model
        self._unshared = unshared
        self._scaled = False
        self._attached = [(name, p, p.shape, p.dtype) for name, p in parameters]

    def begin(self) -> None:
        """Check before this process joins its job. Raises ConfigError, see UnsharedWatch."""
        self._unshared.check_when_changed()

    def check(self, step: int) -> None:
        """Check before the exchange of ``step``: other members expect the attached parameters."""
        if not self._scaled:
            # By now a scaler that the user's code uses has scaled a loss, so the check finds this scaler.
            self._scaled = True
            self._unshared.check()
        for name, parameter, shape, dtype in self._attached:
            if not parameter.requires_grad:
                raise _changed(name, "was frozen")
            if (parameter.shape, parameter.dtype) != (shape, dtype):
                was, is_ = f"{dtype}{list(shape)}", f"{parameter.dtype}{list(parameter.shape)}"
                raise _changed(name, f"was {was} and is {is_}")
        if step % LOOK_EVERY == 0:
            self._look()
            self._unshared.check_when_changed()

    def _look(self) -> None:
        now = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        for name, parameter, _, _ in self._attached:
            current = now.pop(name, None)
            if current is None:
                raise _changed(name, "was removed")
            if current is not parameter:
                raise _changed(name, "was replaced by another tensor")
        if now:
            raise _changed(next(iter(now)), "was added or unfrozen")


def _changed(name: str, what: str) -> StateError:
    return StateError(
        f"the parameter {name} {what} after attach, and the other replicas do not know that: change the "
        "model before attach, and start all replicas again"
    )
