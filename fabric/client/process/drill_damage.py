"""The damage that a drill does inside a trainer: a flipped bit, a NaN, a clock that leaps."""

import time
from collections.abc import Callable

import torch

from fabric.ftar.buckets import Bucket
from fabric.runtime.drill_orders import CLOCK

LEAP_S = 3600.0
_HOST_CLOCKS = (time.time, time.time_ns)


def damage(action: str, data: object) -> str:
    """Flip a bit of a bucket's gradients or of a snapshot, or put a NaN there; return what was changed.

    Returns an empty string where there is nothing to change. Its stream is that of the caller.
    """
    if isinstance(data, memoryview):
        return _flip_byte(data.cast("B"))
    assert isinstance(data, Bucket)
    for name, gradient in data.local_gradients():
        if not gradient.numel():
            continue
        place = int(gradient.detach().abs().argmax())
        before = float(gradient.reshape(-1)[place])
        index = _index(gradient, place)
        with torch.no_grad():
            gradient[index] = torch.nan if action == "nan" else _flipped(gradient[index])
        return (
            f"element {place} of the gradient of {name} is {float(gradient[index]):g} instead of {before:g}"
        )
    return ""


class ClockLeap:
    """``time.time`` and ``time.time_ns`` of this process are LEAP_S ahead, from now to ``end``."""

    def __init__(self) -> None:
        seconds, nanoseconds = _HOST_CLOCKS
        self._set(lambda: seconds() + LEAP_S, lambda: nanoseconds() + int(LEAP_S * 1e9))

    def tell(self, report: Callable[..., None]) -> None:
        """Report the evidence."""
        report(hit=CLOCK, step=0, about=f"its clock is {LEAP_S:g} s ahead")

    def end(self) -> None:
        self._set(*_HOST_CLOCKS)

    @staticmethod
    def _set(seconds: Callable[[], float], nanoseconds: Callable[[], int]) -> None:
        time.time, time.time_ns = seconds, nanoseconds


def _flip_byte(data: memoryview) -> str:
    if not data.nbytes:
        return ""
    place = data.nbytes // 2
    data[place] ^= 1
    return f"bit 0 of byte {place} of {data.nbytes} is flipped"


def _flipped(value: torch.Tensor) -> torch.Tensor:
    """Return the value with a bit of its mantissa flipped, so that it stays finite."""
    raw = value.reshape(1).clone().view(torch.uint8)
    raw[max(0, value.element_size() - 2)] ^= 1
    return raw.view(value.dtype)[0]


def _index(tensor: torch.Tensor, place: int) -> tuple[int, ...]:
    """Return the index of an element that is number ``place`` in the order of its dimensions."""
    index: list[int] = []
    for size in reversed(tensor.shape):
        index.append(place % size)
        place //= size
    return tuple(reversed(index))
