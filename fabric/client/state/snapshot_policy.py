"""When a replica snapshots its state by itself. What a joiner asks for is taken on top of any policy.

A policy is a small object: ``is_due`` is asked once at every step boundary, ``taken`` is told of every copy
that was made, also for somebody who asked. Times are monotonic seconds.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

from fabric.errors import ConfigError
from fabric.runtime.config import Settings


class SnapshotPolicy(Protocol):
    """One per process; called from one thread at a time."""

    def is_due(self, step: int, now: float) -> bool:
        """Whether the state at ``step`` should be snapshotted at this boundary."""

    def taken(self, step: int, now: float, cost_s: float) -> None:
        """The state that stood at ``step`` at time ``now`` was snapshotted; copying it took ``cost_s``."""


@dataclass(slots=True)
class OverheadBudget:
    """As fresh as ``share`` of the time pays for (0: nothing), and never older than ``max_age_s`` seconds.

    A copy counts with all of its time, though most of that passes while the step computes: it costs less.
    Old is judged as of the next boundary, when it would be too late. The state before the first step is worth
    nothing, and lacks what the optimizer has yet to make. A snapshot of it, for somebody who asked, does not
    count: memory for the whole should be there before a newcomer waits for it. Raises ConfigError.
    """

    share: float = 0.02
    max_age_s: float = 600.0
    _at: float = field(default=-math.inf, repr=False)
    _cost_s: float = field(default=0.0, repr=False)
    _asked: float = field(default=math.inf, repr=False)

    def __post_init__(self) -> None:
        if not (0 <= self.share < math.inf and 0 < self.max_age_s < math.inf):
            raise ConfigError(
                f"OverheadBudget({self.share!r}, {self.max_age_s!r}): the share is from 0, the age above 0 s"
            )

    def is_due(self, step: int, now: float) -> bool:
        """See ``SnapshotPolicy``."""
        step_s, self._asked = max(0.0, now - self._asked), now
        if step < 1:
            return False
        age_s = now - self._at
        paid = self.share > 0 and self._cost_s <= self.share * age_s
        return paid or age_s + step_s + self._cost_s >= self.max_age_s

    def taken(self, step: int, now: float, cost_s: float) -> None:
        """See ``SnapshotPolicy``."""
        if step >= 1:
            self._at, self._cost_s = now, cost_s


@dataclass(slots=True)
class EverySteps:
    """At every ``n``-th step, whatever it costs: at the same steps on all replicas, but for the first, which
    may find that a large state's memory is not there yet. Raises ConfigError."""

    n: int
    _last: int = field(default=-1, repr=False)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"EverySteps({self.n!r}): give a number of steps from 1")

    def is_due(self, step: int, now: float) -> bool:
        """See ``SnapshotPolicy``."""
        return step % self.n == 0 and step != self._last

    def taken(self, step: int, now: float, cost_s: float) -> None:
        """See ``SnapshotPolicy``."""
        self._last = step


def policy_of(found: Settings) -> SnapshotPolicy:
    """What the settings ask for."""
    if found.snapshot_every:
        return EverySteps(found.snapshot_every)
    return OverheadBudget(found.snapshot_share, found.snapshot_max_age_s)
