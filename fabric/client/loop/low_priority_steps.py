"""Runs the steps of torch's own optimizers at low priority while a replica replays.

All user code stays in the main thread: hooks, closures, schedulers, optimizers of other classes.
"""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from fabric.runtime.priority import run_low_priority


class LowPrioritySteps:
    """Until ``close`` each plain ``step()`` of ``optimizers`` runs at low priority."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._wrapped = [(x, _wrap(x)) for x in optimizers if _is_plain(x)]

    def close(self) -> None:
        """Run later steps in the thread that calls them."""
        for optimizer, wrapper in self._wrapped:
            wrapper.open = False  # code may still call the wrapper after it was removed
            if optimizer.__dict__.get("step") is wrapper.method:
                optimizer.__dict__.pop("step")
                optimizer.__dict__.update(wrapper.before)
        self._wrapped = []


@dataclass(slots=True)
class _Wrapper:
    """The replacement of one optimizer's ``step``."""

    method: Callable[..., Any]
    before: dict[str, Any]  # the optimizer's own attribute ``step``, where it had one
    open: bool = True


def _wrap(optimizer: torch.optim.Optimizer) -> _Wrapper:
    original = optimizer.step

    @functools.wraps(original)
    def step(self: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        # A closure (user code) and torch's modes, which hold in one thread, need the step in this thread.
        own = wrapper.open and not (arguments or named or _is_in_a_mode() or _has_hooks(optimizer))
        return run_low_priority(original) if own else original(*arguments, **named)

    # A scheduler created later wraps ``step`` too, and expects a bound method.
    before = {"step": optimizer.__dict__["step"]} if "step" in optimizer.__dict__ else {}
    wrapper = _Wrapper(types.MethodType(step, optimizer), before)
    optimizer.step = wrapper.method  # type: ignore[method-assign]
    return wrapper


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's ``step`` is torch's code on the CPU, wrapped at most by torch's schedulers."""
    kind, own = type(optimizer), optimizer.__dict__.get("step")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return (
        f"{kind.__module__}.".startswith("torch.optim.")
        and (own is None or getattr(own, "__wrapped__", None) is kind.step)
        and all(type(p) in (torch.Tensor, torch.nn.Parameter) and p.device.type == "cpu" for p in parameters)
    )


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step calls hooks of the user. Those of fabric may run in any thread."""
    tables: tuple[Any, ...] = (
        optimizer._optimizer_step_pre_hooks,  # noqa: SLF001  (torch has no public way to ask)
        optimizer._optimizer_step_post_hooks,  # noqa: SLF001
        torch_optimizer._global_optimizer_pre_hooks,  # noqa: SLF001
        torch_optimizer._global_optimizer_post_hooks,  # noqa: SLF001
    )
    hooks = (hook for table in tables for hook in table.values())
    return not all(str(getattr(hook, "__module__", "")).startswith("fabric.") for hook in hooks)


def _is_in_a_mode() -> bool:
    """Whether the calling thread has entered a mode that changes torch's operations."""
    inside: Any = torch._C  # noqa: SLF001
    return bool(
        inside._len_torch_function_stack()  # noqa: SLF001
        or inside._len_torch_dispatch_stack()  # noqa: SLF001
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
    )
