"""When Python's cyclic collector looks at everything: while nothing changes.

By default it looks at every object of every session again and again, 3 s of each 10 with 10,000 sessions,
and last of all just when an epoch is told to all of them, a quarter of a second, for that is when objects are
made. So its young generations are larger here, and the oldest is looked at by a task of the service.
"""

import asyncio
import gc
from collections.abc import Callable

# Beats leave no cycles: the youngest generation is looked at after 300 sessions have come, and nearly never
# otherwise. The last one, by count of the middle one's collections, is never due on its own.
THRESHOLDS = (50_000, 10, 1 << 30)
# So many of the middle one's collections make a whole one due, as by default.
WHOLE = 10
LOOK_S = 0.25
# It is calm after so many looks, and nobody waits for that after so many.
CALM_LOOKS = 8
MOST_LOOKS = 240


class CollectionSchedule:
    """Which generation to collect now, look by look. The middle one is collected while it is small: what has
    come with it is old by then."""

    def __init__(self) -> None:
        self._calm = self._waited = 0

    def look(self, is_calm: bool, counts: tuple[int, int, int]) -> int | None:
        """``counts``: as ``gc.get_count`` gives them. None: nothing now."""
        _, young, middle = counts
        self._calm = self._calm + 1 if is_calm else 0
        self._waited = self._waited + 1 if young or middle >= WHOLE else 0
        if not self._waited or (self._calm < CALM_LOOKS and self._waited < MOST_LOOKS):
            return None
        self._waited = 0
        return 2 if middle >= WHOLE else 1


async def collect_when_calm(is_calm: Callable[[], bool]) -> None:
    """For ever: what is due, when it has been calm for two seconds, or has been due for a minute."""
    due = CollectionSchedule()
    while True:
        await asyncio.sleep(LOOK_S)
        generation = due.look(is_calm(), gc.get_count())
        if generation is not None:
            gc.collect(generation)
