"""Threads that must not slow a training step: they get what the others leave of the processor."""

import contextlib
import os
import threading

# Beside a thread of niceness 0, one of niceness 5 gets about a third of what that gets, one of niceness 10 a
# tenth: on a crowded host a newcomer's fetch would hardly move while the others go on ever further ahead.
BACKGROUND = 5


def lower_priority(niceness: int = BACKGROUND) -> None:
    """Lower the calling thread's priority, for good: an unprivileged thread cannot raise it again."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it; the work is merely less polite then
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
