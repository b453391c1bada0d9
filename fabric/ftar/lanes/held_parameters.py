"""Which part of each parameter lies in this process, and where those parts lie in a flat gradient."""

import math
from collections.abc import Iterable, Sequence

import torch

from fabric.errors import ConfigError
from fabric.ftar.buckets import BUCKET_BYTES, lay_out
from fabric.protocol.rules.lanes import HeldParameter
from fabric.protocol.rules.tensor_region import TensorRegion


def held_parameters(
    parameters: Iterable[tuple[str, torch.Tensor]],
) -> tuple[HeldParameter, ...]:
    """Return the parts of ``parameters`` in this process, in the same order.

    Raises ConfigError for a placement whose local tensor is not a part of the parameter.
    """
    return tuple(_held(name, parameter) for name, parameter in parameters)


def _held(name: str, parameter: torch.Tensor) -> HeldParameter:
    dtype, shape = str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape)
    if not hasattr(parameter, "device_mesh"):
        return HeldParameter(name, dtype, shape, TensorRegion.whole(shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = parameter.placements  # type: ignore[attr-defined]
    if any(p.is_partial() for p in placements):
        raise ConfigError(f"{name} is a partial sum at each rank: shard or replicate every parameter")
    sizes, begin = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, placements)
    if math.prod(sizes) == 0:
        begin = (0,) * len(shape)
    return HeldParameter(name, dtype, shape, TensorRegion(tuple(map(int, begin)), tuple(map(int, sizes))))


def dtype_of(held: HeldParameter) -> torch.dtype:
    """Return the type of its elements. Raises ConfigError where torch does not have it."""
    dtype = getattr(torch, held.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"{held.name} is of {held.dtype[:40]!r}: run the same release of torch on all ranks"
        )
    return dtype


class FlatPlaces:
    """Views of a flat gradient in which a rank that holds ``row`` keeps its parts, as ``FlatGradients``."""

    def __init__(self, row: Sequence[HeldParameter]) -> None:
        self._held = {held.name: held for held in row}
        self._begins: dict[str, int] = {}
        self.presence_begins: dict[str, int] = {}  # the byte at which each parameter's presence begins
        self.nbytes = 0
        for bucket in lay_out([(held.name, _without_data(held)) for held in row[::-1]], BUCKET_BYTES, {}):
            at, itemsize = bucket.begin, bucket.dtype.itemsize
            for name, parameter in bucket.parameters:
                self._begins[name] = at
                at += parameter.numel() * itemsize
            for name, _ in bucket.parameters:
                self.presence_begins[name] = at
                at += itemsize
            self.nbytes = bucket.end

    def regions(self) -> Iterable[HeldParameter]:
        """The parts that have elements."""
        return (held for held in self._held.values() if held.region.elements)

    def view(self, flat: torch.Tensor, name: str, region: TensorRegion) -> torch.Tensor:
        """Return, as a view of ``flat``, the ``region`` of parameter ``name``, which this rank holds."""
        held, begin = self._held[name], self._begins[name]
        dtype = dtype_of(held)
        part = flat[begin : begin + held.region.elements * dtype.itemsize].view(dtype)
        return part.view(held.region.sizes)[region.within(held.region)]

    def presence(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """Return, as a view of ``flat``, the bytes that tell whether parameter ``name`` has a gradient."""
        begin = self.presence_begins[name]
        return flat[begin : begin + dtype_of(self._held[name]).itemsize]


def _without_data(held: HeldParameter) -> torch.nn.Parameter:
    part = torch.empty(held.region.sizes, dtype=dtype_of(held), device="meta")
    return torch.nn.Parameter(part, requires_grad=False)
