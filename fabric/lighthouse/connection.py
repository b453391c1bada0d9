"""One member's WebSocket as a job sees it: messages are queued at once and sent by a task.

A core's effects are performed without waiting, so a member that does not read must not hold anybody up:
what waits for it is bounded, and a connection that is over the bound, or that does not close in time, is
cut.
"""

import asyncio
from dataclasses import dataclass

from aiohttp import web

from fabric.protocol import wire
from fabric.protocol.messages import LeaderMessage

# Close codes of our own; 1008 is the standard's "policy violation" for what cannot be understood.
NOT_THE_LEADER = 4001
REPLACED = 4002
REFUSED = 4003
MALFORMED = 1008
DEFECT = 1011

MAX_QUEUED_BYTES = 64 << 20
_CLOSE_WITHIN_S = 2.0
# A close frame carries at most 125 bytes, of which the code takes two.
_MAX_CLOSE_REASON = 123


@dataclass(frozen=True, slots=True)
class _Close:
    code: int
    reason: str


class Connection:
    """Queue with ``send``, finish with ``end``; ``run`` does the sending until the socket is closed."""

    def __init__(self, socket: web.WebSocketResponse, transport: asyncio.Transport | None) -> None:
        self.replica = ""
        self.incarnation = -1
        self.is_ending = False
        self._socket = socket
        self._transport = transport
        self._queue: asyncio.Queue[str | _Close] = asyncio.Queue()
        self._queued_bytes = 0
        self._cut: asyncio.TimerHandle | None = None

    def is_of(self, replica: str, incarnation: int) -> bool:
        """Whether this is the connection of exactly this process."""
        return (self.replica, self.incarnation) == (replica, incarnation)

    def send(self, message: LeaderMessage) -> None:
        """Queue one message; a connection that has fallen too far behind is cut."""
        if not self.is_ending:
            self.post(wire.encode(message).decode())

    def post(self, text: str) -> None:
        """Queue what was encoded once for many."""
        if self.is_ending:
            return
        self._queued_bytes += len(text)
        if self._queued_bytes > MAX_QUEUED_BYTES:
            self.is_ending = True
            self._abort()
            return
        self._queue.put_nowait(text)

    def end(self, code: int, reason: str) -> None:
        """Close with ``code`` after everything queued, or without it when that takes too long."""
        if self.is_ending:
            return
        self.is_ending = True
        self._queue.put_nowait(_Close(code, reason))
        self._cut = asyncio.get_running_loop().call_later(_CLOSE_WITHIN_S, self._abort)

    async def run(self) -> None:
        """Send what is queued until ``end`` or until the peer has gone."""
        while True:
            item = await self._queue.get()
            if isinstance(item, _Close):
                reason = item.reason.encode()[:_MAX_CLOSE_REASON].decode(errors="ignore")
                await self._socket.close(code=item.code, message=reason.encode())
                return
            try:
                await self._socket.send_str(item)
            except ConnectionError:
                return  # the reader of this socket learns of it too
            self._queued_bytes -= len(item)

    def forget(self) -> None:
        """The socket is closed: nothing is left to cut."""
        self.is_ending = True
        if self._cut is not None:
            self._cut.cancel()
            self._cut = None

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
