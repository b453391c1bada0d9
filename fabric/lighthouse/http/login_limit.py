"""Slows down an address that has shown many wrong tokens, so that nobody can guess a short token.

The address may still show a right token, because trainers and operators share addresses with others. Its
tokens are checked after a pause, and only a few of them wait at a time.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from aiohttp import web

log = logging.getLogger(__name__)

MOST_FAILURES = 20
WITHIN_S = 60.0
PAUSE_S = 1.0
# The most tokens of one address that wait for their check.
MOST_WAITING = 16
# The most addresses kept; the limit first forgets the address that failed longest ago.
_MOST_ADDRESSES = 4096


class TokenTries:
    """Wrong tokens by address: await ``pause`` before a check, and call ``failed`` after a wrong token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, pause_s: float = PAUSE_S) -> None:
        self._clock = clock
        self._pause_s = pause_s
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()
        self._waiting: Counter[str] = Counter()

    async def pause(self, address: str) -> None:
        """Wait where many wrong tokens came from the address. Answers 429 where many wait."""
        failures = self._failures.get(address)
        if failures is None or len(failures) < MOST_FAILURES or failures[0] + WITHIN_S <= self._clock():
            return
        if self._waiting[address] >= MOST_WAITING:
            why = f"{MOST_FAILURES} wrong tokens came from {address} in {WITHIN_S:g} s: try again in a moment"
            raise web.HTTPTooManyRequests(text=why, headers={"Retry-After": "1"})
        self._waiting[address] += 1
        try:
            await asyncio.sleep(self._pause_s)
        finally:
            self._waiting[address] -= 1
            if not self._waiting[address]:
                del self._waiting[address]

    def failed(self, address: str) -> None:
        """Count a wrong token from ``address``. The log has a line for every MOST_FAILURES of them."""
        failures = self._failures.setdefault(address, deque(maxlen=MOST_FAILURES))
        now = self._clock()
        if not failures or failures[-1] + WITHIN_S <= now:
            log.warning("a wrong token came from %s", address)
        elif len(failures) == MOST_FAILURES - 1:
            log.warning("%d wrong tokens came from %s: its tokens wait from now on", MOST_FAILURES, address)
        failures.append(now)
        self._failures.move_to_end(address)
        if len(self._failures) > _MOST_ADDRESSES:
            self._failures.popitem(last=False)
