"""The in-memory twin of a Link: two ends on one event loop, for tests that need no sockets.

The behaviour is the contract's: ordered, bounded, goodbye on a clean close, one reason at the end.
Messages cross in a later turn of the loop, as they would over a socket, never inside ``send``.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from fabric.errors import ProtocolError
from fabric.transport.link import HEADER_BYTES, MAX_FRAME_BYTES, QUEUE_LIMIT_BYTES, OnClosed, OnMessage, frame


@dataclass(slots=True)
class _End:
    """The received messages and the state of one side; both links of a pair see both ends."""

    inbox: deque[bytes] = field(default_factory=deque)
    queued_bytes: int = 0
    reason: str = ""
    clean: bool = False
    leaving: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, data: bytes) -> None:
        self.inbox.append(data)
        self.queued_bytes += len(data) + HEADER_BYTES
        self.changed.set()

    def take(self) -> bytes | None:
        if self.leaving or not self.inbox:
            return None
        data = self.inbox.popleft()
        self.queued_bytes -= len(data) + HEADER_BYTES
        return data

    def finish(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.changed.set()
        self.ended.set()


class MemoryLink:
    """One end; made in pairs by ``memory_pair``. Reading begins with ``run``: see Link."""

    def __init__(self, peer: str, mine: _End, theirs: _End, limits_bytes: tuple[int, int]) -> None:
        self._peer = peer
        self._mine = mine
        self._theirs = theirs
        self._queue_limit_bytes, self._frame_limit_bytes = limits_bytes

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def reason(self) -> str:
        return self._mine.reason

    @property
    def clean(self) -> bool:
        return self._mine.clean

    def send(self, data: bytes) -> bool:
        """Queue one message: see Link."""
        if self._mine.reason or self._mine.leaving or self._theirs.reason:
            return False
        queued_bytes = self._theirs.queued_bytes + len(frame(data, self._frame_limit_bytes))
        if queued_bytes > self._queue_limit_bytes:
            self.abort(
                f"{self._peer} does not read: {queued_bytes} bytes wait for it, so the link was closed"
            )
            return False
        self._theirs.put(bytes(data))
        return True

    async def run(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        """Deliver messages until the link closes: see Link."""
        mine = self._mine
        try:
            while True:
                while (message := mine.take()) is not None:
                    on_message(message)
                self._meet_the_end()
                if mine.reason:
                    break
                mine.changed.clear()
                await mine.changed.wait()
        except ProtocolError as error:
            self.abort(f"{self._peer} sent what cannot be used: {error}")
        finally:
            self.abort(f"the link to {self._peer} was dropped here")
            on_closed(mine.reason)

    async def close(self, linger_s: float = 1.0) -> None:
        """Close cleanly: see Link."""
        if not self._mine.reason and not self._mine.leaving:
            self._mine.leaving = True
            self._theirs.clean = True
            self._theirs.changed.set()
            self._mine.changed.set()
            self._meet_the_end()
        try:
            async with asyncio.timeout(linger_s):
                await self._mine.ended.wait()
        except TimeoutError:
            self.abort(f"closed here; {self._peer} did not close its side within {linger_s:g} s")

    def abort(self, reason: str) -> None:
        """Close at once, like the end of a process: see Link."""
        if self._mine.reason:
            return
        self._mine.finish(reason)
        self._theirs.changed.set()
        if self._theirs.leaving:
            self._theirs.finish("closed here")

    def _meet_the_end(self) -> None:
        if self._mine.reason or not (self._theirs.reason or self._theirs.leaving):
            return
        if self._mine.leaving:
            self.abort("closed here")
        elif self._mine.clean:
            self.abort(f"{self._peer} closed the link")
        else:
            self.abort(f"{self._peer} is gone: its end of the link closed without a goodbye")


def memory_pair(
    first: str,
    second: str,
    queue_limit_bytes: int = QUEUE_LIMIT_BYTES,
    frame_limit_bytes: int = MAX_FRAME_BYTES,
) -> tuple[MemoryLink, MemoryLink]:
    """Two linked ends: the one that ``first`` holds (its peer is ``second``), and the other."""
    limits_bytes = (queue_limit_bytes, frame_limit_bytes)
    one, two = _End(), _End()
    return MemoryLink(second, one, two, limits_bytes), MemoryLink(first, two, one, limits_bytes)
