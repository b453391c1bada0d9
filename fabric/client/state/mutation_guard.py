"""Finds tensors that user code has written to while the state was being read.

torch counts the writes to a tensor, including those that a device has yet to make. It does not count writes
through ``.data``, numpy or a captured graph, or a parameter that gets other memory (``p.data = backup``). For
these the guard compares addresses, and samples of each tensor on the host, drawn over its whole length.
"""

import ctypes
import random
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from fabric.ckpt_server.state.training_state import StateView

SAMPLE_BYTES = 64  # size of one line of the processor's cache
# The most samples of one tensor, and of all tensors together unless there are more tensors. So a guard
# touches at most 64 KiB, or a line of each tensor.
_MOST_SAMPLES, _ALL_SAMPLES = 16, 1024
MEANWHILE = (
    " while forward and backward ran, but it is part of the shared state, which is equal on all replicas: "
    "change it only where optimizer.step() is, put back what you change for a moment, or leave it out "
    "(a buffer: persistent=False)"
)
# This message is for the case in which only digests differ, so that the guard cannot name a tensor.
UNNAMED = f"a tensor was changed without torch's knowledge{MEANWHILE}"


class MutationGuard:
    """Remembers the tensors of ``view``, and the memory of ``parameters`` by their names in the view."""

    def __init__(self, view: StateView, parameters: Sequence[tuple[str, torch.Tensor]] = ()) -> None:
        self.view = view
        draw = random.Random(view.step)  # noqa: S311 - not a secret
        count = sample_count(len(view.tensors))
        self._watched = []
        for name, tensor in view.tensors:
            places = _places(tensor.nbytes, count, draw)
            self._watched.append((name, tensor, _version(tensor), places, samples(tensor, places)))
        self._lock = threading.Lock()
        self._final: str | None = None
        self._memory = [(name, parameter, parameter.data_ptr()) for name, parameter in parameters]

    def written(self) -> str:
        """Return the first tensor with a write that torch has counted, or with other memory; from any thread.

        Its values may be the same as before. After ``close`` the result stays as it is.
        """
        with self._lock:
            return self._find_written() if self._final is None else self._final

    def close(self) -> None:
        """Let the trainer change the state: writes from now on do not count."""
        with self._lock:
            self._final = self._find_written()

    def _find_written(self) -> str:
        counted = (name for name, tensor, version, _, _ in self._watched if _version(tensor) != version)
        return next(counted, "") or next(self._moved(), "")

    def changed(self, capture: Callable[[], StateView]) -> str:
        """Return which tensor has other values than before, as far as samples show; else an empty string.

        ``capture`` views the state as it is now.
        """
        moved = set(self._moved())
        now = dict(capture().tensors) if moved else {}
        for name, tensor, version, places, before in self._watched:
            live = now.get(name, tensor) if name in moved else tensor
            if live.nbytes == tensor.nbytes and samples(live, places) == before:
                continue
            is_known = _version(tensor) != version or name in moved
            how = "changed" if is_known else "changed without torch's knowledge"
            return f"{name} {how}{MEANWHILE}"
        return ""

    def _moved(self) -> Iterator[str]:
        return (name for name, parameter, address in self._memory if parameter.data_ptr() != address)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def sample_count(tensors: int) -> int:
    """Return the number of samples of each tensor of a state with so many tensors."""
    return max(1, min(_MOST_SAMPLES, _ALL_SAMPLES // max(1, tensors)))


def _places(nbytes: int, count: int, draw: random.Random) -> list[int]:
    """Return the places of the samples: one in each of ``count`` equal parts of the tensor."""
    if nbytes <= SAMPLE_BYTES * count:
        return list(range(0, nbytes, SAMPLE_BYTES))
    part = (nbytes - SAMPLE_BYTES) / count
    return [int((at + draw.random()) * part) for at in range(count)]


def samples(tensor: torch.Tensor, places: Sequence[int]) -> bytes:
    """Return a line of the cache at each of these places of a host tensor."""
    if tensor.device.type != "cpu":
        return b""
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    if len(places) * SAMPLE_BYTES >= nbytes:  # the samples are the whole tensor
        return ctypes.string_at(address, nbytes)
    return b"".join([ctypes.string_at(address + at, SAMPLE_BYTES) for at in places])
