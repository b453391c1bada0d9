"""Finds the tensors that forward changes although ``attach(..., buffers=)`` does not name them.

Each replica would change such a tensor differently, and the job would end in a dispute about the state. So
the values before and after the first forward passes are compared, before the step is committed. Buffers that
are not persistent are caches, which no state has, so they are not watched.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fabric.errors import ConfigError

_SAMPLED = 4096  # elements that are compared of a large tensor
_NAMED = 3  # tensors that a sentence names


@dataclass(frozen=True, slots=True)
class _Mark:
    """The remembered value of a tensor."""

    shape: torch.Size
    version: int
    sample: torch.Tensor
    is_whole: bool  # the sample has every element

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Mark":
        local: Any = tensor.detach()
        if hasattr(local, "to_local"):  # a part of a DTensor is gathered and dropped in forward
            local = local.to_local()
        flat = local.reshape(-1)
        apart = max(1, flat.numel() // _SAMPLED)
        has_version = not (hasattr(tensor, "to_local") or tensor.is_inference())
        version = tensor._version if has_version else 0  # noqa: SLF001
        return cls(tensor.shape, version, flat[::apart].clone(), apart == 1)

    def differs(self, other: "_Mark") -> bool:
        if self.shape != other.shape or self.sample.shape != other.sample.shape:
            return True
        written = self.version != other.version and not self.is_whole
        return written or not torch.equal(_bits(self.sample), _bits(other.sample))


class BufferWatch:
    """Watches the persistent buffers and the frozen parameters of ``model``, except those in ``named``.

    Forward may change a tensor from some step on. So the steps 1, 2, 4, 8 and so on of this process count.
    """

    def __init__(self, model: torch.nn.Module, named: Collection[str]) -> None:
        self._model, self._named = model, frozenset(named)
        self._marks: dict[str, _Mark] = {}
        self._trainable: list[tuple[int, int]] = []
        self._checked = 0
        self.begin()

    def begin(self) -> None:
        """Remember the values before a forward."""
        following = self._checked + 1
        self._marks.clear()
        if following & (following - 1) == 0:
            self._remember()

    @torch.no_grad()
    def _remember(self) -> None:
        self._marks = {name: _Mark.of(tensor) for name, tensor in self._watched()}
        self._trainable = self._versions()

    def check(self) -> None:
        """Raise ConfigError if a tensor has changed since ``begin``, except where the user loaded a state."""
        if self._marks and self._trainable != self._versions():
            return
        self._checked += 1
        marks, self._marks = self._marks, {}
        if marks:
            self._compare(marks)

    @torch.no_grad()
    def _compare(self, marks: dict[str, _Mark]) -> None:
        changed = [
            name
            for name, tensor in self._watched()
            if name in marks and marks[name].differs(_Mark.of(tensor))
        ]
        if changed:
            first = changed[0]
            more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
            raise ConfigError(
                f"forward has changed {', '.join(map(repr, changed[:_NAMED]))}{more}, and each replica would "
                f'change them differently: choose for each, as buffers={{"{first}": "first"}} ("first" takes '
                'the values of one replica, for queues and codebooks; "average" averages running means; '
                '"ignore" keeps the values on each replica)'
            )

    def _watched(self) -> Iterator[tuple[str, torch.Tensor]]:
        for place, module in self._model.named_modules():
            kept = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}  # noqa: SLF001
            frozen = {k: p for k, p in module._parameters.items() if p is not None and not p.requires_grad}  # noqa: SLF001
            for key, tensor in {**kept, **frozen}.items():
                name = f"{place}.{key}" if place else key
                if tensor is not None and name not in self._named and _is_plain(tensor):
                    yield name, tensor

    def _versions(self) -> list[tuple[int, int]]:
        trainable = [p for p in self._model.parameters() if p.requires_grad]
        return [(p.data_ptr(), p._version) for p in trainable if not hasattr(p, "to_local")]  # noqa: SLF001


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
