"""The model of a loop that only counts: a call with inputs of shapes seen before returns the outputs of then.

The loop's own code between forward and backward thus runs as ever, and costs next to nothing.
"""

import sys
from collections.abc import Callable
from typing import Any, TextIO

import torch
from torch.utils._pytree import tree_leaves, tree_map


class RepeatedOutputs:
    """Between ``open`` and ``close`` the model's calls are answered from memory, and prints are dropped."""

    def __init__(self) -> None:
        self._undo: Callable[[], None] | None = None
        self._stdout: TextIO | None = None

    def open(self, model: torch.nn.Module) -> None:
        """Answer the calls of ``model``."""
        if self._undo is not None:
            return
        kind, outputs = type(model), dict[object, Any]()
        own, call = "__call__" in vars(kind), kind.__call__

        def repeat(module: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
            if module is not model:
                return call(module, *arguments, **named)
            key = _shapes((arguments, named, model.training, torch.is_grad_enabled()))
            if key not in outputs:
                outputs[key] = _without_changes(model, lambda: call(module, *arguments, **named))
            return tree_map(_as_new, outputs[key])

        def undo() -> None:
            if own:
                kind.__call__ = call  # type: ignore[method-assign]
            else:
                del kind.__call__

        kind.__call__ = repeat  # type: ignore[method-assign]
        self._undo = undo
        self._stdout, sys.stdout = sys.stdout, _Nowhere(sys.stdout)

    def close(self) -> None:
        """Let the model compute again."""
        if self._undo is not None:
            self._undo()
            assert self._stdout is not None
            sys.stdout, self._undo = self._stdout, None


class _Nowhere:
    """A standard output that drops what is printed. A loop that only counts prints figures of no step."""

    def __init__(self, behind: TextIO) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)

    def write(self, text: str) -> int:
        """Drop ``text``."""
        return len(text)


def _shapes(value: Any) -> object:
    return tuple(
        (x.shape, x.dtype, x.device) if torch.is_tensor(x) else (type(x), x if _is_plain(x) else None)
        for x in tree_leaves(value)
    )


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | str)


def _without_changes(model: torch.nn.Module, forward: Callable[[], Any]) -> Any:
    """Return the outputs without their graph; the model's buffers stay as they were."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    outputs = tree_map(lambda x: x.detach() if torch.is_tensor(x) else x, forward())
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)
    return outputs


def _as_new(value: Any) -> Any:
    """Return a tensor of its own, with which a loss can be made and, as far as the loop sees, derived."""
    if not torch.is_tensor(value):
        return value
    fresh = value.clone()
    return fresh.requires_grad_() if fresh.is_floating_point() and torch.is_grad_enabled() else fresh
