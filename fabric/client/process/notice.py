"""SIGTERM to a trainer in a job: its platform will kill it soon, and until then it may leave in order."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable

from fabric.runtime.process_environment import stop_s

# This part of the time, and at most so many seconds, is left when the process ends itself.
_MARGIN, _MARGIN_S = 0.1, 2.0


class NoticeWatch:
    """Takes the first SIGTERM as a notice; a later one changes nothing, because one notice may come twice.

    A batch system signals every process, and a launcher passes its own signal on. ``call_soon`` lets the
    control thread call a function. ``on_notice`` and ``on_over`` get the seconds from the notice to the end.
    A handler that the user's script has set stays, and so does a process's wish to ignore SIGTERM. A handler
    around this one may call it, or bring it back, after ``end``.
    """

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], None],
        on_notice: Callable[[float], None],
        on_over: Callable[[float], None],
    ) -> None:
        self._call_soon, self._on_notice, self._on_over = call_soon, on_notice, on_over
        self._pid = os.getpid()
        self.has_come = self._is_over = False

    def begin(self) -> None:
        """Take the signal from now on; only in the main thread, which Python gives all signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)

    def end(self) -> None:
        """Let SIGTERM end the process again."""
        self._is_over = True
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, number: int, _: object) -> None:
        if self._is_over or os.getpid() != self._pid:  # or a child that the trainer forked
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self.has_come:
            self.has_come = True
            self._call_soon(self._begin_leaving)

    def _begin_leaving(self) -> None:
        left_s = stop_s()
        end_s = left_s - min(_MARGIN * left_s, _MARGIN_S)
        asyncio.get_running_loop().call_later(end_s, self._on_over, left_s)
        self._on_notice(left_s)
