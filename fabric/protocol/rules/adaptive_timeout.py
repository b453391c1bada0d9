"""The time budget: every deadline inside the exchange follows from one setting, ``exchange_s``.

User code has its own bound: ``user_code_s``, or the time that ``session.busy`` announced. Good rounds tighten
the bound of later rounds, but never below FLOOR_S: C code that holds the GIL, or a busy host, may keep a
trainer from its links for seconds.
"""

import math
from collections import deque

from msgspec import Struct, field

from fabric.model import Value

FLOOR_S = 5.0
# The time budget is this many times the duration of the slowest round in a hundred.
MARGIN = 20.0
# The time budget adapts after this many good rounds, and follows the last REMEMBERED rounds.
ENOUGH = 20
REMEMBERED = 200


class Budget(Value):
    """The longest times, in seconds."""

    exchange_s: float = 60.0  # seconds from the last member's contribution to the commit
    user_code_s: float = 1800.0

    @property
    def link_s(self) -> float:
        """The time for all links of a new epoch."""
        return min(5.0, self.exchange_s / 4)

    @property
    def entry_s(self) -> float:
        """The time for members that are late for a round, while no leader can evict them."""
        return 2 * self.user_code_s + self.exchange_s


def problem(exchange_s: float, user_code_s: float, autonomy_s: float) -> str:
    """Say for a person why these times cannot be a budget; empty when they can."""
    if exchange_s <= 0:
        return (
            f"exchange_s is {exchange_s:g}: give the seconds that a round may take once every member is in it"
        )
    if user_code_s < exchange_s:
        return (
            f"user_code_s ({user_code_s:g}) is below exchange_s ({exchange_s:g}): a member in user code "
            "would be given up before one that is stuck in an exchange; raise user_code_s or lower exchange_s"
        )
    if autonomy_s < exchange_s:
        return (
            f"autonomy_s ({autonomy_s:g}) is below exchange_s ({exchange_s:g}): one slow round without a "
            "lighthouse would end the job; raise autonomy_s or lower exchange_s"
        )
    return ""


class AdaptiveTimeout(Struct):
    """The bound of the next round, from the durations of earlier ones."""

    cap_s: float  # the largest bound, which holds until enough rounds went well
    _took: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _patience: float = 1.0
    _slow_s: float = math.inf  # the slowest round in a hundred, once enough rounds went well

    def took(self, seconds: float) -> None:
        """Note that a round was committed within ``seconds``."""
        self._took.append(seconds)
        self._patience = 1.0
        if len(self._took) >= ENOUGH:
            self._slow_s = sorted(self._took)[math.ceil(0.99 * len(self._took)) - 1]

    def stalled(self) -> None:
        """Give the next round twice the time, because this one was given up: the network may be slow."""
        self._patience *= 2

    @property
    def bound_s(self) -> float:
        """How long the next round may take once every member is in it."""
        return min(self.cap_s, max(FLOOR_S, MARGIN * self._slow_s) * self._patience)
