"""Says when the estimate of a changed speed has settled: its first values still contain times from before."""

from collections import deque

SETTLED = 5  # number of successive estimates that must agree; each is a median over as many steps
AGREES = 1.1  # estimates agree if the largest is at most this many times the smallest
MOST_WAITED = 15  # after this number of estimates a speed that keeps changing counts as settled, too


class Settling:
    """The successive estimates of one speed since it changed, one for each step."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=SETTLED)
        self._waited = 0  # number of estimates since the newest ones last agreed

    @property
    def is_settled(self) -> bool:
        """Whether the newest estimate may be acted upon."""
        return self._agree() or self._waited >= MOST_WAITED

    def observe(self, estimate: float) -> None:
        """Take the estimate, which is above zero, after one more step."""
        self._newest.append(estimate)
        self._waited = 0 if self._agree() else self._waited + 1

    def _agree(self) -> bool:
        return len(self._newest) == SETTLED and max(self._newest) <= AGREES * min(self._newest)
