"""Refuses an optimizer that is not attached: no other replica has what it changes, and no run would say so.

A second model that the script trains follows one replica's own data. A new optimizer of the attached model
is at its first step in a replica that joins, and goes on in the others.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fabric.errors import ConfigError

Optimizer = torch.optim.Optimizer

MORE_OPTIMIZERS = (
    "give attach all optimizers, and one module of all that they train, or say "
    'unshared="ignore" where that is intended'
)


class OptimizerWatch:
    """Looks at each optimizer that makes a step in this process. ``shared``: objects of the shared state.

    An optimizer whose parameters are not in the model may live for one step, as in the inner loop of
    meta-learning. ``advice`` ends the sentence.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], optimizers: Iterable[Optimizer], shared: Iterable[Any]
    ) -> None:
        self.advice = MORE_OPTIMIZERS
        self.step = -1  # the step whose gradient the loop has, or will have next
        self._parameters = {id(x) for x in parameters}
        self.attached = list(optimizers)
        self.attached += [x for x in _parts(shared) if isinstance(x, Optimizer)]
        self._own = {id(x) for x in self.attached}
        # Others, with the step of the job in which each made its first step here.
        self._known: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._hook: RemovableHandle | None = None

    def begin(self) -> None:
        """Look from now on."""
        self._hook = self._hook or register_optimizer_step_pre_hook(self._look)

    def end(self) -> None:
        """The training is over: do not look any more."""
        if self._hook is not None:
            self._hook.remove()

    def _look(self, optimizer: Optimizer, *_: Any) -> None:
        is_own = torch.compiler.is_compiling() or id(optimizer) in self._own
        if not is_own and not belongs(optimizer, self.attached):
            begun = self._known.setdefault(optimizer, self.step)
            self.refuse(optimizer, lasts=begun != self.step)

    def refuse(self, optimizer: Optimizer, lasts: bool) -> None:
        """Raise ConfigError for an optimizer that is not attached. ``lasts``: it makes steps in several steps
        of the job.
        """
        moved = [p for x in optimizer.param_groups for p in x["params"] if p.requires_grad]
        kind = type(optimizer).__name__
        if any(id(p) in self._parameters for p in moved):
            raise ConfigError(
                f"an optimizer {kind} changes parameters of the model and is not attached, so a replica that "
                f"joins would go on with another state of it: {self.advice}"
            )
        if moved and lasts:
            raise ConfigError(
                f"an optimizer {kind} changes parameters that are not in the attached model, so each replica "
                f"would train them by its own data: {self.advice}"
            )


def belongs(optimizer: Optimizer, attached: Sequence[Optimizer]) -> bool:
    """Return whether an optimizer is one of ``attached``, or wraps it, or is wrapped by it."""
    groups = {id(x) for x in getattr(optimizer, "param_groups", ())}
    inside = {id(x) for x in _parts([optimizer])}
    return any(
        id(x) in inside
        or any(id(y) in groups for y in getattr(x, "param_groups", ()))
        or any(y is optimizer for y in _parts([x]))
        for x in attached
    )


def _parts(values: Iterable[Any], depth: int = 2) -> Iterator[Any]:
    """Yield these objects, and what they hold in attributes, lists and dicts."""
    for value in values:
        yield value
        held: Iterable[Any] = ()
        if isinstance(value, list | tuple | dict):
            held = value.values() if isinstance(value, dict) else value
        elif not isinstance(value, torch.Tensor | torch.nn.Module | type):
            held = [x for name, x in getattr(value, "__dict__", {}).items() if name not in _OWN]
        if depth:
            yield from _parts(list(held), depth - 1)


_OWN = ("state", "param_groups", "defaults")  # of an optimizer: they are many, and hold no other optimizer
