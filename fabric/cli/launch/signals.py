"""Collects the signals that a launcher gets, for its loop to read."""

import contextlib
import os
import signal
from types import TracebackType

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
