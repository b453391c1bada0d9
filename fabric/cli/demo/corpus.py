"""A corpus that every machine has: the sources of Python's own standard library, as bytes.

Every replica reads the same files in the same order up to the same size, so sample i is the same
everywhere without anything being downloaded or shared.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fabric.errors import ConfigError

CORPUS_BYTES = 4 << 20


def read_corpus(limit: int = CORPUS_BYTES) -> bytes:
    """Return the first ``limit`` bytes of the sorted top-level modules of the standard library.

    Raises ConfigError where the interpreter comes without its sources.
    """
    parts: list[bytes] = []
    size = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if size >= limit:
            break
        parts.append(path.read_bytes())
        size += len(parts[-1])
    if not parts:
        raise ConfigError("This Python has no standard library sources; install one that has them.")
    return b"".join(parts)[:limit]


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Sample i: bytes [i*context, (i+1)*context) as int64, and the same range shifted by one byte."""

    def __init__(self, text: bytes, context: int) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._context
        window = self._bytes[start : start + self._context + 1].long()
        return window[:-1], window[1:]
