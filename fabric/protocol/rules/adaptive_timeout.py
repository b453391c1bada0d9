"""The time budget: from one setting, ``exchange_s``, every deadline inside the exchange follows.

What user code takes is bounded apart, by ``user_code_s`` or by what ``session.busy`` announced: nobody can
know how long an evaluation lasts. Rounds that went well tighten the bound of the next ones, never below
FLOOR_S: a trainer may be kept from its links for seconds by C code that holds the GIL, or by a busy host.
"""

import math
from collections import deque
from dataclasses import dataclass, field

FLOOR_S = 5.0
# The bound is so many times what the slowest one in a hundred rounds took.
MARGIN = 20.0
# Rounds that must have gone well before anything is learned of them, and those that are remembered.
ENOUGH = 20
REMEMBERED = 200


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds. ``exchange_s``: from when everybody is in a round to its commit, at most."""

    exchange_s: float = 60.0
    user_code_s: float = 1800.0

    @property
    def link_s(self) -> float:
        """For the links of a new epoch, all of them."""
        return min(5.0, self.exchange_s / 4)

    @property
    def entry_s(self) -> float:
        """For members that are late for a round: the leader says who is; this is for when there is none."""
        return 2 * self.user_code_s + self.exchange_s


def problem(exchange_s: float, user_code_s: float, autonomy_s: float) -> str:
    """Why these cannot be a budget, for a person; empty when they can."""
    if exchange_s <= 0:
        return f"exchange_s is {exchange_s:g}: give the seconds that a round may take once everybody is in it"
    if user_code_s < exchange_s:
        return (
            f"user_code_s ({user_code_s:g}) is below exchange_s ({exchange_s:g}): a member in user code "
            "would be given up before one that is stuck in an exchange; raise the one or lower the other"
        )
    if autonomy_s < exchange_s:
        return (
            f"autonomy_s ({autonomy_s:g}) is below exchange_s ({exchange_s:g}): one slow round without a "
            "lighthouse would end the job; raise the one or lower the other"
        )
    return ""


@dataclass(slots=True)
class AdaptiveTimeout:
    """The bound of the next round, from those before. ``cap_s`` holds until enough is known, and always."""

    cap_s: float
    _took: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _patience: float = 1.0

    def took(self, seconds: float) -> None:
        """A round went well."""
        self._took.append(seconds)
        self._patience = 1.0

    def stalled(self) -> None:
        """A round was given up: the next is given twice the time, lest a slow network never gets through."""
        self._patience *= 2

    @property
    def bound_s(self) -> float:
        """How long the next round may take once everybody is in it."""
        if len(self._took) < ENOUGH:
            return self.cap_s
        ordered = sorted(self._took)
        slow = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return min(self.cap_s, max(FLOOR_S, MARGIN * slow) * self._patience)
