"""The connections of members: their admission, their layouts, and writes that return at once.

Thousands of sessions get the same message, so the job encodes it once and passes the bytes to the transport.
The queue for a member that does not read is bounded. A connection is cut if its queue exceeds the bound, or
if it does not close in time.
"""

import asyncio
import math
import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from weakref import WeakValueDictionary

from aiohttp import web

from fabric.errors import FabricError, ProtocolError
from fabric.model import Record
from fabric.protocol.messages import wire
from fabric.protocol.messages.network import EpochNotice, HeartbeatAck, LeaderMessage, StatusTerms
from fabric.protocol.rules.layout_text import known_layout, layout_summary

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


def frame_of(message: EpochNotice | StatusTerms) -> bytes:
    """Return the frame of a message to checkpoint servers."""
    return _frame(_TEXT, wire.encode(message))


def notice_of(record: Record, servers: int) -> EpochNotice:
    """Build the notice that tells ``servers`` checkpoint servers which epoch is in force."""
    every_s = terms_of(max(servers, len(record.roster))).every_s
    return EpochNotice(record.fence, record.incident_id, record.reason, every_s, record.complete)


def terms_of(servers: int) -> StatusTerms:
    """Return how often each of so many checkpoint servers sends its status."""
    return StatusTerms(min(servers / _STATUSES_PER_S, 1.0))


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
        self.accepts_compression = False  # the member understands compressed messages
        self.address = ""  # the address of the member or checkpoint server
        self.is_trusted = False  # whether the client showed the lighthouse's own token
        self.is_ending = False
        self.heard_at = -math.inf  # when a checkpoint server last said something, by the loop's clock
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
        if self._transport is not None:
            self._cut = loop.call_later(_CLOSE_WITHIN_S, self._transport.abort)

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

    def send(self, connection: MemberConnection, frame: bytes) -> None:
        """Send a small frame now, and queue a large one.

        An epoch change is small: it reaches 10,000 members in a tenth of a second. In the queue it would wait
        behind the heartbeats and answers of other members. Small frames may overtake large ones; the protocol
        allows that.
        """
        if len(frame) >= _LARGE_BYTES:
            self.add(partial(connection.send, frame), len(frame))
        else:
            connection.send(frame)

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


# Admits connections a few at a time: after a fail-over thousands come back at once.
#
# Admitting a connection costs as much as a dozen heartbeats. So connections wait in a queue, and every turn
# of the loop admits a few. Heartbeats and answers travel between the turns. A long turn admits more. A
# connection that would have to wait too long is refused at once, with the time after which to connect
# again. That time grows with the number of refusals, which spreads the new attempts. The queue reports its
# overload to the cores, because a member that has not reconnected may wait in it.


# The number of members that the queue admits within the time that a member waits for its connection.
MOST_WAITING = 1000
_ADMITTED_PER_TURN = 8
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
        left = max(_ADMITTED_PER_TURN, min(int(took_s * self._per_s), _MOST_PER_TURN))
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


# Reads the layouts that sessions announce in a thread, because a long one would hold the loop of all jobs.
#
# The verdict about a layout is kept by its text. So only the first session of a layout waits for the
# thread.


class LayoutReader:
    """One thread for all jobs. A job has at most one layout in it, so no job waits for many of another."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "fabric-layouts")  # it begins with the first layout
        self._of_job: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read(self, job: str, text: str) -> None:
        """Read this layout. Raises ProtocolError for a text that is not the layout of a whole model."""
        async with self._of_job.setdefault(job, asyncio.Lock()):
            await asyncio.get_running_loop().run_in_executor(self._thread, layout_summary, text)


class LayoutGate:
    """Holds the messages of one connection back while the thread reads the layout of its session.

    ``take`` gets each held message once the layout is read, or ``refuse`` the error.
    """

    def __init__(self, reader: LayoutReader, job: str, transport: asyncio.Transport | None) -> None:
        self._reader = reader
        self._job = job
        self._transport = transport
        self._held: list[str] = []
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_shut(self) -> bool:
        return self._reading is not None

    def holds(self, text: str) -> bool:
        """Keep this message while the gate is shut; return whether it was kept."""
        if self._reading is None:
            return False
        self._held.append(text)
        return True

    def reads(
        self, layout: str, text: str, take: Callable[[str], bool], refuse: Callable[[FabricError], None]
    ) -> bool:
        """Shut the gate and read the layout of the session in ``text``, unless the layout is known."""
        if not layout or known_layout(layout) is not None:
            return False
        if self._transport is not None:
            self._transport.pause_reading()
        self._reading = asyncio.get_running_loop().create_task(self._read(layout, take, refuse))
        self._held.append(text)
        return True

    def close(self) -> None:
        """The connection has ended: forget its messages."""
        if self._reading is not None:
            self._reading.cancel()

    async def _read(
        self, layout: str, take: Callable[[str], bool], refuse: Callable[[FabricError], None]
    ) -> None:
        error: FabricError | None = None
        try:
            await self._reader.read(self._job, layout)
        except ProtocolError as refusal:
            error = refusal
        self._reading, held, self._held = None, self._held, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        if error is not None:
            refuse(error)
        for text in held if error is None else ():
            take(text)
