"""Makes a child process end with its parent, also if the parent is killed with SIGKILL."""

import ctypes
import os
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with(parent: int, number: int) -> Callable[[], None]:
    """Return a function for a child of ``parent`` to run first, as ``preexec_fn``.

    It asks the kernel to send the signal ``number`` to the child when the thread that starts the child ends.
    """

    def ask() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before this process asked to die with it

    return ask
