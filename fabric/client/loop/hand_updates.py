"""Finds parameters that a script changes by hand, without an optimizer, before it has a session."""

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary


class HandUpdates:
    """The parameters of a process's backward passes, as they were at the newest of these passes.

    PyTorch calls hooks before an optimizer's update. It calls none before ``p.data.add_(p.grad, alpha=-lr)``.
    So such an update is found at the next backward pass.
    """

    def __init__(self) -> None:
        self._norms: MutableMapping[Any, float] = WeakIdKeyDictionary()  # parameter -> its norm

    def note(self, losses: torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Remember the parameters of a backward pass from ``losses``, which is about to run."""
        for parameter in _parameters_of([losses] if isinstance(losses, torch.Tensor) else losses):
            self._norms[parameter] = _norm(parameter)

    def have_begun(self) -> bool:
        """Whether a parameter has changed since ``note``."""
        return any(_norm(parameter) != norm for parameter, norm in self._norms.items())


def _norm(parameter: Any) -> float:
    values = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    exact = torch.complex128 if values.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(values.detach(), dtype=exact).abs())


def _parameters_of(losses: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The tensors to whose ``.grad`` a backward pass from ``losses`` adds."""
    waiting = [x.grad_fn for x in losses if x.grad_fn is not None]
    seen = set[Any](waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield node.variable
        following = {x for x, _ in node.next_functions if x is not None} - seen
        seen |= following
        waiting += following
