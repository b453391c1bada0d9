"""The operations on elements: sum, mean by weight, min, max. All planes use the same arithmetic.

A reduction is a left fold: ``combine`` is called once for every member but the first, in ring order, and the
last call finishes. Elements of 16 bits are folded in float32 and rounded to nearest even once, at the end. So
a partial sum of several members travels as float32, called *wide*. Integers wrap around, and have no mean. If
any member's element is NaN, the result is NaN.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fabric.errors import ConfigError
from fabric.ftar.ring_schedule import DTYPE_CODES

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
# torch converts larger blocks on its thread pool, which the trainer's step needs. A block of this size stays
# in the nearest caches between its conversion, addition and rounding.
_BLOCK = 16 * 1024
# Block size of a fold over several members' memory: the partial result stays in the second-level cache.
_FOLD_BYTES = 256 * 1024

Array = np.ndarray[Any, Any]

# The number of each operation on the wire. New operations may be added, but a number is never reused.
OPERATION_CODES = {"sum": 0, "mean": 1, "min": 2, "max": 3}
_KERNELS: dict[str, Any] = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}


@dataclass(frozen=True, slots=True)
class Reduction:
    """One of ``sum``, ``mean``, ``min``, ``max``; ``mean`` is the sum divided by ``weight``.

    Members multiply by their own weights before they reduce. ``weight`` is the total weight, which must be
    equal on all members: no check compares it. Raises ConfigError for any other operation.
    """

    operation: str = "sum"
    weight: float = 1.0

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

    def check(self, dtype: torch.dtype) -> None:
        """Raise ConfigError if this operation cannot reduce elements of ``dtype``."""
        if self.operation == "mean" and not dtype.is_floating_point:
            raise ConfigError(f"elements of {dtype} have no mean: sum them, and divide the sum")

    def is_wide(self, dtype: torch.dtype) -> bool:
        """Whether a partial result of several members is float32 although ``dtype`` is smaller."""
        return dtype in _SIXTEEN_BITS and self.operation in ("sum", "mean")

    def fold(self, parts: Sequence[torch.Tensor], own: torch.Tensor, out: torch.Tensor, last: bool) -> None:
        """``out = ((parts[0] (+) parts[1]) (+) ...) (+) own``, and finished where ``last``: see ``combine``.

        Intermediate results stay in the processor's caches. The first part may be a wide partial result.
        """
        if len(parts) == 1:
            self.combine(parts[0], own, out, last)
            return
        if own.dtype in _SIXTEEN_BITS:
            for low in range(0, own.numel(), _BLOCK):
                block = slice(low, low + _BLOCK)
                first, *others = (part[block].float() for part in parts)
                # Never write to ``first``: a float32 ``first`` lies in another member's memory.
                total = first.clone().numpy()
                with np.errstate(all="ignore"):
                    for other in others:
                        _KERNELS[self.operation](total, other.numpy(), out=total)
                self.combine(torch.from_numpy(total), own[block], out[block], last)
            return
        self._fold_blocks([*(part.numpy() for part in parts), own.numpy()], out.numpy(), last)

    def _fold_blocks(self, parts: list[Array], out: Array, last: bool) -> None:
        kernel = _KERNELS[self.operation]
        step = _FOLD_BYTES // out.itemsize
        # Use the result's memory for partial results, unless it holds this member's own elements.
        buffer = (
            np.empty(min(step, len(out)), out.dtype) if out.ctypes.data == parts[-1].ctypes.data else None
        )
        with np.errstate(all="ignore"):
            for low in range(0, len(out), step):
                target = out[low : low + step]
                total = target if buffer is None else buffer[: len(target)]
                kernel(parts[0][low : low + step], parts[1][low : low + step], out=total)
                for part in parts[2:-1]:
                    kernel(total, part[low : low + step], out=total)
                kernel(total, parts[-1][low : low + step], out=target)
                if last and self.operation == "mean":
                    np.divide(target, target.dtype.type(self.weight), out=target)

    def combine(self, received: torch.Tensor, own: torch.Tensor, out: torch.Tensor, last: bool) -> None:
        """``out = received (+) own``, and finished (divided, rounded) where ``last``.

        All are 1-D CPU tensors of one length; ``out`` may be ``own`` or ``received``. Types are those of the
        elements, or float32 for a wide partial result.
        """
        if own.dtype in _SIXTEEN_BITS:
            self._combine_blocks(received, own, out, last)
            return
        # numpy computes on this thread: torch would wake a thread pool that the trainer's step needs.
        target = out.numpy()
        with np.errstate(all="ignore"):
            _KERNELS[self.operation](received.numpy(), own.numpy(), out=target)
            if last and self.operation == "mean":
                np.divide(target, target.dtype.type(self.weight), out=target)

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

    def _combine_blocks(
        self, received: torch.Tensor, own: torch.Tensor, out: torch.Tensor, last: bool
    ) -> None:
        kernel = _KERNELS[self.operation]
        with np.errstate(all="ignore"):
            for low in range(0, own.numel(), _BLOCK):
                block = slice(low, low + _BLOCK)
                total, other = received[block].float(), own[block].float()
                # Never write to a received block that came as float32: it lies in another member's memory.
                kernel(total.numpy(), other.numpy(), out=other.numpy())
                if last and self.operation == "mean":
                    np.divide(other.numpy(), np.float32(self.weight), out=other.numpy())
                out[block].copy_(other)


SUM = Reduction("sum")
MIN = Reduction("min")
MAX = Reduction("max")


def mean(weight: float) -> Reduction:
    """Return the sum divided by the total ``weight``."""
    return Reduction("mean", weight)


def check_tensors(
    source: torch.Tensor,
    result: torch.Tensor,
    reduction: Reduction,
    retain_gradients: bool,
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
    overlap = source.numel() > 0 and distance < source.numel() * source.element_size()
    if overlap and (retain_gradients or distance):
        raise ConfigError(
            "the result would overwrite the gradient: give it memory of its own, or the gradient itself with "
            "retain_gradients=False"
        )
