"""The unfinished handshakes of a listener, which accepts every connection and drops old handshakes for room.

A stranger needs no token to connect, and may stay silent for as long as a handshake may take. If the listener
waited for silent connections, some hundred of them would keep a job's own links from forming. So the listener
always accepts, and drops the oldest handshake when there are too many. If one address has too many, its own
oldest handshake is dropped.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

# The most handshakes under way at a time; one address may have half of them.
MAX_HANDSHAKES = 256
# A member of a large job answers within this time, even if all others dial at once. No handshake younger than
# this is dropped for another address.
_AT_LEAST_S = 0.25
_TELL_EVERY_S = 60.0


@dataclass(eq=False, slots=True)
class Handshake:
    """A handshake that began at ``begun``, by the loop's clock; ``drop`` ends it."""

    address: str
    begun: float
    drop: Callable[[], object]


class Handshakes:
    """The handshakes under way, the oldest first."""

    def __init__(self, most: int = MAX_HANDSHAKES) -> None:
        self._most = most
        self._open: dict[Handshake, None] = {}
        self._of: Counter[str] = Counter()
        self._ended = asyncio.Event()
        self._dropped = 0
        self._told = float("-inf")

    def begin(self, address: str, drop: Callable[[], object]) -> Handshake:
        """Note a connection that was just accepted."""
        handshake = Handshake(address, asyncio.get_running_loop().time(), drop)
        self._open[handshake] = None
        self._of[address] += 1
        return handshake

    def end(self, handshake: Handshake) -> None:
        """Remove a handshake that is over."""
        if handshake in self._open:
            del self._open[handshake]
            self._of[handshake.address] -= 1
            if not self._of[handshake.address]:
                del self._of[handshake.address]
            self._ended.set()

    async def make_room(self, address: str) -> None:
        """Return when the next connection may be accepted; the last one came from ``address``."""
        if self._of[address] > self._most // 2:
            self._drop(next(h for h in self._open if h.address == address))
        while len(self._open) > self._most:
            oldest = next(iter(self._open))
            wait_s = oldest.begun + _AT_LEAST_S - asyncio.get_running_loop().time()
            if wait_s <= 0:
                self._drop(oldest)
                continue
            self._ended.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._ended.wait()
            except TimeoutError:
                continue
        # ``accept`` does not yield to the event loop while connections wait, so yield here.
        await asyncio.sleep(0)

    def drop_oldest(self) -> None:
        """Drop the oldest handshake, if any, which frees a descriptor."""
        oldest = next(iter(self._open), None)
        if oldest is not None:
            self._drop(oldest)

    def _drop(self, handshake: Handshake) -> None:
        self.end(handshake)
        handshake.drop()
        self._dropped += 1
        now = asyncio.get_running_loop().time()
        if now - self._told >= _TELL_EVERY_S:
            self._told = now
            logger.warning(
                "too many connections send no greeting: the oldest was dropped, from %s, %d so far: look who"
                " opens them",
                handshake.address,
                self._dropped,
            )
