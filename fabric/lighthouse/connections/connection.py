"""One member's WebSocket as a job uses it: a write returns at once.

Thousands of sessions get the same message, so the job encodes it once and passes the bytes to the transport.
The queue for a member that does not read is bounded. A connection is cut if its queue exceeds the bound, or
if it does not close in time.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from aiohttp import web

from fabric.model import Record
from fabric.protocol.messages import wire
from fabric.protocol.messages.network import EpochNotice, HeartbeatAck, LeaderMessage

# Fabric's close codes; 1008 is the standard's "policy violation", used for a message that is not valid.
NOT_THE_LEADER = 4001
REPLACED = 4002
REFUSED = 4003
MALFORMED = 1008
DEFECT = 1011

MAX_QUEUED_BYTES = 64 << 20
_CLOSE_WITHIN_S = 2.0
# A close frame carries at most 125 bytes, of which the code takes two.
_MAX_CLOSE_REASON = 123


# The number of messages kept as frames: those of one epoch change.
_FRAMES = 16
_TEXT, _BINARY = 0x81, 0x82
# Checkpoint servers of a large job send their status less often, down to once a second.
_STATUSES_PER_S = 2000
# Frames of at least this size are sent at a bounded pace, given as bytes per turn of the loop, bytes per
# second, and pieces of work per turn (some 20 microseconds each). A first roster for 10,000 members is 1.8
# GB: sent at once, it would fill the kernel's buffers and the network, and delay heartbeats for seconds.
_LARGE_BYTES = 16 * 1024
_PER_TURN_BYTES = 2 << 20
_PER_S_BYTES = 256 << 20
_PER_TURN = 200
# A pause shorter than this is skipped, because timers are not more precise.
_PAUSE_S = 0.001


class FrameCache:
    """Encodes messages as frames; a message to many members is encoded once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, bool], tuple[LeaderMessage, bytes]] = {}

    def of(self, message: LeaderMessage, accepts_compression: bool) -> bytes:
        """Return the frame of this message, compressed if long and the receiver ``accepts_compression``."""
        if type(message) is HeartbeatAck:
            return _frame(_TEXT, wire.encode(message))  # an acknowledgement goes to a single member
        # The cache keeps the message with its frame, so that no other message can have its id.
        cached = self._made.get((id(message), accepts_compression))
        if cached is not None:
            return cached[1]
        plain = wire.encode(message)
        data = wire.packed(plain) if accepts_compression else plain
        frame = _frame(_TEXT if data is plain else _BINARY, data)
        if len(self._made) >= _FRAMES:
            self._made.clear()
        self._made[id(message), accepts_compression] = message, frame
        return frame


def text_frame(text: str) -> bytes:
    """Return the frame of an encoded text."""
    return _frame(_TEXT, text.encode())


def notice_of(record: Record) -> str:
    """Build the notice that tells checkpoint servers which epoch is in force, as text."""
    every_s = min(len(record.roster) / _STATUSES_PER_S, 1.0)
    return wire.encode(
        EpochNotice(record.fence, record.incident_id, record.reason, every_s, record.complete)
    ).decode()


def _frame(kind: int, data: bytes) -> bytes:
    """Build a server's frame: in one piece and not masked."""
    size = len(data)
    if size < 126:
        return bytes((kind, size)) + data
    if size < 1 << 16:
        return struct.pack(">BBH", kind, 126, size) + data
    return struct.pack(">BBQ", kind, 127, size) + data


class MemberConnection:
    """The WebSocket of one process. ``send`` frames, and finish with ``end``."""

    def __init__(self, socket: web.WebSocketResponse, transport: asyncio.Transport | None) -> None:
        self.replica = ""
        self.incarnation = -1
        self.rank = -1  # the rank, on a checkpoint server's connection
        self.accepts_compression = False  # the member understands compressed messages
        self.address = ""  # the address of the member or checkpoint server
        self.is_trusted = False  # whether the client showed the lighthouse's own token
        self.is_ending = False
        self._socket = socket
        self._transport = transport
        self._closing: asyncio.Task[None] | None = None
        self._cut: asyncio.TimerHandle | None = None

    def is_of(self, replica: str, incarnation: int) -> bool:
        """Whether this is the connection of exactly this process."""
        return self.incarnation == incarnation and self.replica == replica

    def send(self, frame: bytes) -> None:
        """Write one frame; cut a connection with too many unread bytes."""
        transport = self._transport
        if self.is_ending or transport is None or transport.is_closing():
            return
        transport.write(frame)
        if transport.get_write_buffer_size() > MAX_QUEUED_BYTES:
            self.is_ending = True
            transport.abort()

    def end(self, code: int, reason: str) -> None:
        """Close with ``code`` after all sent frames; if they take too long, cut the connection."""
        if self.is_ending:
            return
        self.is_ending = True
        loop = asyncio.get_running_loop()
        self._closing = loop.create_task(self._close(code, reason))
        self._cut = loop.call_later(_CLOSE_WITHIN_S, self._abort)

    async def ended(self) -> None:
        """Wait until a close that has begun is complete."""
        if self._closing is not None:
            await self._closing

    def forget(self) -> None:
        """Note that the socket is closed, so that it is not cut later."""
        self.is_ending = True
        if self._cut is not None:
            self._cut.cancel()
            self._cut = None

    async def _close(self, code: int, reason: str) -> None:
        text = reason.encode()[:_MAX_CLOSE_REASON].decode(errors="ignore")
        with suppress(ConnectionError):  # the task that reads this socket gets the error, too
            await self._socket.close(code=code, message=text.encode())

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class WorkQueue:
    """Does queued work in order, ``per_turn`` pieces in one turn of the loop. Thousands of members answer at
    once; neither the lease nor heartbeats may wait for all these answers."""

    def __init__(self, per_turn: int = _PER_TURN) -> None:
        self._per_turn = per_turn
        self._waiting: deque[tuple[Callable[[], object], int]] = deque()
        self._has_turn = False

    def add(self, work: Callable[[], object], size: int = 0) -> None:
        """Queue ``work``, which writes ``size`` bytes."""
        self._waiting.append((work, size))
        if not self._has_turn:
            self._take_turn(0.0)

    def _take_turn(self, pause_s: float) -> None:
        loop, self._has_turn = asyncio.get_running_loop(), True
        if pause_s < _PAUSE_S:
            loop.call_soon(self._turn)
        else:
            loop.call_later(pause_s, self._turn)

    def _turn(self) -> None:
        written, left = 0, self._per_turn
        try:
            while self._waiting and written < _PER_TURN_BYTES and left:
                work, size = self._waiting.popleft()
                written, left = written + size, left - 1
                work()
        finally:  # after an error the loop logs the piece and does the other pieces
            self._has_turn = False
            if self._waiting:
                self._take_turn(written / _PER_S_BYTES)


class SendPacer:
    """Queues large frames and sends small ones at once. An epoch change is small: it reaches 10,000 members
    in a tenth of a second. In the queue it would wait behind the heartbeats and answers of other members.
    Small frames may overtake large ones; the protocol allows that."""

    def __init__(self) -> None:
        self._turns = WorkQueue()

    def send(self, connection: MemberConnection, frame: bytes) -> None:
        """Send a small frame now, and queue a large one."""
        if len(frame) >= _LARGE_BYTES:
            self._turns.add(partial(connection.send, frame), len(frame))
        else:
            connection.send(frame)
