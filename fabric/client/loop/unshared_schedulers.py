"""Finds learning rate schedulers, scalers and averaged models that are not in ``state=``, and refuses them.

The mistake has no effect while all replicas run from the start. But a joining replica's scheduler is at
another step, and its average lacks the steps before, so that it differs from the others. torch keeps no list
of these objects, so this module searches all living objects for them.
"""

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from fabric.client.loop.unshared_averages import kinds_of
from fabric.errors import ConfigError

# The choices for a scheduler or scaler that is not shared.
UNSHARED = ("refuse", "ignore")
# The search within an object of ``state=`` has a largest depth and a largest number of parts.
_DEPTH = 6
_PARTS = 10_000


class UnsharedWatch:
    """Raises ConfigError for a scheduler of ``optimizers``, or a scaler, that no object of ``state`` holds.

    ``ignored``: the user has said ``unshared="ignore"``.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], state: Mapping[str, Any], ignored: bool = False
    ) -> None:
        self._optimizers = list(optimizers)
        self._state = dict(state)
        self._ignored = ignored
        self._wrapped = self._count_wrapped()

    def check(self) -> None:
        """Search for schedulers, and for scalers that have scaled a loss already."""
        self._wrapped = self._count_wrapped()
        if self._ignored or self._refusal() is None:
            return
        gc.collect()  # a scheduler that was found may be garbage that is not collected yet
        refusal = self._refusal()
        if refusal is not None:
            raise refusal

    def _refusal(self) -> ConfigError | None:
        living = _living((LRScheduler, torch.amp.GradScaler, AveragedModel))
        inside = _parts_of(self._state.values())
        schedulers = [x for x in living if isinstance(x, LRScheduler) and self._steers(x)]
        within = {id(part) for x in schedulers for part in getattr(x, "_schedulers", ())}
        for scheduler in schedulers:
            if id(scheduler) not in within and id(scheduler) not in inside:
                kind = type(scheduler).__name__
                return _refusal(
                    f"{_article(kind)} steers the optimizer",
                    "another learning rate",
                    '"scheduler": scheduler',
                )
        for scaler in living:
            scales = isinstance(scaler, torch.amp.GradScaler) and getattr(scaler, "_scale", None) is not None
            if scales and id(scaler) not in inside:
                return _refusal("a GradScaler scales the loss", "another scale", '"scaler": scaler')
        for average in living:
            if isinstance(average, AveragedModel) and id(average) not in inside and self._averages(average):
                return _refusal("an AveragedModel averages the model", "another average", '"ema": ema_model')
        return None

    def _averages(self, average: AveragedModel) -> bool:
        """Whether ``average`` is one of a model whose parameters the optimizers hold."""
        held = [p for x in self._optimizers for group in x.param_groups for p in group["params"]]
        return sorted(x.shape for x in held) == sorted(x.shape for x in average.parameters())

    def check_when_changed(self) -> None:
        """As ``check``, but only if a scheduler has wrapped an optimizer's ``step`` since the last check."""
        if self._count_wrapped() != self._wrapped:
            self.check()

    def _count_wrapped(self) -> int:
        return sum(hasattr(x.step, "_wrapped_by_lr_sched") for x in self._optimizers)

    def _steers(self, scheduler: LRScheduler) -> bool:
        # A wrapper around an optimizer, such as Accelerate's, returns the inner optimizer's ``param_groups``.
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
        return groups is not None and any(groups is x.param_groups for x in self._optimizers)


def _living(kinds: tuple[type, ...]) -> list[Any]:
    """Return all living objects of these types. Reading an attribute of others could import a module."""
    types = {x for kind in kinds for x in kinds_of(kind)}
    return [x for x in gc.get_objects() if type(x) in types]


def _parts_of(values: Iterable[object]) -> set[int]:
    """Return the ids of these objects and of their parts, down to a few levels."""
    seen: set[int] = set()
    level = list(values)
    for _ in range(_DEPTH + 1):
        following: list[object] = []
        for value in level:
            if id(value) in seen or len(seen) > _PARTS:
                continue
            seen.add(id(value))
            following += _held_by(value)
        level = following
    return seen


def _held_by(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, torch.nn.Module):
        return list(value.modules())
    if isinstance(value, torch.optim.Optimizer | torch.Tensor):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"


def _refusal(what: str, differs: str, entry: str) -> ConfigError:
    return ConfigError(
        f"{what} and is not in state=, so a replica that joins would train with {differs}: make it before "
        f'attach and pass state={{{entry}}}, or say unshared="ignore" where that is intended'
    )
