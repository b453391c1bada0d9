"""Runs Python's cyclic garbage collector while the lighthouse is idle.

By default the collector scans every object of every session again and again: with 10,000 sessions this takes
3 s of each 10 s. It also runs for a quarter of a second while an epoch is sent to all members, because
sending makes objects. So this module makes the young generations larger, and a task collects the oldest
generation.
"""

import asyncio
import gc
from collections.abc import Callable

# Heartbeats leave no cycles, so only new sessions (some 300) make the youngest generation due. The third
# number keeps Python from collecting the oldest generation.
THRESHOLDS = (50_000, 10, 1 << 30)
# The number of collections of the middle generation that make a full collection due, as in Python's default.
WHOLE = 10
LOOK_S = 0.25
# A due collection runs after so many idle looks in a row, or after so many looks of any kind.
CALM_LOOKS = 8
MOST_LOOKS = 240


class CollectionSchedule:
    """Chooses at each look the generation to collect."""

    def __init__(self) -> None:
        self._calm = self._waited = 0

    def look(self, is_calm: bool, counts: tuple[int, int, int]) -> int | None:
        """Return the generation to collect now, or None. ``counts``: from ``gc.get_count``."""
        _, young, middle = counts
        self._calm = self._calm + 1 if is_calm else 0
        self._waited = self._waited + 1 if young or middle >= WHOLE else 0
        if not self._waited or (self._calm < CALM_LOOKS and self._waited < MOST_LOOKS):
            return None
        self._waited = 0
        return 2 if middle >= WHOLE else 1


async def collect_when_calm(is_calm: Callable[[], bool]) -> None:
    """Collect for ever: a due generation after two calm seconds, or at the latest after a minute."""
    due = CollectionSchedule()
    while True:
        await asyncio.sleep(LOOK_S)
        generation = due.look(is_calm(), gc.get_count())
        if generation is not None:
            gc.collect(generation)
