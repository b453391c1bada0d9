"""Finds out who was written to while nobody may write: tensors of a state that is being read.

torch counts the writes to a tensor, those too that a device has yet to make. What it does not count (through
``.data``, numpy or a captured graph) shows in the bytes alone: of each tensor on the host the first few are
looked at again, which finds what writes to whole tensors, as averages and statistics do.
"""

import ctypes
import threading

import torch

from fabric.ckpt_server.state.training_state import StateView

_SAMPLE_BYTES = 64  # one line of the cache
MEANWHILE = (
    " while forward and backward ran, but it is part of the shared state, which is equal on all replicas and "
    "is read meanwhile: change it only beside optimizer.step(), or leave it out (a buffer: "
    "persistent=False)"
)
# Where the state's digest alone tells of it, nothing names the tensor.
UNNAMED = f"a tensor was changed without torch's knowledge{MEANWHILE}"


class MutationGuard:
    """The tensors of ``view`` as they are now; ``check`` says what has become of them. From any thread."""

    def __init__(self, view: StateView) -> None:
        self._watched = [(name, tensor, _version(tensor), _sample(tensor)) for name, tensor in view.tensors]
        self._lock = threading.Lock()
        self._refused = ""

    def check(self) -> str:
        """Why the reading is not of one state, naming the tensor, or empty. What it said first it says
        again: whoever calls it first has read the state, or is about to let it be changed."""
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
