"""Finds tensors that user code has written to while the state was being read.

torch counts the writes to a tensor, including those that a device has yet to make. It does not count writes
through ``.data``, numpy or a captured graph. For these the guard compares the first bytes of each tensor on
the host, which finds writes to whole tensors, such as those of averages and statistics.
"""

import ctypes
import threading

import torch

from fabric.ckpt_server.state.training_state import StateView

_SAMPLE_BYTES = 64  # size of one line of the processor's cache
MEANWHILE = (
    " while forward and backward ran, but it is part of the shared state, which is equal on all replicas and "
    "is read meanwhile: change it only where optimizer.step() is, or leave it out (a buffer: "
    "persistent=False)"
)
# This message is for the case in which only digests differ, so that the guard cannot name a tensor.
UNNAMED = f"a tensor was changed without torch's knowledge{MEANWHILE}"


class MutationGuard:
    """Remembers the tensors of ``view``; ``check``, in any thread, finds tensors written since."""

    def __init__(self, view: StateView) -> None:
        self._watched = [(name, tensor, _version(tensor), _sample(tensor)) for name, tensor in view.tensors]
        self._lock = threading.Lock()
        self._refused = ""

    def check(self) -> str:
        """Return which tensor was written while the state was read, or an empty string.

        Later calls return the first call's result: after it the trainer may change the state.
        """
        with self._lock:
            watched, self._watched = self._watched, []
            for name, tensor, version, sample in watched:
                if self._refused:
                    break
                if _version(tensor) != version:
                    self._refused = f"{name} changed{MEANWHILE}"
                elif _sample(tensor) != sample:
                    self._refused = f"{name} changed without torch's knowledge{MEANWHILE}"
            return self._refused


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def _sample(tensor: torch.Tensor) -> bytes:
    if tensor.device.type != "cpu":
        return b""
    return ctypes.string_at(tensor.data_ptr(), min(_SAMPLE_BYTES, tensor.nbytes))
