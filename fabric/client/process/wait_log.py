"""A trainer that waits for others says so: for whom, and until when, as the lighthouse puts it. Once within
seconds, then ever more rarely.
"""

import logging
import math
import queue
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

log = logging.getLogger(__name__)

# A wait that lasts longer is worth a line. The next one comes a minute later at the earliest, then two.
FIRST_S = 5.0
AGAIN_S, LIMIT_S = 60.0, 600.0
_LONGEST_S = 3600.0  # in one turn: a queue takes no infinite time

T = TypeVar("T")


class WaitLogger:
    """How the main thread waits for orders. ``replica`` waits, ``describe`` says what for, if
    that is known."""

    def __init__(self, replica: str, describe: Callable[[], str], first_s: float = FIRST_S) -> None:
        self._replica = replica
        self._describe = describe
        self._first_s = first_s
        self._again_s = AGAIN_S
        self._begun = 0.0  # monotonic seconds
        self._said = -math.inf  # when the newest line was

    def begin(self) -> None:
        """A wait begins, and lasts however many orders come meanwhile that do not end it."""
        self._begun = time.monotonic()

    def get(self, orders: "queue.SimpleQueue[T]") -> T:
        """The next order, as soon as there is one."""
        due = max(self._begun + self._first_s, self._said + self._again_s)
        while True:
            try:
                return orders.get(timeout=min(max(0.0, due - time.monotonic()), _LONGEST_S))
            except queue.Empty:
                if time.monotonic() >= due:
                    due = self._say(time.monotonic())

    def _say(self, now: float) -> float:
        """Say it if there is something to say; returns when to look again."""
        what = self._describe()
        if not what:
            return now + self._first_s
        lasts = now - self._said <= 2 * self._again_s
        self._again_s = min(2 * self._again_s, LIMIT_S) if lasts else AGAIN_S
        self._said = now
        log.warning("fabric: %s has waited %.0f s: for %s", self._replica, now - self._begun, what)
        return now + self._again_s


def describe_wait(told: Mapping[str, Any], said: str) -> str:
    """What a trainer waits for, by what its engine tells (``Engine.describe``) and what the lighthouse
    ``said`` last. Empty where nothing is known yet: ``LighthouseLink`` says for which lighthouse it waits."""
    lighthouse, round_ = told["lighthouse"], told.get("round")
    if lighthouse["connected"] and said:
        return said
    if told["newest_epoch"] == 0:
        return ""
    if told.get("catching_up") in ("state", "gradient"):
        return f"the {told['catching_up']} of step {told['step']} and on, from the others' checkpoint servers"
    if round_ is not None and round_["missing"]:
        return f"{', '.join(round_['missing'])} in step {round_['step']}"
    if not lighthouse["connected"]:
        return f"the lighthouse at {lighthouse['url']}, which is out of reach"
    return "the others"
