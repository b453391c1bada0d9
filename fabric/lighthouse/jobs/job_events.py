"""A job's recent events, one line each, for people and for tools that follow them.

The newest ``CAPACITY`` events are kept. An id is the time in microseconds, raised where needed so that ids
only grow. So a reader can go on at another lighthouse after a fail-over, with the id of its last event. An id
is the time of day at which the log began plus the monotonic time since, so a clock change does not affect it.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from itertools import takewhile

from fabric.lighthouse.election.election import boot_time

CAPACITY = 10_000
# The most events that one turn of the loop writes for a reader.
PIECE = 500
_MAX_WHY = 2000


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One event of a job."""

    id: int
    t: float  # time of the event, Unix seconds
    kind: str
    epoch: int
    about: str  # the replica that the event is about, or empty
    why: str  # why the event happened, in one sentence
    incident_id: str = ""  # id of the event's incident, if any; replicas and checkpoint servers log the id


class EventLog:
    """Append with ``add``; read with ``after``; ``follow`` waits for more until ``end_followers``."""

    def __init__(
        self,
        *,
        capacity: int = CAPACITY,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = boot_time,
    ) -> None:
        self._kept: deque[JobEvent] = deque(maxlen=capacity)
        self._clock, self._steady = clock, steady
        self._ahead_s = clock() - steady()
        self._last = 0
        self._changed = asyncio.Event()
        self._round = 0

    def add(self, kind: str, epoch: int, about: str, why: str, incident_id: str = "") -> JobEvent:
        self._last = max(self._last + 1, round((self._steady() + self._ahead_s) * 1e6))
        event = JobEvent(self._last, self._clock(), kind, epoch, about, why[:_MAX_WHY], incident_id)
        self._kept.append(event)
        self._wake()
        return event

    @property
    def newest(self) -> int:
        """Id of the newest event, 0 before the first."""
        return self._last

    def after(self, last: int) -> list[JobEvent]:
        """Return the kept events with a greater id, oldest first."""
        newer = list(takewhile(lambda event: event.id > last, reversed(self._kept)))
        newer.reverse()
        return newer

    async def follow(self, last: int) -> AsyncGenerator[list[JobEvent], None]:
        """Yield batches of events after ``last``, and wait for more. Ends with ``end_followers``."""
        begun = self._round
        while True:
            changed = self._changed
            newer = self.after(last)[:PIECE]
            if newer:
                last = newer[-1].id
                yield newer
            elif self._round != begun:
                return
            else:
                await changed.wait()

    def end_followers(self) -> None:
        """Give followers the remaining events, and then the end."""
        self._round += 1
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
