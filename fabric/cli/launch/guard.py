"""Ends the processes that a killed launcher leaves behind.

The kernel kills the ranks of a dead launcher, but not the processes that the ranks have started. So the
launcher forks a guard before the first rank. The guard waits for the end of a pipe that the launcher alone
holds open. Then it kills every process of the ranks' sessions, and every process with the launcher's mark.
"""

import contextlib
import os
import signal
from collections.abc import Iterable
from types import TracebackType
from typing import NoReturn

from fabric.runtime.guarded_processes import MarkedProcesses

# Collects the signals that a launcher gets, for its loop to read.


# These signals end the launcher and its ranks; the launcher passes all other signals to the ranks.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class SignalInbox:
    """Collects ENDING and PASSED_ON while it is open; ``descriptor`` is readable when a signal has come.

    A signal that this process was started to ignore, as nohup does, stays ignored.
    """

    def __init__(self) -> None:
        self.descriptor, self._writer = os.pipe()
        for end in (self.descriptor, self._writer):
            os.set_blocking(end, False)
        self._before: dict[int, object] = {}

    def __enter__(self) -> "SignalInbox":
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (*ENDING, *PASSED_ON):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self.descriptor)
        os.close(self._writer)

    def read(self) -> list[int]:
        """Return the signals that have come since the last call; never waits."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self.descriptor, 4096) if number in self._before]
        return []


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
