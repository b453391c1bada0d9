"""Ends the processes that a killed launcher leaves behind.

The kernel kills the ranks of a dead launcher, but not the processes that the ranks have started. So the
launcher forks a guard before the first rank. The guard waits for the end of a pipe that the launcher alone
holds open. Then it kills every process of the ranks' sessions, and every process with the launcher's mark.
"""

import contextlib
import os
import signal
from collections.abc import Iterable
from typing import NoReturn

from fabric.cli.launch.signal_inbox import ENDING, PASSED_ON
from fabric.runtime.guarded_processes import MarkedProcesses

_KILL_S = 10.0
_CALM = b"calm\n"


class Guard:
    """The guard of one launcher. Make it while this process has one thread."""

    def __init__(self, marked: MarkedProcesses) -> None:
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _watch(reader, self._writer, marked)
        os.close(reader)

    def tell(self, sessions: Iterable[int]) -> None:
        """Send it the sessions of the new attempt, which replace the earlier ones."""
        self._write(" ".join(map(str, sessions)).encode() + b"\n")

    def close(self) -> None:
        """Tell the guard that no process is left, and wait for the guard's end."""
        self._write(_CALM)
        os.close(self._writer)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the guard was killed; the kernel still ends the ranks
            os.write(self._writer, line)


def _watch(reader: int, writer: int, marked: MarkedProcesses) -> NoReturn:
    """Run as the guard."""
    try:
        # A signal from the terminal that ends the launcher must not end its guard first.
        os.setsid()
        for number in (*ENDING, *PASSED_ON):
            signal.signal(number, signal.SIG_IGN)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            *_, last = [b"", *pipe]
        if last != _CALM:
            marked.sessions = frozenset(int(word) for word in last.split())
            marked.kill(_KILL_S)
    finally:
        os._exit(0)
