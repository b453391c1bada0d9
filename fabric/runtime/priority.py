"""Low-priority threads, which must not slow a training step: they use processor time that is free."""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

# Against a thread of niceness 0, one of niceness 5 gets about a third of its time, one of niceness 10 a
# tenth. At 10 the fetch of a joining member on a crowded host would hardly move, and it would never catch up.
BACKGROUND = 5
LOW_PRIORITY = 10
IDLE = 19  # for work that nobody waits for
# A host is crowded where low-priority work has waited this long for a processor, in all of a process. Its
# further waits would cost a join more than they spare the others.
_MOST_WAIT_S = 2.0

_T = TypeVar("_T")


def lower_priority(niceness: int = BACKGROUND) -> None:
    """Lower the calling thread's priority, for good: an unprivileged thread cannot raise it again."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may forbid the call; the work then keeps its priority
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))


class LowPriorityRunner:
    """Runs work at low priority; only the caller waits for its end.

    Each call gets a thread of ``niceness`` that ends with it. A thread cannot raise its priority again, so no
    thread that is needed later may do such work. On a crowded host, where the work has waited for
    ``most_wait_s`` and might take for ever, the caller does it. So divide long work into several calls.
    """

    def __init__(self, niceness: int = LOW_PRIORITY, most_wait_s: float = _MOST_WAIT_S) -> None:
        self._niceness, self._most_wait_s = niceness, most_wait_s
        self._waited_s = 0.0

    @property
    def crowded(self) -> bool:
        """Whether low-priority work has waited for too long so far."""
        return self._waited_s > self._most_wait_s

    def __call__(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` and return its result, or raise its error; the calling thread waits."""
        if self.crowded:
            return work()
        future: Future[_T] = Future()

        def run() -> None:
            lower_priority(self._niceness)
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  (raised in the caller's thread)
                future.set_exception(error)
            self._waited_s += _waited_s()

        thread = threading.Thread(target=run, name="fabric-low-priority", daemon=True)
        thread.start()
        thread.join()
        return future.result()


def _waited_s() -> float:
    """Return for how long this thread has waited for a processor; 0 where unknown."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


run_low_priority = LowPriorityRunner()  # shared: a host is crowded for the whole process
