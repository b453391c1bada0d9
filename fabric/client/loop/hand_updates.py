"""Finds parameters that a script changes by hand, without an optimizer, before it has a session."""

import contextlib
import math
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary


class HandUpdates:
    """The parameters of a process's backward passes, as they were at the newest of these passes.

    PyTorch calls hooks before an optimizer's update. It calls none before ``p.data.add_(p.grad, alpha=-lr)``.
    So such an update is found at the next backward pass. Values that cannot be read say nothing.
    """

    def __init__(self) -> None:
        self._norms: MutableMapping[Any, float] = WeakIdKeyDictionary()  # parameter -> its norm

    def note(self, losses: object) -> None:
        """Remember the parameters of a backward pass. ``losses``: what torch.autograd.backward gets."""
        for parameter in _parameters_of(losses):
            self._norms[parameter] = _norm(parameter)

    def have_begun(self) -> bool:
        """Whether a parameter has changed since ``note``."""
        norms = [(_norm(parameter), norm) for parameter, norm in self._norms.items()]
        return any(now != before for now, before in norms if not math.isnan(now) and not math.isnan(before))


def _norm(parameter: Any) -> float:
    """The norm of a parameter's values here, NaN where they cannot be read."""
    # FSDP frees the memory of its whole parameters between two uses. A CUDA graph's capture allows no read.
    with contextlib.suppress(RuntimeError, TypeError):
        values = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        captures = values.is_cuda and torch.cuda.is_current_stream_capturing()
        if values.untyped_storage().size() and not captures:
            exact = torch.complex128 if values.is_complex() else torch.float64
            return float(torch.linalg.vector_norm(values.detach(), dtype=exact).abs())
    return math.nan


def _parameters_of(losses: object) -> Iterator[Any]:
    """The tensors to whose ``.grad`` a backward pass from ``losses`` adds."""
    given = [losses] if isinstance(losses, torch.Tensor) else losses if isinstance(losses, Sequence) else []
    waiting = [x.grad_fn for x in given if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    seen = set[Any](waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield node.variable
        following = {x for x, _ in node.next_functions if x is not None} - seen
        seen |= following
        waiting += following
