"""The micro-benchmark of a suspected rank: matrix products on its device, and copies of memory.

It runs at a step boundary, draws no random numbers, and leaves no memory behind. Products and copies take
`MOST_S` / 2 each. Where the first operation alone takes longer than `MOST_S`, no other one follows.
"""

import time
from collections.abc import Callable

import torch

from fabric.model import SpeedMeasurement

MOST_S = 0.2  # seconds for the products, the copies and the first run of each together
_FEWEST = 3  # operations that are measured even if one takes long
_SIZE, _DEVICE_SIZE = 256, 2048  # rows of the square matrices, on the host and on a device
_COPY_BYTES = 8 * 2**20


def measure(number: int, rank: int, device: torch.device) -> SpeedMeasurement:
    """Run the micro-benchmark number ``number`` now; an operation that fails has the time 0."""
    with torch.no_grad():
        return SpeedMeasurement(
            number, rank, _mean_s(lambda: _product(device), device), _mean_s(lambda: _copy(device), device)
        )


def _mean_s(prepare: Callable[[], Callable[[], object]], device: torch.device) -> float:
    """Return the mean seconds of an operation. The mean, unlike the least, shows a process that is stopped
    again and again."""
    try:
        began = time.monotonic()
        operation = prepare()
        operation()  # the first run loads kernels
        _settle(device)
        count, start = 0, time.monotonic()
        if start - began > MOST_S:
            return start - began
        while count < _FEWEST or time.monotonic() - began < MOST_S / 2:
            operation()
            _settle(device)
            count += 1
            if time.monotonic() - began > MOST_S:
                break
        return (time.monotonic() - start) / count
    except RuntimeError:  # for example no memory is left on the device
        return 0.0


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _product(device: torch.device) -> Callable[[], object]:
    size = _DEVICE_SIZE if device.type == "cuda" else _SIZE
    left = torch.full((size, size), 0.5, device=device)
    result = torch.empty_like(left)
    return lambda: torch.mm(left, left, out=result)


def _copy(device: torch.device) -> Callable[[], object]:
    """On the host from memory to memory, else from the host to the device."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cpu")
    target = torch.empty_like(source, device=device)
    return lambda: target.copy_(source)
