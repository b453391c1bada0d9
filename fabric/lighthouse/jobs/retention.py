"""How long a complete job is kept, by clocks that may be wrong.

The record says at which time of day the job ended, by the clock of the leader's host at that time. Today's
leader may be on another host. Either clock may be wrong, or be set right at any moment.
"""

# A clock that was wrong when its host started is set right within a day, or an operator hears of it.
WITNESSED_S = 86400.0


class Retention:
    """Of one job in one term, which began at ``unix_s``, a time of day, and ``now``, seconds of a clock that
    only goes on."""

    def __init__(self, unix_s: float, now: float) -> None:
        self._ahead_s = unix_s - now
        self._over_at: float | None = None

    def is_in_use(self) -> None:
        """Note that the job is not complete, or has connections."""
        self._over_at = None

    def is_over(self, ended: float, seconds: float, unix_s: float, now: float) -> bool:
        """Whether ``seconds`` have passed since ``ended`` (Unix seconds; 0: unknown).

        Both clocks must say so: the time of day now, and that of the term's start plus the time since. So a
        clock change does not count. Of a week at least a day without connections must lie in this term,
        because a clock may start wrong."""
        if self._over_at is None:
            self._over_at = now
        since = ended or self._over_at + self._ahead_s
        age_s = min(unix_s, now + self._ahead_s) - since
        return age_s >= seconds and now - self._over_at >= min(seconds, WITNESSED_S)
