"""Failpoints: named places at which a test makes this process kill or stop itself, or wait.

A failure test must hit an exact place, which sleeping does not. ``FABRIC_TEST_POINTS="ring@7=kill"`` makes
the process SIGKILL itself the first time it reaches the point ``ring`` in step 7 (``@`` omitted: any step).
Actions: ``kill``, ``stop`` (SIGSTOP, until continued), and ``wait:PATH`` (until that file exists; while it
waits, ``PATH.awaited`` exists). Without the variable a failpoint costs one test of an empty dictionary.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from fabric.errors import ConfigError

Data = Callable[[], object] | None

# All failpoints; every other name is refused, so that a typo cannot make a test pass.
NAMES = frozenset(
    {
        "forward",
        "before-ring",
        "gather",
        "ring",
        "before-barrier",
        "barrier",
        "after-barrier",
        "optimizer",
        "snapshot",
        "publish",
        "fetch",
        "install",
        "replay",
        "switch",
        "first-round",
        "abort",
        "recovery",
        "collective",
        "echo",
        "durable-begin",
        "durable-data",
        "durable-shards",
        "durable-marker",
        "durable-complete",
        "durable-tidy",
    }
)


class Failpoints:
    """The armed failpoints of this process, by (name, step); step None matches any."""

    def __init__(self, text: str) -> None:
        self._armed: dict[tuple[str, int | None], str] = {}
        # Where FABRIC_DRILL allows drills: obeys a drill's order; called with the arguments of ``hit``.
        self.on_hit: Callable[[str, int, Data], None] | None = None
        for part in filter(None, text.split(",")):
            where, _, action = part.partition("=")
            name, _, step = where.partition("@")
            if name not in NAMES or not action:
                raise ConfigError(
                    f"FABRIC_TEST_POINTS has {part!r}: known points are {', '.join(sorted(NAMES))}"
                )
            self._armed[name, int(step) if step else None] = action

    def hit(self, name: str, step: int, data: Data = None) -> None:
        """Act if this failpoint is armed; each acts once. ``data``: returns what a drill may change here."""
        if self.on_hit is not None:
            self.on_hit(name, step, data)
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
