"""Between a model's gradients and one flat buffer: gather before the round, scatter after the commit.

The buffer is bytes. Parameters of one dtype lie together in a *lane*, in the order in which they were given,
without gaps; lanes start at multiples of ALIGNMENT_BYTES, and the gaps between them are zero, so that the
digest of the buffer is a digest of the gradients. Each lane is one all-reduce. The layout hash covers names,
shapes, dtypes and order: members whose hashes differ must not sum.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import xxhash

from fabric.errors import ConfigError, StateError
from fabric.ftar.reduce import DTYPE_CODES

ALIGNMENT_BYTES = 64

NamedParameter = tuple[str, torch.nn.Parameter]


@dataclass(frozen=True, slots=True)
class _Lane:
    """Bytes [begin, end) of the buffer hold ``dtype``; ``parameters`` lie there in this order."""

    dtype: torch.dtype
    begin: int
    end: int
    parameters: tuple[NamedParameter, ...]

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.begin : self.end].view(self.dtype)


class FlatGradients:
    """The gradients of ``parameters`` (name and parameter, those that require grad) as flat bytes.

    ``nbytes`` is what a buffer needs: 1-D uint8 in host memory, its address aligned to 8 bytes.
    Raises ConfigError for a repeated name or a gradient type that cannot be reduced.
    """

    def __init__(self, parameters: Iterable[NamedParameter]) -> None:
        self.parameters: tuple[NamedParameter, ...] = tuple(
            (name, p) for name, p in parameters if p.requires_grad
        )
        _check_parameters(self.parameters)
        self.layout = layout_hash(self.parameters)
        self._lanes = _lanes(self.parameters)
        self.nbytes = self._lanes[-1].end if self._lanes else 0

    def lanes(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Typed 1-D views of ``buffer``, one per dtype, to be reduced in this order."""
        self._check_buffer(buffer)
        return [lane.view(buffer) for lane in self._lanes]

    @torch.no_grad()
    def gather(self, into: torch.Tensor) -> None:
        """Copy every ``.grad`` into the buffer, zeros where there is none, zeros in the gaps.

        Raises ConfigError for a gradient whose form cannot be summed; the gradients are untouched.
        """
        self._check_buffer(into)
        for name, parameter in self.parameters:
            _check_gradient(name, parameter)
        end = 0
        for lane in self._lanes:
            into[end : lane.begin].zero_()
            end = lane.end
            for view, parameter in _views(lane, into):
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad)

    @torch.no_grad()
    def scatter(self, buffer: torch.Tensor, weight: float) -> None:
        """Write ``buffer / weight`` into every ``.grad``, which is created where there is none.

        Raises StateError for a weight that nothing can be divided by; nothing is written then.
        """
        self._check_buffer(buffer)
        if not (weight > 0 and math.isfinite(weight)):
            raise StateError(
                f"the gradients of this step have the total weight {weight!r}, so there is no "
                "average: give step.backward a positive finite weight"
            )
        for lane in self._lanes:
            for view, parameter in _views(lane, buffer):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                if parameter.grad.device.type == "cpu":
                    torch.div(view, weight, out=parameter.grad)
                else:
                    parameter.grad.copy_(view)
                    parameter.grad.div_(weight)

    def _check_buffer(self, buffer: torch.Tensor) -> None:
        if buffer.dtype != torch.uint8 or buffer.shape != (self.nbytes,):
            raise StateError(
                f"these gradients need a flat buffer of {self.nbytes} bytes, not "
                f"{tuple(buffer.shape)} of {buffer.dtype}"
            )


def layout_hash(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """xxh3_64 in hex of the canonical JSON ``[[name, shape, dtype], ...]``, in the order given."""
    rows = [[name, list(p.shape), str(p.dtype).removeprefix("torch.")] for name, p in parameters]
    text = json.dumps(rows, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def _lanes(parameters: tuple[NamedParameter, ...]) -> list[_Lane]:
    lanes: list[_Lane] = []
    end = 0
    for dtype in dict.fromkeys(p.dtype for _, p in parameters):
        members = tuple(row for row in parameters if row[1].dtype == dtype)
        begin = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = begin + sum(p.numel() for _, p in members) * dtype.itemsize
        lanes.append(_Lane(dtype, begin, end, members))
    return lanes


def _views(lane: _Lane, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.nn.Parameter]]:
    flat = lane.view(buffer)
    views: list[tuple[torch.Tensor, torch.nn.Parameter]] = []
    start = 0
    for _, parameter in lane.parameters:
        stop = start + parameter.numel()
        views.append((flat[start:stop].view(parameter.shape), parameter))
        start = stop
    return views


def _check_parameters(parameters: tuple[NamedParameter, ...]) -> None:
    names: set[str] = set()
    for name, parameter in parameters:
        if name in names:
            raise ConfigError(f"two parameters are named {name!r}: give every one its own name")
        names.add(name)
        if parameter.dtype not in DTYPE_CODES:
            raise ConfigError(
                f"the gradient of {name} is of {parameter.dtype}, which cannot be summed over "
                "replicas: use a floating type of 16, 32 or 64 bits, or freeze it"
            )


def _check_gradient(name: str, parameter: torch.nn.Parameter) -> None:
    gradient = parameter.grad
    if gradient is None:
        return
    if gradient.is_sparse or gradient.layout != torch.strided:
        raise ConfigError(
            f"the gradient of {name} is sparse, which cannot be summed over replicas: "
            "build the layer with sparse=False"
        )
    if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
        raise ConfigError(
            f"the gradient of {name} is {tuple(gradient.shape)} of {gradient.dtype}, the parameter "
            f"{tuple(parameter.shape)} of {parameter.dtype}: they must agree"
        )
