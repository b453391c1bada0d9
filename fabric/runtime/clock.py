"""The clock of the protocol cores, and the start of the machine from which it counts."""

import time
from pathlib import Path


def seconds_since_boot() -> float:
    """Read the clock that goes on while the machine is suspended, as the monotonic one does not.

    A member limits by it how long it commits without a lighthouse. The lighthouse's clock goes on as well.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Name this start of the machine; empty where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:64]
    except OSError:
        return ""
