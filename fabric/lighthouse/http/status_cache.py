"""The status of each job as JSON, computed once for all viewers.

The status of a job grows with its members. Each of many viewers asks several times a second, and the same
thread answers heartbeats. So every viewer gets the same answer until the next one is due.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from fabric.lighthouse.http.job_status import job_text
from fabric.lighthouse.jobs.job import Job

# Seconds between two computations of a job's status, more in a job of many members.
_LOOK_S = 0.25
_ROWS_PER_S = 4000
# The newest recoveries that the page shows: each may name a hundred replicas.
_SHOWN = 20


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
        self._under_way: dict[Job, asyncio.Task[CachedStatus]] = {}

    def period_s(self, job: Job) -> float:
        """Return the seconds for which a computed status of this job is used."""
        return max(_LOOK_S, len(job.core.state.liveness.peers) / _ROWS_PER_S)

    async def look(self, job: Job) -> CachedStatus:
        """Return the job's status, computed at most ``period_s`` ago, and once for all viewers."""
        cached = self._newest.get(job)
        if cached is None or self._clock() - cached.at >= self.period_s(job):
            task = self._under_way.get(job)
            if task is None:
                task = self._under_way[job] = asyncio.create_task(self._compute(job))
                task.add_done_callback(lambda _: self._under_way.pop(job, None))
            cached = await asyncio.shield(task)
        return cached

    async def _compute(self, job: Job) -> CachedStatus:
        now, view = self._clock(), await job_text(job)
        shown = job.history.recoveries.kept[-_SHOWN:]
        recoveries = json.dumps([recovery.to_json() for recovery in shown])
        cached = self._newest[job] = CachedStatus(view, recoveries, now)
        return cached
