"""Decides when a state that was read while user code ran is the state of its step.

Code that moves weights for a moment and puts them back (adversarial training, SAM, an average swapped in for
an evaluation) trains as without fabric. But a copy or digest that runs meanwhile may read moved weights. So a
copy is compared with the state once user code has ended. After the first such write this process reads its
state before user code goes on.
"""

import ctypes
import logging
import random
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from fabric.ckpt_server.state.training_state import StateDescriber, StateView
from fabric.client.state.mutation_guard import MEANWHILE, UNNAMED, MutationGuard
from fabric.errors import StateError

# Of a copy this many bytes are compared, and of each of the first few copies all bytes.
_COMPARED_BYTES = 16 << 20
_COMPARED_WHOLE = 4
_PIECE_BYTES = 1 << 16
_log = logging.getLogger(__name__)
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class WriteWatch:
    """Watches the shared state of one process. ``read`` digests a view at once. For the main thread."""

    def __init__(self, replica: str, describer: StateDescriber, read: Callable[[StateView], str]) -> None:
        self.reads_first = False  # whether this process reads its state before user code goes on
        self._replica = replica
        self._describer = describer
        self._read = read
        self._whole = _COMPARED_WHOLE  # readings that are still checked as a whole
        self._parameters: list[tuple[str, torch.Tensor]] | None = None

    def guard(self, view: StateView) -> MutationGuard:
        """Return a guard of ``view``, a view of the state as it is now."""
        if self._parameters is None:
            self._parameters = list(_parameters(self._describer.objects))
        return MutationGuard(view, self._parameters)

    def capture(self, step: int) -> StateView:
        """Return a view of the state as it is now."""
        return self._describer.capture(step)

    def digest(self, step: int) -> str:
        """Return the digest of the state as it is now."""
        return self._read(self._describer.capture(step))

    def check(self, guard: MutationGuard, step: int, expected: str = "") -> str:
        """Return a tensor that user code has written to since, if any. Its values are the same as before.

        ``expected``: the digest of the state, if it was read before user code went on. Raises StateError
        where the state has other values than before.
        """
        if reason := guard.changed(lambda: self._describer.capture(step)):
            raise StateError(reason)
        name = guard.written()
        if name and expected and self.digest(step) != expected:
            raise StateError(f"{name} changed{MEANWHILE}")
        return name

    def check_known(self, step: int, expected: str) -> None:
        """Raise StateError unless the state still has this digest."""
        if self.digest(step) != expected:
            raise StateError(UNNAMED)

    def read_again(self, step: int, digest: str) -> str:
        """Return the digest of the state; of the first few readings all are read a second time."""
        if self._whole <= 0:
            return digest
        self._whole -= 1
        again = self.digest(step)
        if again != digest:
            self.note("a tensor")
        return again

    def note(self, name: str) -> None:
        """Note that user code writes to ``name`` for a moment. From now on the state is read before."""
        if not self.reads_first:
            self.reads_first = True
            _log.warning(
                "fabric: %s: your code changed %s for a moment while forward and backward ran: from now on "
                "this process copies and digests its state before your code goes on",
                self._replica,
                name,
            )

    def torn(self, copy: memoryview, view: StateView) -> str:
        """Return a tensor of which ``copy``, made of ``view``, has other bytes than the state now; else "".

        After the first four copies equally spaced pieces of 16 MiB in all are compared.
        """
        now = self._describer.capture(view.step)
        if [(name, t.nbytes) for name, t in now.tensors] != [(name, t.nbytes) for name, t in view.tensors]:
            return "the tensors of the state"
        stride = 1 if self._whole > 0 else max(1, -(-view.nbytes // _COMPARED_BYTES))
        self._whole -= 1
        address, begin = np.frombuffer(copy, np.uint8).ctypes.data, len(view.header)
        piece = random.Random(view.step).randrange(stride)  # noqa: S311 - not a secret
        for name, tensor in now.tensors:
            pieces = -(-tensor.nbytes // _PIECE_BYTES)
            for at in range(piece * _PIECE_BYTES, tensor.nbytes, stride * _PIECE_BYTES):
                length = min(_PIECE_BYTES, tensor.nbytes - at)
                if _memcmp(address + begin + at, tensor.data_ptr() + at, length):
                    return name
            piece = (piece - pieces) % stride
            begin += tensor.nbytes
        return ""


def _parameters(objects: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of all modules, with their names in the state's file."""
    for name, value in objects.items():
        named = getattr(value, "named_parameters", None)
        for own, parameter in named() if callable(named) else ():
            yield f"{name}/{own}", parameter
