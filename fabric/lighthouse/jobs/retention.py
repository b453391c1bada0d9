"""Decides when a complete job may be forgotten, although clocks may be wrong.

The record holds the time of day at which the job ended, by the clock of the leader's host. The present leader
may be on another host. Either clock may be wrong, and may be corrected at any time.
"""

# If a clock is wrong when its host starts, the retention assumes that it is corrected within a day.
WITNESSED_S = 86400.0


class Retention:
    """The retention of one job in one term. The term began at ``unix_s`` (time of day) and ``now``
    (monotonic)."""

    def __init__(self, unix_s: float, now: float) -> None:
        self._ahead_s = unix_s - now
        self._over_at: float | None = None

    def is_in_use(self) -> None:
        """Note that the job is not complete, or has connections."""
        self._over_at = None

    def is_over(self, ended: float, seconds: float, unix_s: float, now: float) -> bool:
        """Whether ``seconds`` have passed since ``ended`` (Unix seconds; 0: unknown).

        Two clocks must agree: the time of day, and the time of day at the term's start plus the monotonic
        time since. So a clock change has no effect. At least a day without connections (or ``seconds``,
        if that is shorter) must lie in this term, because a clock may be wrong at its host's start."""
        if self._over_at is None:
            self._over_at = now
        since = ended or self._over_at + self._ahead_s
        age_s = min(unix_s, now + self._ahead_s) - since
        return age_s >= seconds and now - self._over_at >= min(seconds, WITNESSED_S)
