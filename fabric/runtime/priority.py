"""Low-priority threads, which must not slow a training step: they use processor time that is free."""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

# Against a thread of niceness 0, one of niceness 5 gets about a third of its time, one of niceness 10 a
# tenth. At 10 the fetch of a joining member on a crowded host would hardly move, and it would never catch up.
BACKGROUND = 5
LOW_PRIORITY = 10
# A host is crowded where low-priority work has waited for a processor this many times as long as it ran.
# Waits of less than _LEAST_WAIT_S together do not count: the work waits during a training step, and runs
# between steps.
_CROWDED, _LEAST_WAIT_S = 2.0, 2.0

_T = TypeVar("_T")


def lower_priority(niceness: int = BACKGROUND) -> None:
    """Lower the calling thread's priority, for good: an unprivileged thread cannot raise it again."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may forbid the call; the work then keeps its priority
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))


class LowPriorityRunner:
    """Runs work at low priority; only the caller waits for its end.

    Each call gets a thread of niceness ``LOW_PRIORITY`` that ends with it. A thread cannot raise its priority
    again, so no thread that is needed later may do such work. On a crowded host, where the work would take
    for ever, the caller does it.
    """

    def __init__(self) -> None:
        self._ran_s = self._waited_s = 0.0

    @property
    def crowded(self) -> bool:
        """Whether low-priority work has so far got less than a third of a processor."""
        return self._waited_s > max(_LEAST_WAIT_S, _CROWDED * self._ran_s)

    def __call__(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` and return its result, or raise its error; the calling thread waits."""
        if self.crowded:
            return work()
        result: list[_T] = []
        error: list[BaseException] = []

        def run() -> None:
            lower_priority(LOW_PRIORITY)
            try:
                result.append(work())
            except BaseException as caught:  # noqa: BLE001  (raised in the caller's thread)
                error.append(caught)
            ran_s, waited_s = _ran_and_waited()
            self._ran_s += ran_s
            self._waited_s += waited_s

        thread = threading.Thread(target=run, name="fabric-low-priority", daemon=True)
        thread.start()
        thread.join()
        if error:
            raise error[0]
        return result[0]


def _ran_and_waited() -> tuple[float, float]:
    """Return the seconds for which this thread had a processor, and waited for one; zeros where unknown."""
    try:
        ran, waited, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    except (OSError, ValueError):
        return 0.0, 0.0
    return ran / 1e9, waited / 1e9


run_low_priority = LowPriorityRunner()  # shared: a host is crowded for the whole process
