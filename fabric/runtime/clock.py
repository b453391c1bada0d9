"""The clock of the protocol cores."""

import time


def seconds_since_boot() -> float:
    """Unlike the monotonic clock this one goes on while the machine is suspended. A member counts on it how
    long it may commit without a lighthouse, and the lighthouse counts on a clock that went on as well."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
