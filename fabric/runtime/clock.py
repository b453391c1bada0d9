"""The clock of the protocol cores, and the start of the machine from which it counts."""

import time
from pathlib import Path


def seconds_since_boot() -> float:
    """Read the clock that also counts while the machine is suspended; the monotonic clock does not.

    A member limits its time without a lighthouse by this clock, because the lighthouse counts that time too.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the kernel's id of this boot of the machine; empty where the kernel gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:64]
    except OSError:
        return ""
