"""Named points at which a test can have this process kill or stop itself, or hold still.

A failure test must hit an exact place, and sleeping does not. ``FABRIC_TEST_POINTS="ring@7=kill"`` makes
the process SIGKILL itself the first time it reaches the point ``ring`` in step 7 (``@`` omitted: any step).
Actions: ``kill``, ``stop`` (SIGSTOP, goes on when continued), ``wait:PATH`` (until that file exists;
meanwhile ``PATH.blocking_join`` does).
Without the variable every point is one dictionary look-up.
"""

import os
import signal
import time
from pathlib import Path

from fabric.errors import ConfigError

# Every point there is; a typo in a test must not make it pass.
NAMES = frozenset(
    {
        "forward",
        "before-ring",
        "ring",
        "before-barrier",
        "barrier",
        "after-barrier",
        "optimizer",
        "snapshot",
        "fetch",
        "install",
        "replay",
        "switch",
        "first-round",
        "abort",
        "recovery",
        "durable-begin",
        "durable-data",
        "durable-shards",
        "durable-marker",
        "durable-complete",
        "durable-tidy",
    }
)


class Failpoints:
    """The armed points of this process, by (name, step); step None matches any."""

    def __init__(self, text: str) -> None:
        self._armed: dict[tuple[str, int | None], str] = {}
        for part in filter(None, text.split(",")):
            where, _, action = part.partition("=")
            name, _, step = where.partition("@")
            if name not in NAMES or not action:
                raise ConfigError(
                    f"FABRIC_TEST_POINTS has {part!r}: known points are {', '.join(sorted(NAMES))}"
                )
            self._armed[name, int(step) if step else None] = action

    def hit(self, name: str, step: int) -> None:
        """Act if this point is armed; each one acts once."""
        if not self._armed:
            return
        action = self._armed.pop((name, step), None) or self._armed.pop((name, None), None)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action is not None and action.startswith("wait:"):
            path = Path(action.removeprefix("wait:"))
            while not path.exists():
                path.with_name(f"{path.name}.awaited").touch()
                time.sleep(0.005)
