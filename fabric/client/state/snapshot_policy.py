"""When a replica snapshots its state without a request. Joining members request further snapshots.

A policy is a small object. The session calls ``is_due`` once at every step boundary, and ``taken`` after
every copy and its check, requested ones included. Times are monotonic seconds.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

from fabric.errors import ConfigError
from fabric.runtime.config import Settings, parse_every


class SnapshotPolicy(Protocol):
    """One per process; called from one thread at a time."""

    def is_due(self, step: int, now: float) -> bool:
        """Whether the state at ``step`` should be snapshotted at this boundary."""

    def taken(self, step: int, now: float, cost_s: float) -> None:
        """Note a snapshot of ``step``, begun at ``now``, whose copy took ``cost_s``.

        Called again where the copy is then compared with the state, with the time of both.
        """


@dataclass(slots=True)
class OverheadBudget:
    """Snapshots as often as ``share`` of the time allows, and at least every ``max_age_s`` seconds.

    The whole time of a copy and of its check counts, although most of it overlaps the step's compute. A
    snapshot is due if waiting for the next boundary would exceed ``max_age_s``. A snapshot of the state
    before the first step does not count: it lacks the optimizer's part, whose memory must exist before a
    joining replica waits for a snapshot. Raises ConfigError.
    """

    share: float = 0.02  # copying time per step time; 0: snapshot by age alone
    max_age_s: float = 600.0  # greatest age of the newest snapshot, seconds
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
    """Snapshots at every ``n``-th step, so all replicas snapshot at the same steps. Raises ConfigError.

    The first snapshot may come later, if the memory for a large state is not allocated yet.
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
    every = parse_every("snapshot_every", settings.snapshot_every)
    if every.steps:
        return EverySteps(every.steps)
    return OverheadBudget(settings.snapshot_share, every.seconds)
