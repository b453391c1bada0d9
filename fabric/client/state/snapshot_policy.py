"""When a replica snapshots its state unasked. Snapshots for joining members come on top of any policy.

A policy is a small object. The session calls ``is_due`` once at every step boundary, and ``taken`` after
every copy, requested ones included. Times are monotonic seconds.
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
        """Note a snapshot of ``step``, begun at ``now``, whose copy took ``cost_s``."""


@dataclass(slots=True)
class OverheadBudget:
    """Snapshots as often as ``share`` of the time allows, and at least every ``max_age_s`` seconds.

    The whole time of a copy counts, though most of it passes while the step computes. The age counts as of
    the next boundary, because that one would be too late. The state before the first step does not count: it
    lacks the optimizer's part, whose memory must be there before a joining replica waits for it. Raises
    ConfigError.
    """

    share: float = 0.02  # of the step time; 0: no snapshot by share
    max_age_s: float = 600.0  # seconds
    _at: float = field(default=-math.inf, repr=False)
    _cost_s: float = field(default=0.0, repr=False)
    _asked: float = field(default=math.inf, repr=False)

    def __post_init__(self) -> None:
        if not (0 <= self.share < math.inf and 0 < self.max_age_s < math.inf):
            raise ConfigError(
                f"OverheadBudget({self.share!r}, {self.max_age_s!r}): the share is from 0, the age above 0 s"
            )

    def is_due(self, step: int, now: float) -> bool:
        step_s, self._asked = max(0.0, now - self._asked), now
        if step < 1:
            return False
        age_s = now - self._at
        paid = self.share > 0 and self._cost_s <= self.share * age_s
        return paid or age_s + step_s + self._cost_s >= self.max_age_s

    def taken(self, step: int, now: float, cost_s: float) -> None:
        if step >= 1:
            self._at, self._cost_s = now, cost_s


@dataclass(slots=True)
class EverySteps:
    """Snapshots at every ``n``-th step, so at the same steps on all replicas. Raises ConfigError.

    The first may come later, where the memory for a large state is not there yet.
    """

    n: int
    _last: int = field(default=-1, repr=False)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"EverySteps({self.n!r}): give a number of steps from 1")

    def is_due(self, step: int, now: float) -> bool:
        return step % self.n == 0 and step != self._last

    def taken(self, step: int, now: float, cost_s: float) -> None:
        self._last = step


def policy_of(settings: Settings) -> SnapshotPolicy:
    """Return the policy that the settings ask for."""
    if settings.snapshot_every:
        return EverySteps(settings.snapshot_every)
    return OverheadBudget(settings.snapshot_share, settings.snapshot_max_age_s)
