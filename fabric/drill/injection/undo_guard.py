"""Continues stopped processes if the drill that stopped them dies.

The guard is a process of its own. It reads from a pipe which processes the drill has stopped: ``+PID START``,
and ``-PID START`` after the drill has continued the process. At the end of the pipe the guard continues all
processes that are still listed. A process is identified by its pid and its start time.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable

from fabric.drill.injection.drilled_processes import start_time
from fabric.runtime.process_environment import start_helper


class UndoGuard:
    """The drill's end of the pipe. Close it when no process is stopped any more."""

    def __init__(self) -> None:
        self._process = start_helper("fabric.drill.injection.undo_guard", stdin=subprocess.PIPE)

    def note_stop(self, pid: int) -> None:
        """List a process before it is stopped. Raises OSError where the guard is dead."""
        self._write(f"+{pid} {start_time(pid)}\n")

    def note_continue(self, pid: int) -> None:
        """Remove a process that was continued."""
        with contextlib.suppress(OSError):  # the guard is dead, and the drill has continued the process
            self._write(f"-{pid} {start_time(pid)}\n")

    def close(self) -> None:
        """End the guard, which continues the processes that are still listed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()


def guard(lines: Iterable[str]) -> None:
    """Read the lines to their end, then continue the listed processes."""
    stopped: set[tuple[int, str]] = set()
    for line in lines:
        pid, _, started = line[1:].strip().partition(" ")
        key = (int(pid), started)
        if line.startswith("+"):
            stopped.add(key)
        else:
            stopped.discard(key)
    for process, started in stopped:
        if started and start_time(process) == started:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGCONT)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guard(sys.stdin)
