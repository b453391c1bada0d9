"""A rule that raises an alarm when observed times exceed the predicted times, and the damping of alarms.

`CusumAlarm` sums up the excess over the usual time, so it also sees a lasting slowdown of a few percent. It
cannot see a slowdown below its slack (2 %, or 1.5 times the noise), or one that was there in the warm-up. A
slowdown that grows over more than some 200 samples is learnt as normal.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from statistics import median
from typing import Any

# Robust statistics and small linear systems, for samples of a few hundred.


Row = list[float]


def spread(values: Sequence[float], centre: float) -> float:
    """The standard deviation, estimated from the median distance to ``centre`` (1.4826 MAD)."""
    return 1.4826 * median([abs(value - centre) for value in values])


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> Row | None:
    """The solution of a small system, or None where it is singular."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        if abs(rows[pivot][column]) < 1e-12:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(column + 1, size):
            factor = rows[i][column] / rows[column][column]
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[column], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - rest) / rows[i][i]
    return solution


def inverse(matrix: Sequence[Sequence[float]]) -> list[Row] | None:
    """The inverse of a small symmetric matrix, or None where it is singular."""
    size = len(matrix)
    columns = [solve(matrix, [float(i == j) for i in range(size)]) for j in range(size)]
    if any(column is None for column in columns):
        return None
    return [list(column) for column in columns if column is not None]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """The scalar product."""
    return sum(x * y for x, y in zip(a, b, strict=True))


WINDOW = 128  # number of newest errors from which the alarm computes the usual error
FEW = 10  # with fewer errors than this the usual error is unknown
LARGEST = 0.7  # the largest error (a logarithm) that counts: twice the time
SLACK, SLACK_SIGMAS = 0.02, 1.5
THRESHOLD, THRESHOLD_SIGMAS = 0.12, 8.0


class CusumAlarm:
    """One-sided cumulative sum over ln(observed / predicted); raised until the sum is back at zero."""

    def __init__(self, learn: Callable[[Any], object] = lambda _: None) -> None:
        """``learn`` gets the samples of those pairs of times that certainly show no fault."""
        self.is_raised = False
        self.statistic = 0.0  # above zero where the unit may be slow, and nothing should be learnt
        self._learn = learn
        self._usual: deque[float] = deque(maxlen=WINDOW)
        # Errors and samples since the sum left zero; dropped at an alarm.
        self._doubtful: list[tuple[float, object]] = []
        self._centre = self._sigma = 0.0

    def observe(self, observed: float, predicted: float, sample: object = None) -> bool:
        """Take one pair of times above zero; return whether the alarm is raised now."""
        error = math.log(observed / predicted)
        self._doubtful.append((error, sample))
        if len(self._usual) >= FEW:
            slack = max(SLACK, SLACK_SIGMAS * self._sigma)
            # The bound lets an alarm end within some ten good samples, after any length of time.
            threshold = max(THRESHOLD, THRESHOLD_SIGMAS * self._sigma)
            total = self.statistic + min(error - self._centre, LARGEST) - slack
            self.statistic = min(max(0.0, total), 2 * threshold)
            self.is_raised = self.statistic > (0.0 if self.is_raised else threshold)
        if self.statistic == 0:
            for certain, learnt in self._doubtful:
                self._usual.append(certain)
                self._learn(learnt)
            self._centre = median(self._usual)
            self._sigma = spread(self._usual, self._centre)
        if self.is_raised or self.statistic == 0:
            self._doubtful.clear()
        return self.is_raised


SHORT = 30  # number of steps: a slowdown that ends sooner should not have been reported
FIRST = 5  # steps that a slowdown must last after one short slowdown; further short slowdowns raise it
MOST = 40
CALM = 300  # after this number of steps without a short slowdown, ``needed`` is halved


class Damping:
    """Decides which slowdowns are reported: at first each one at once, later those that have lasted.

    On a crowded host devices are slow for short times. After a short slowdown, the next slowdown is reported
    only once it has lasted.
    """

    def __init__(self) -> None:
        self.needed = 0  # steps that a slowdown must last before its report
        self._since: dict[str, int] = {}  # name -> the step at which it became slow
        self._told: dict[str, int] = {}  # name -> the step at which its slowdown was first reported
        self._calm_since = 0
        self._step = 0

    def admit(self, slow: Collection[str], step: int) -> set[str]:
        """Return the names of ``slow`` to report at this step. ``step`` may fall if the job begins again."""
        if step < self._step:
            self._since, self._told, self._calm_since = {}, {}, step
        self._step = step
        for name in set(self._told) - set(slow):
            if step - self._told.pop(name) < SHORT:
                self.needed = min(MOST, 2 * self.needed + FIRST)
        if any(step - since < SHORT for name, since in self._since.items() if name not in slow):
            self._calm_since = step
        if step - self._calm_since >= CALM:
            self.needed, self._calm_since = self.needed // 2, step
        self._since = {name: self._since.get(name, step) for name in slow}
        for name, since in self._since.items():
            if step - since >= self.needed:
                self._told.setdefault(name, step)
        return set(self._told)
