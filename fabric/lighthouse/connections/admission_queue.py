"""Connections are let in a few at a time: thousands come back at once after a fail-over.

Letting one in costs a dozen times what a beat costs. So those who knock stand in line, and a few are let
in per turn of the loop: between them go the beats of those who are inside, and what is told to them. Where
these make a turn long, more are let in.
Who would stand in line for longer than its patience lasts is sent away before anything is done for it, with
the time to come back, which grows with the number of those sent away, so that they come back spread out.
While anybody is made to wait, those who decide who is dead are told so: who has not come may stand here.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable

# As many as are let in within the time that a member waits for its connection.
MOST_WAITING = 1000
_PER_TURN = 8
# And more where a turn takes long, for those inside would have all the time: as many as PER_S says, up to
# this.
_MOST_PER_TURN = 50
# What a core that is busy with beats lets in, roughly; it only spreads those who come back.
PER_S = 500
_AGAIN_S = (1, 30)
# Who stands in line is let in, or gives up and comes again, within so many seconds.
_LINE_S = 3.0
# What is said of a crowd is said again when it has to last so much longer.
_LONGER_S = 0.5


class Door:
    """One for all jobs of a lighthouse. ``on_crowd`` is told for how many seconds from now on somebody may be
    waiting to get in, whenever that has become longer. ``per_s``: how many are let in, roughly."""

    def __init__(
        self,
        most_waiting: int = MOST_WAITING,
        on_crowd: Callable[[float], None] = lambda _: None,
        per_s: float = PER_S,
    ) -> None:
        self.on_crowd = on_crowd
        self._most_waiting = most_waiting
        self._per_s = per_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._sent_away = 0  # since the line was last empty
        self._told_until = 0.0
        self._turn_at = 0.0  # when the last ones were let in

    async def enter(self) -> int:
        """Wait for the turn; returns 0, or after how many seconds to come back: the line is too long."""
        if len(self._waiting) >= self._most_waiting:
            self._sent_away += 1
            seconds = math.ceil((self._most_waiting + self._sent_away) / self._per_s)
            seconds = min(max(seconds, _AGAIN_S[0]), _AGAIN_S[1])
            self._tell(seconds + _LINE_S)
            return seconds
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            self._turn_at = loop.time()
            loop.call_soon(self._let_in)
        await turn
        return 0

    def _let_in(self) -> None:
        loop = asyncio.get_running_loop()
        took_s, self._turn_at = loop.time() - self._turn_at, loop.time()
        left = max(_PER_TURN, min(int(took_s * self._per_s), _MOST_PER_TURN))
        while self._waiting and left:
            turn = self._waiting.popleft()
            if not turn.done():  # else it has gone away meanwhile
                turn.set_result(None)
                left -= 1
        if self._waiting:
            loop.call_soon(self._let_in)
            self._tell(_LINE_S)
        else:
            self._sent_away = 0

    def _tell(self, seconds: float) -> None:
        until = asyncio.get_running_loop().time() + seconds
        if until > self._told_until + _LONGER_S:
            self._told_until = until
            self.on_crowd(seconds + _LONGER_S)
