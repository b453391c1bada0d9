"""How long a complete job is kept, by clocks of which nobody knows that they are right.

The record says at which time of day the job ended, by the clock of the host whose lighthouse led then.
Today's leader may be on another host, and either clock may be wrong, or be set right at any moment.
"""

# A clock that was wrong when its host started is set right within a day, or somebody is told.
WITNESSED_S = 86400.0


class Retention:
    """Of one job in one term, which began at ``unix_s``, a time of day, and ``now``, seconds of a clock that
    only goes on."""

    def __init__(self, unix_s: float, now: float) -> None:
        self._ahead_s = unix_s - now
        self._over_at: float | None = None

    def is_in_use(self) -> None:
        """The job is not complete, or somebody speaks to it."""
        self._over_at = None

    def is_over(self, ended: float, seconds: float, unix_s: float, now: float) -> bool:
        """Whether it is ``seconds`` since ``ended`` (Unix seconds; 0: a record of an older version, which
        does not say). That must be so by the time of day as it is now, and as it was when the term began with
        what has gone by since: so no leap of it counts. And of a week at least a day must have gone by in
        this term, without anybody who spoke to the job: a clock may start wrong."""
        if self._over_at is None:
            self._over_at = now
        since = ended or self._over_at + self._ahead_s
        age_s = min(unix_s, now + self._ahead_s) - since
        return age_s >= seconds and now - self._over_at >= min(seconds, WITNESSED_S)
