"""The status of each job as JSON, computed once for all viewers.

The status of a job grows with its members. Each of many viewers asks several times a second, and the same
thread answers heartbeats. So every viewer gets the same answer until the next one is due.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from fabric.lighthouse.http.job_status import job_view
from fabric.lighthouse.jobs.job import Job

# Seconds between two computations of a job's status, more in a job of many members.
_LOOK_S = 0.25
_ROWS_PER_S = 4000


@dataclass(frozen=True, slots=True)
class CachedStatus:
    """A job's view and its newest recoveries as JSON, and when they were computed."""

    view: str
    recoveries: str
    at: float


class StatusCache:
    """The newest status of each job that has viewers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: WeakKeyDictionary[Job, CachedStatus] = WeakKeyDictionary()

    def period_s(self, job: Job) -> float:
        """Return the seconds for which a computed status of this job is used."""
        return max(_LOOK_S, len(job.view.peers) / _ROWS_PER_S)

    def look(self, job: Job) -> CachedStatus:
        """Return the job's status, computed at most ``period_s`` ago."""
        cached, now = self._newest.get(job), self._clock()
        if cached is None or now - cached.at >= self.period_s(job):
            recoveries = json.dumps([recovery.to_json() for recovery in job.history.recoveries.kept[-50:]])
            cached = self._newest[job] = CachedStatus(json.dumps(job_view(job)), recoveries, now)
        return cached
