"""Summary statistics of a tensor's bytes, without torch, for a person with a suspicious tensor.

Works piece by piece, so that a large tensor needs only some megabytes of memory. Sums are float64.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric.ckpt_server.format.safetensors_file import ELEMENT_BYTES

_PIECE_ELEMENTS = 1 << 18
Array = npt.NDArray[Any]


def values(data: memoryview, dtype: str) -> Array:
    """Return the elements of ``data`` in a dtype that numpy knows; bfloat16 and 8-bit floats become float32.

    ``dtype`` is a name of the safetensors format. Raises ValueError for one that is not known.
    """
    if dtype == "BOOL":
        return np.frombuffer(data, dtype=np.uint8)
    if dtype in ELEMENT_BYTES and dtype[1:].isdecimal():  # such as F32, in numpy f4
        return np.frombuffer(data, dtype=f"<{dtype[0].lower()}{ELEMENT_BYTES[dtype]}")
    if dtype == "BF16":
        # A bfloat16 has the bits of the upper half of a float32.
        return (np.frombuffer(data, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E5M2":
        # An E5M2 has the bits of the upper half of a float16.
        halves = np.frombuffer(data, dtype=np.uint8).astype(np.uint16) << 8
        return halves.view(np.float16).astype(np.float32)
    if dtype == "F8_E4M3":
        return _E4M3[np.frombuffer(data, dtype=np.uint8)]
    raise ValueError(f"no elements of type {dtype[:40]!r} are known")


def _e4m3() -> npt.NDArray[np.float32]:
    """Return all 256 values of the 8-bit float without infinities (OCP 8-bit floating point, E4M3)."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[(codes & 127) == 127] = math.nan
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


_E4M3 = _e4m3()


def summarise(
    data: memoryview, dtype: str, shape: tuple[int, ...], is_over: Callable[[], bool] = lambda: False
) -> dict[str, Any] | None:
    """Return the element, ``nan`` and ``inf`` counts, and min, max, mean and norm of the finite elements.

    Statistics of a tensor without a finite element are None. Returns None when ``is_over()`` turns true."""
    low, high, total, squares, finite, nan, inf = math.inf, -math.inf, 0.0, 0.0, 0, 0, 0
    nbytes = _PIECE_ELEMENTS * ELEMENT_BYTES[dtype]
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, len(data), nbytes):
            if is_over():
                return None
            piece = values(data[begin : begin + nbytes], dtype)
            if piece.dtype.kind == "f":
                nan += int(np.isnan(piece).sum())
                inf += int(np.isinf(piece).sum())
                piece = piece[np.isfinite(piece)]
            if piece.size:
                exact = piece.astype(np.float64)
                low, high = min(low, float(exact.min())), max(high, float(exact.max()))
                total += float(exact.sum())
                squares += float(np.square(exact).sum())
                finite += piece.size
    figures = {"min": low, "max": high, "mean": total / max(finite, 1), "norm": math.sqrt(squares)}
    return {
        "dtype": dtype,
        "shape": list(shape),
        "elements": len(data) // ELEMENT_BYTES[dtype],
        # JSON has no infinity, as where a sum left the range of float64.
        **{name: x if finite and math.isfinite(x) else None for name, x in figures.items()},
        "nan": nan,
        "inf": inf,
    }
