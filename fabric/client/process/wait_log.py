"""Logs what a trainer waits for, in the lighthouse's words: after some seconds, then at growing intervals."""

import logging
import math
import queue
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

log = logging.getLogger(__name__)

# A wait longer than this gets a line in the log. Its second line follows after a minute, its third after two.
FIRST_S = 5.0
AGAIN_S, LIMIT_S = 60.0, 600.0
_LONGEST_S = 3600.0  # longest wait for the queue in one call, which takes no infinite timeout

T = TypeVar("T")


class WaitLogger:
    """Waits for orders; ``describe`` returns what ``replica`` waits for, or an empty string."""

    def __init__(self, replica: str, describe: Callable[[], str], first_s: float = FIRST_S) -> None:
        self._replica = replica
        self._describe = describe
        self._first_s = first_s
        self._again_s = AGAIN_S
        self._begun = 0.0  # the time when the wait began, monotonic seconds
        self._logged_at = -math.inf

    def begin(self) -> None:
        """Start a wait. Orders may come that do not end it."""
        self._begun = time.monotonic()

    def get(self, orders: "queue.SimpleQueue[T]") -> T:
        """Return the next order as soon as there is one."""
        due = max(self._begun + self._first_s, self._logged_at + self._again_s)
        while True:
            try:
                return orders.get(timeout=min(max(0.0, due - time.monotonic()), _LONGEST_S))
            except queue.Empty:
                if time.monotonic() >= due:
                    due = self._say(time.monotonic())

    def _say(self, now: float) -> float:
        """Log what the replica waits for, if known; return when to call this again."""
        what = self._describe()
        if not what:
            return now + self._first_s
        lasts = now - self._logged_at <= 2 * self._again_s
        self._again_s = min(2 * self._again_s, LIMIT_S) if lasts else AGAIN_S
        self._logged_at = now
        log.warning("fabric: %s has waited %.0f s: for %s", self._replica, now - self._begun, what)
        return now + self._again_s


def describe_wait(status: Mapping[str, Any], reason: str) -> str:
    """Return what a trainer waits for; empty while ``LighthouseLink`` reports that no lighthouse answers.

    ``status``: from ``Engine.describe``. ``reason``: what the job waits for, by the lighthouse.
    """
    lighthouse, round_ = status["lighthouse"], status.get("round")
    if lighthouse["connected"] and reason:
        return reason
    if status["newest_epoch"] == 0:
        return ""
    if status.get("catching_up") in ("state", "gradient"):
        wanted, step = status["catching_up"], status["step"]
        return f"the {wanted} of step {step} and on, from the others' checkpoint servers"
    if round_ is not None and round_["missing"]:
        return f"{', '.join(round_['missing'])} in step {round_['step']}"
    if not lighthouse["connected"]:
        return f"the lighthouse at {lighthouse['url']}, which is out of reach"
    return "the others"
