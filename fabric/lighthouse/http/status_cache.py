"""What the page shows of each job, computed once for all who look at it.

The view of a job grows with its members. Each of many viewers asks several times a second, and the same
thread answers the members' beats. So an answer is kept until it is due again, whoever asks meanwhile.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from fabric.lighthouse.http.job_status import job_view
from fabric.lighthouse.jobs.job import Job

# How often there is a new look at a job (more rarely where its members are many).
_LOOK_S = 0.25
_ROWS_PER_S = 4000


@dataclass(frozen=True, slots=True)
class CachedStatus:
    """A job's view and its newest recoveries as JSON, and when they were computed."""

    view: str
    recoveries: str
    at: float


class StatusCache:
    """The newest look at each job that somebody looks at."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: WeakKeyDictionary[Job, CachedStatus] = WeakKeyDictionary()

    def period_s(self, job: Job) -> float:
        """How long a look at this job counts, in seconds."""
        return max(_LOOK_S, len(job.view.peers) / _ROWS_PER_S)

    def look(self, job: Job) -> CachedStatus:
        """The job as it is now, or was less than ``period_s`` ago."""
        found, now = self._newest.get(job), self._clock()
        if found is None or now - found.at >= self.period_s(job):
            recoveries = json.dumps([recovery.to_json() for recovery in job.history.recoveries.kept[-50:]])
            found = self._newest[job] = CachedStatus(json.dumps(job_view(job)), recoveries, now)
        return found
