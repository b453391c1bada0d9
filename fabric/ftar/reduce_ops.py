"""The operations on elements: sum, mean by weight, min, max. All planes use the same arithmetic.

A reduction is a left fold over the members in ring order; on the host ``piece_moves`` computes it. Elements
of 16 bits are folded in float32 and rounded to nearest even once, at the end. So a partial sum of several
members travels as float32, called *wide*. Integers wrap around, and have no mean. If any member's element is
NaN, the result is NaN.

Over a link of bytes float32 elements of a sum may travel in a *form* of fewer bytes (piece_moves.c): see
``Reduction.exchange``. Each sum is added in float32. The result is rounded to the form once, by the member
that computed it, on every kind of link. A rounded number is exact in the form, so all members get its bits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fabric.errors import ConfigError
from fabric.ftar.ring_schedule import DTYPE_CODES

_torch: Any = torch  # torch declares no type for the address of memory that is only read
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
# torch converts larger blocks on its thread pool, which the trainer's step needs. A block of this size stays
# in the nearest caches between its conversion, addition and rounding.
_BLOCK = 16 * 1024

# The number of each operation on the wire. New operations may be added, but a number is never reused.
OPERATION_CODES = {"sum": 0, "mean": 1, "min": 2, "max": 3}
# The number of each form on the wire, 0 for elements as they are. "int8": blocks of int8 with their scales.
EXCHANGE_FORMS = {"float32": 0, "bfloat16": DTYPE_CODES[torch.bfloat16], "int8": 7}


@dataclass(frozen=True, slots=True)
class Reduction:
    """One of ``sum``, ``mean``, ``min``, ``max``; ``mean`` is the sum divided by ``weight``.

    Members multiply by their own weights before they reduce. ``weight`` is the total weight, which must be
    equal on all members: no check compares it. ``exchange``: the form in which the first ``coarse`` elements
    travel, if they are float32 and summed. The other elements are exact. Raises ConfigError for any other
    operation.
    """

    operation: str = "sum"
    weight: float = 1.0
    exchange: str = "float32"
    coarse: int = 0

    def __post_init__(self) -> None:
        if self.operation not in OPERATION_CODES:
            raise ConfigError(
                f'"{self.operation}" is no reduction: choose one of {", ".join(OPERATION_CODES)}'
            )
        if self.operation == "mean" and not (self.weight > 0 and math.isfinite(self.weight)):
            raise ConfigError(
                f"a mean by the total weight {self.weight!r} is not possible: give a positive one"
            )

    @property
    def code(self) -> int:
        """The operation's number on the wire."""
        return OPERATION_CODES[self.operation]

    def form(self, dtype: torch.dtype) -> int:
        """The number of the form of the ``coarse`` elements; 0: they travel as they are."""
        sums = dtype == torch.float32 and self.operation in ("sum", "mean")
        return EXCHANGE_FORMS[self.exchange] if sums and self.coarse else 0

    def check(self, dtype: torch.dtype) -> None:
        """Raise ConfigError if this operation cannot reduce elements of ``dtype``."""
        if self.operation == "mean" and not dtype.is_floating_point:
            raise ConfigError(f"elements of {dtype} have no mean: sum them, and divide the sum")

    def is_wide(self, dtype: torch.dtype) -> bool:
        """Whether a partial result of several members is float32 although ``dtype`` is smaller."""
        return dtype in _SIXTEEN_BITS and self.operation in ("sum", "mean")

    def alone(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Reduce over one member."""
        with np.errstate(all="ignore"):
            if self.operation != "mean":
                if result.data_ptr() != source.data_ptr():
                    result.copy_(source)
            elif source.dtype in _SIXTEEN_BITS:
                for low in range(0, source.numel(), _BLOCK):
                    block = slice(low, low + _BLOCK)
                    result[block] = source[block].float() / self.weight
            else:
                np.divide(source.numpy(), result.numpy().dtype.type(self.weight), out=result.numpy())


SUM = Reduction("sum")


@torch.no_grad()
def put_together(parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """Copy ``parts`` one after the other to where they belong in ``into``, unless they lie there."""
    begin = 0
    for part in parts:
        place = into[begin : begin + part.numel()].view(part.shape)
        if part.device != place.device or address_of(part) != address_of(place):
            place.copy_(part)
        begin += part.numel()


def address_of(tensor: torch.Tensor) -> int:
    """Return where ``tensor`` lies, to read it: ``data_ptr`` would ask to write, and end lazy copies."""
    memory: int = _torch._C._data_address(tensor)  # noqa: SLF001  (of the storage)
    return memory + int(tensor.storage_offset()) * tensor.element_size()


def check_tensors(
    source: torch.Tensor,
    result: torch.Tensor,
    reduction: Reduction,
    is_here: Callable[[torch.Tensor], bool],
    where: str,
) -> None:
    """Raise ConfigError if the gradient ``source`` cannot be reduced into ``result``.

    ``is_here`` returns whether the plane can use a tensor's memory; ``where`` names that kind of memory.
    """
    for tensor in (source, result):
        if tensor.dtype not in DTYPE_CODES:
            raise ConfigError(
                f"a tensor of {tensor.dtype} cannot be reduced: use one of "
                + ", ".join(str(d).removeprefix("torch.") for d in DTYPE_CODES)
            )
        if tensor.dim() != 1 or not tensor.is_contiguous() or not is_here(tensor):
            raise ConfigError(
                f"this data plane reduces flat contiguous tensors {where}, not shape "
                f"{tuple(tensor.shape)} on {tensor.device}: copy it into one first"
            )
    reduction.check(source.dtype)
    if result.dtype != source.dtype or result.numel() != source.numel():
        raise ConfigError(
            f"the result has {result.numel()} elements of {result.dtype}, the gradient {source.numel()} of "
            f"{source.dtype}: they must agree"
        )
    distance = abs(result.data_ptr() - source.data_ptr())
    if 0 < distance < source.numel() * source.element_size():
        raise ConfigError("the result lies in a part of the gradient: give it memory of its own")
