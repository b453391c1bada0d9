"""The places of PyTorch at which an adopted script is noticed, while it runs.

Each replacement calls the original but where the loop only counts, see ``adopted_loop.py``.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from fabric.integrations.adopt.saved_files import SavedFiles

if TYPE_CHECKING:
    from fabric.integrations.adopt.adopted_loop import AdoptedLoop

Call = Callable[..., Any]


@contextlib.contextmanager
def patched(loop: "AdoptedLoop", job: str) -> Iterator[None]:
    """Within this context ``loop`` notices what the script does."""
    files = SavedFiles(loop, job)
    scaler = torch.amp.GradScaler
    with contextlib.ExitStack() as stack:
        for owner, name, replace in (
            (torch.autograd, "backward", _backward),
            (torch.nn.utils, "clip_grad_norm_", _clip_norm),
            (clip_grad, "clip_grad_norm_", _clip_norm),
            (torch.nn.utils, "clip_grad_value_", _clip_value),
            (clip_grad, "clip_grad_value_", _clip_value),
            (scaler, "unscale_", _unscale),
            (scaler, "step", _scaler_step),
            (scaler, "update", _scaler_update),
            (DataLoader, "__iter__", _iterate),
            (DataLoader, "__len__", _length),
            (torch, "save", lambda _, original: functools.partial(files.save, original)),
            (torch, "load", lambda _, original: functools.partial(files.load, original)),
        ):
            original = getattr(owner, name)
            setattr(owner, name, replace(loop, original))
            stack.callback(setattr, owner, name, original)
        before = register_optimizer_step_pre_hook(functools.partial(_before_step, loop))
        stack.callback(before.remove)
        after = register_optimizer_step_post_hook(lambda *_: loop.after_update())
        stack.callback(after.remove)
        yield


def _backward(loop: "AdoptedLoop", original: Call) -> Call:
    @functools.wraps(original)
    def backward(*arguments: Any, **named: Any) -> None:
        loop.on_backward()
        if loop.computes:
            original(*arguments, **named)
        loop.after_backward()

    return backward


def _clip_norm(loop: "AdoptedLoop", original: Call) -> Call:
    @functools.wraps(original)
    def clip_grad_norm_(parameters: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        loop.on_gradient_use()
        norm = original(parameters, *arguments, **named)
        assert isinstance(norm, torch.Tensor)
        return norm

    return clip_grad_norm_


def _clip_value(loop: "AdoptedLoop", original: Call) -> Call:
    @functools.wraps(original)
    def clip_grad_value_(parameters: Any, *arguments: Any, **named: Any) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        loop.on_gradient_use()
        original(parameters, *arguments, **named)

    return clip_grad_value_


def _unscale(loop: "AdoptedLoop", original: Call) -> Call:
    @functools.wraps(original)
    def unscale_(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        loop.on_gradient_use()
        if loop.updates:
            original(scaler, optimizer)

    return unscale_


def _scaler_step(loop: "AdoptedLoop", original: Call) -> Call:
    @functools.wraps(original)
    def step(scaler: torch.amp.GradScaler, optimizer: Any, *arguments: Any, **named: Any) -> float | None:
        if not scaler.is_enabled():
            result: float | None = original(scaler, optimizer, *arguments, **named)
            return result
        loop.on_gradient_use()
        result = original(scaler, optimizer, *arguments, **named) if loop.updates else None
        loop.after_update()  # where a gradient is not finite, the optimizer's own step is not called
        return result

    return step


def _scaler_update(loop: "AdoptedLoop", original: Call) -> Call:
    @functools.wraps(original)
    def update(scaler: torch.amp.GradScaler, *arguments: Any, **named: Any) -> None:
        if loop.updates:
            original(scaler, *arguments, **named)

    return update


def _before_step(loop: "AdoptedLoop", optimizer: Any, arguments: Any, named: Any) -> None:
    closure = arguments[1] if len(arguments) > 1 else named.get("closure")  # the optimizer comes first
    if not loop.on_update(optimizer, closure):
        # The optimizers change no parameter without a gradient.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


# Python binds functions of a class to the instance, but not methods of another object.
def _iterate(loop: "AdoptedLoop", _: Call) -> Call:
    return lambda loader, data=loop.data: data.iterate(loader)


def _length(loop: "AdoptedLoop", _: Call) -> Call:
    return lambda loader, data=loop.data: data.length(loader)
