"""Finds averages of the model that the training keeps by hand outside the shared state, and refuses them.

``ema = [p.clone() for p in model.parameters()]`` followed by ``ema.lerp_(p, 0.01)`` after each step is right
while a replica runs from the start. A replica that joins begins another average, and may write its file. So
two looks search all living objects for a copy of the model: tensors of the shapes of all its trainable
parameters, in one dict, list, tuple or module. A copy is an average if it is near the parameters, moves from
look to look, and equals neither shared state nor the parameters of an earlier look.
"""

import gc
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fabric.errors import ConfigError

# Looks come in pairs: the first steps may have a learning rate of zero, and an average may begin late.
_FIRST_LOOKS = (3, 30, 300, 3000, 30_000)
# Each tensor is known by at most so many of its elements, evenly spread.
_SAMPLE = 64
# A copy whose distance from the parameters is above this part of their norm is none.
_NEAR = 0.5
# Fewer elements than this in all parameters are near other values by chance.
_FEWEST = 16
_HOLDERS = (list, tuple, dict, OrderedDict)
ADVICE = 'pass it in state=, or say unshared="ignore" where that is intended'

_Sample = tuple[float, ...]
_Found = list[tuple[str, list[_Sample]]]


class AverageWatch:
    """Looks at its steps; raises ConfigError for an average of ``parameters`` that is not in ``shared``.

    ``shared``: the objects of the shared state. ``advice`` ends the sentence.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        shared: Iterable[Any],
        ignored: bool = False,
    ) -> None:
        self.advice = ADVICE
        self._parameters = parameters
        self._shared = shared
        self._step, self._steps = -1, 0  # the newest step, and the number of steps of this process
        self._known: set[_Sample] = set()  # samples of the parameters, and of copies, at earlier looks
        self._ignored = ignored or sum(x.numel() for x in parameters) < _FEWEST

    def look(self, step: int) -> None:
        """Look, where ``step`` is the first or second of a pair of looks. Call it before each update."""
        if self._ignored or step == self._step:
            return
        self._step, self._steps = step, self._steps + 1
        if self._steps in _FIRST_LOOKS:
            self._known = set(map(_sample, self._parameters))
            self._known.update(x for _, copy in self._copies() for x in copy)
        elif self._steps - 1 in _FIRST_LOOKS:
            for what, copy in self._copies():
                if not self._known.issuperset(copy):
                    raise ConfigError(
                        f"the training keeps an average of the model in {what}, and a replica that joins "
                        f"would go on with another average: {self.advice}"
                    )
            self._known = set()

    def _copies(self) -> _Found:
        """Return the copies near the parameters that are no shared state, each with what holds it."""
        own = [_sample(x) for x in self._parameters]
        norm = sum(x * x for sample in own for x in sample) ** 0.5
        found: _Found = []
        shared: set[_Sample] | None = None
        for what, tensors in self._candidates():
            copy = [_sample(x) for x in tensors]
            pairs = zip(itertools.chain(*own), itertools.chain(*copy), strict=True)
            apart = sum((a - b) ** 2 for a, b in pairs) ** 0.5
            if 0 < apart <= _NEAR * norm:
                if shared is None:
                    states = [x.state_dict() for x in self._shared]
                    shared = {_sample(x) for x in tensors_in(states)}
                if not shared.issuperset(copy):
                    found.append((what, copy))
        return found

    def _candidates(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Yield what holds tensors of the parameters' shapes in their order, and these tensors."""
        attached = {id(x) for x in self._parameters}
        shapes = [x.shape for x in self._parameters]
        kinds = kinds_of(torch.Tensor)
        for holder in gc.get_objects():
            kind = type(holder)
            if kind in _HOLDERS and len(shapes) <= len(holder) <= 4 * len(shapes) + 64:
                values: Iterable[Any] = holder if kind in (list, tuple) else list(holder.values())
                what = f"a {kind.__name__} of {len(holder)} values"
            elif torch.nn.Module in kind.__mro__ and "_parameters" in holder.__dict__:
                values, what = holder.parameters(), f"a module {kind.__name__}"
            else:
                continue
            free = (x for x in values if type(x) in kinds and x.is_floating_point() and id(x) not in attached)
            matched = _in_order(free, shapes)
            if matched:
                yield what, matched


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value`` and its mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


def kinds_of(kind: type) -> set[type]:
    """Return a class and all classes that derive from it."""
    return {kind}.union(*map(kinds_of, kind.__subclasses__()))


def _in_order(tensors: Iterable[torch.Tensor], shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Return tensors of these shapes in this order, or an empty list where some shape has none."""
    matched: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.shape == shapes[len(matched)]:
            matched.append(tensor)
            if len(matched) == len(shapes):
                return matched
    return []


def _sample(tensor: torch.Tensor) -> _Sample:
    """Return some elements of this rank's part of a tensor."""
    local = tensor.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    flat = local.reshape(-1)
    return tuple(flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE].float().tolist())
