"""Finds gradients that a loop keeps from one step to the next, or drops within a step, and refuses both.

Backward adds to ``.grad``. If the gradient of the step before is still there, every member would add it to
its own part, and the sum would have it once per member. Without fabric the sum has it once. A loop that calls
``zero_grad`` at each micro-batch would contribute the last one only, under the weight of all.
"""

import ctypes
from collections.abc import Iterable
from typing import Any, Self

import torch

from fabric.errors import ConfigError

_LOOKS = 64  # steps of this process that are looked at
_NOTES = 256  # so many times the gradients of a step's earlier micro-batches are noted
_SAMPLED = 1024  # elements that are looked at in each gradient, unless its first bytes have a value
_FIRST_BYTES = 64


class StaleGradients:
    """``begin`` notes which gradients of ``optimizers`` are left over; their optimizer's step is refused.

    Within ``micro_batch`` the user's code computes, and only adds gradients.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._step = -1
        self._looks = self._notes = 0
        self._stale: set[int] = set()
        self.own_loop = True  # false: a framework drops the gradients of a step in the next one
        self._computes = self._frees = False  # the loop is at a micro-batch; fabric may free its gradients
        self._kept: list[torch.nn.Parameter] = []  # parameters with a gradient that the loop must keep
        self._with_value: torch.nn.Parameter | None = None  # one whose gradient must not become zero
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._before)

    def micro_batch(self, is_first: bool, is_only: bool, frees: bool = False) -> Self:
        """Let the user's code compute a micro-batch, and watch the gradients of the step's earlier ones.

        The first micro-batch may drop those of the step before. But where it is the only one, a loop that
        does so would drop gradients in a step that has a dead replica's micro-batches too. Raises ConfigError
        if the user's code has dropped all gradients since its last backward pass. ``frees``: fabric may have
        freed them, because it has sent them.
        """
        self._kept, self._with_value = [], None
        if not is_first or (is_only and self.own_loop):
            self.added()
        self._computes, self._frees = self.own_loop, frees
        return self

    def __enter__(self) -> None:
        """Enter the micro-batch."""

    def __exit__(self, kind: object, *_: object) -> None:
        self._computes = False  # the loop may leave the step
        watches = kind is None and not self._frees
        if watches and ((self._kept and all(p.grad is None for p in self._kept)) or self._became_zero()):
            raise _dropped()
        self._kept, self._with_value = [], None

    def added(self) -> None:
        """Note the gradients after a backward pass."""
        self._kept, self._with_value = [], None
        if self._notes < _NOTES:
            self._notes += 1
            self._kept = [p for o in self._optimizers for p in _parameters(o) if p.grad is not None]
            self._with_value = next((p for p in self._kept if _has_value(p.grad)), None)

    def begin(self, step: int) -> None:
        """Look at the gradients before a backward pass of ``step``. Raises ConfigError for dropped ones."""
        if any(p.grad is None for p in self._kept) or self._became_zero():
            raise _dropped()
        if step == self._step:
            return
        self._step = step
        if self._looks >= _LOOKS:
            self._stale = set()
            return
        gradients = [(p, p.grad) for o in self._optimizers for p in _parameters(o) if p.grad is not None]
        self._looks += 1
        self._stale = {id(p) for p, gradient in gradients if _has_value(gradient)}

    def end(self) -> None:
        """Note that a replayed step follows: its gradient is written over what is there."""
        self._stale = set()

    def _became_zero(self) -> bool:
        gradient = self._with_value.grad if self._with_value is not None else None
        # A part of it may have become zero: before a refusal all of it is read.
        return gradient is not None and not _has_value(gradient) and not gradient.any()

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._computes:
            raise ConfigError(
                f"{type(optimizer).__name__}.step was called within the loop over the micro-batches, before "
                "the gradients of all replicas are averaged: call it after that loop, and let the phases of "
                "a GAN take turns by step.number"
            )
        if self._stale and any(id(p) in self._stale for p in _parameters(optimizer)):
            raise ConfigError(
                "the gradient of the step before was still there when this step began, and each replica "
                "would add it once: call optimizer.zero_grad() after each step, and in place of an "
                "accumulation over steps choose a larger global batch"
            )


def _dropped() -> ConfigError:
    return ConfigError(
        "the gradients of this step's earlier micro-batches are gone, and would be missing from the average: "
        "call optimizer.zero_grad() once in each step, after optimizer.step(), and not at each micro-batch"
    )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _has_value(gradient: Any) -> bool:
    if type(gradient) is torch.Tensor and gradient.is_cpu and gradient.is_contiguous():
        # Nearly always the first bytes answer: a zero of any sign and type has these two bytes only.
        first = ctypes.string_at(gradient.data_ptr(), min(gradient.nbytes, _FIRST_BYTES))
        if first.strip(b"\x00\x80"):
            return True
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    if local.layout != torch.strided:
        return False
    flat = local.detach().reshape(-1)
    return bool(flat[:: max(1, flat.numel() // _SAMPLED)].any())
