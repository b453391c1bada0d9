"""Admits connections a few at a time: after a fail-over thousands come back at once.

Admitting a connection costs as much as a dozen heartbeats. So connections wait in a queue, and every turn of
the loop admits a few. Heartbeats and answers travel between the turns. A long turn admits more.
A connection that would wait longer than its patience is refused at once, with the time after which to come
back. That time grows with the number of refusals, which spreads the returns.
The cores hear that connections wait: a member that has not come back may stand in this queue.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable

# As many as the queue admits within the time that a member waits for its connection.
MOST_WAITING = 1000
_PER_TURN = 8
# A long turn admits as many as PER_S says, up to this; otherwise members inside would take all the time.
_MOST_PER_TURN = 50
# The rate at which a busy core admits, roughly; the number only spreads the returns.
PER_S = 500
_AGAIN_S = (1, 30)
# Within so many seconds a waiting connection is admitted, or gives up and comes again.
_QUEUE_S = 3.0
# An overload is reported again when it has to last so much longer.
_LONGER_S = 0.5


class AdmissionQueue:
    """One queue for all jobs of a lighthouse. Whenever the overload lasts longer than reported,
    ``on_overload`` hears for how many seconds from now connections may wait. ``per_s``: the rate of
    admission, roughly."""

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
        self._refused = 0  # since the queue was last empty
        self._reported_until = 0.0
        self._turn_at = 0.0  # when the queue last admitted

    async def admit(self) -> int:
        """Wait for admission and return 0; from a full queue return at once after how many seconds to come
        back."""
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
            if not turn.done():  # a connection that went away has cancelled it
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
