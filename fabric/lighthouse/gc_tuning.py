"""Runs Python's cyclic garbage collector while the lighthouse is idle.

By default the collector scans every object of every session again and again: with 10,000 sessions 3 s of each
10 s. It also runs a quarter of a second just when an epoch goes to all members, because objects are made
then. So the young generations are larger here, and a task of the service collects the oldest.
"""

import asyncio
import gc
from collections.abc import Callable

# Heartbeats leave no cycles, so only new sessions (some 300) make the youngest generation due. The oldest
# one, counted in collections of the middle one, is never due on its own.
THRESHOLDS = (50_000, 10, 1 << 30)
# So many collections of the middle generation make a full one due, as by default.
WHOLE = 10
LOOK_S = 0.25
# Calm begins after so many idle looks. After so many looks in all the collection runs without calm.
CALM_LOOKS = 8
MOST_LOOKS = 240


class CollectionSchedule:
    """Chooses the generation to collect, look by look; the middle one while it is small."""

    def __init__(self) -> None:
        self._calm = self._waited = 0

    def look(self, is_calm: bool, counts: tuple[int, int, int]) -> int | None:
        """Return the generation to collect now, or None. ``counts``: of ``gc.get_count``."""
        _, young, middle = counts
        self._calm = self._calm + 1 if is_calm else 0
        self._waited = self._waited + 1 if young or middle >= WHOLE else 0
        if not self._waited or (self._calm < CALM_LOOKS and self._waited < MOST_LOOKS):
            return None
        self._waited = 0
        return 2 if middle >= WHOLE else 1


async def collect_when_calm(is_calm: Callable[[], bool]) -> None:
    """Collect for ever: when a generation is due and two seconds were calm, or after a minute."""
    due = CollectionSchedule()
    while True:
        await asyncio.sleep(LOOK_S)
        generation = due.look(is_calm(), gc.get_count())
        if generation is not None:
            gc.collect(generation)
