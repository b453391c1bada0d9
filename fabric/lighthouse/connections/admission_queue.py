"""Admits connections a few at a time: after a fail-over thousands come back at once.

Admitting a connection costs as much as a dozen heartbeats. So connections wait in a queue, and every turn of
the loop admits a few. Heartbeats and answers travel between the turns. A long turn admits more. A connection
that would have to wait too long is refused at once, with the time after which to connect again. That time
grows with the number of refusals, which spreads the new attempts. The queue reports its overload to the
cores, because a member that has not reconnected may wait in it.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable

# The number of members that the queue admits within the time that a member waits for its connection.
MOST_WAITING = 1000
_PER_TURN = 8
# The most members that one turn admits. A long turn must admit many, or admitted members take all the time.
_MOST_PER_TURN = 50
# Roughly the rate at which a busy lighthouse admits members; the rate only spreads new attempts.
PER_S = 500
_AGAIN_S = (1, 30)
# Within so many seconds a waiting connection is admitted, or gives up and connects again.
_QUEUE_S = 3.0
# An overload is reported again when its expected end has moved by this many seconds.
_LONGER_S = 0.5


class AdmissionQueue:
    """One queue for all jobs of a lighthouse. When the overload lasts longer than reported, ``on_overload``
    gets the number of seconds for which connections may still wait. ``per_s``: rough rate of admission."""

    def __init__(
        self,
        most_waiting: int = MOST_WAITING,
        on_overload: Callable[[float], None] = lambda _: None,
        per_s: float = PER_S,
    ) -> None:
        self.on_overload = on_overload
        self._most_waiting = most_waiting
        self._per_s = per_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._refused = 0  # number of refusals since the queue was last empty
        self._reported_until = 0.0
        self._turn_at = 0.0  # the time when the queue last admitted a member

    async def admit(self) -> int:
        """Wait for admission and return 0; if the queue is full, return at once the seconds until the next
        attempt."""
        if len(self._waiting) >= self._most_waiting:
            self._refused += 1
            seconds = math.ceil((self._most_waiting + self._refused) / self._per_s)
            seconds = min(max(seconds, _AGAIN_S[0]), _AGAIN_S[1])
            self._report(seconds + _QUEUE_S)
            return seconds
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            self._turn_at = loop.time()
            loop.call_soon(self._admit_next)
        await turn
        return 0

    def _admit_next(self) -> None:
        loop = asyncio.get_running_loop()
        took_s, self._turn_at = loop.time() - self._turn_at, loop.time()
        left = max(_PER_TURN, min(int(took_s * self._per_s), _MOST_PER_TURN))
        while self._waiting and left:
            turn = self._waiting.popleft()
            if not turn.done():  # the closing of the member's connection may have cancelled this turn
                turn.set_result(None)
                left -= 1
        if self._waiting:
            loop.call_soon(self._admit_next)
            self._report(_QUEUE_S)
        else:
            self._refused = 0

    def _report(self, seconds: float) -> None:
        until = asyncio.get_running_loop().time() + seconds
        if until > self._reported_until + _LONGER_S:
            self._reported_until = until
            self.on_overload(seconds + _LONGER_S)
