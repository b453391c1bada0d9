"""The two WebSockets of a job: a trainer's session, and the trainer statuses of a checkpoint server.

A message that is not valid closes only its own connection, with a sentence. The lighthouse sends no pings on
a session: a trainer may hold the interpreter's lock for long and must not lose its session for that. The
kernel's keep-alive finds hosts that have vanished.
"""

import asyncio
import logging
import socket as sockets
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from aiohttp import WSCloseCode, WSMsgType, web

from fabric.errors import FabricError, ProtocolError, StoreUnavailable
from fabric.lighthouse.connections.connection import (
    MALFORMED,
    NOT_THE_LEADER,
    FrameCache,
    LayoutGate,
    MemberConnection,
)
from fabric.lighthouse.connections.validation import (
    MAX_STATUS_BYTES,
    MOST_BYTES,
    check_name,
    decode_member,
    decode_session,
    decode_statuses,
    parse_policy,
)
from fabric.lighthouse.http.tokens import opened_with_own
from fabric.lighthouse.jobs.job import REFUSED, Job
from fabric.lighthouse.jobs.jobs import Jobs
from fabric.protocol.messages.network import OpenSession, Rejected, StatusUnchanged
from fabric.protocol.messages.wire import sender_of
from fabric.runtime.http.connection_limit import OuterProtocol

# A fast path for the usual frames of a session: short masked text, not fragmented.
#
# The library wakes a task for every message, which costs as much as the message itself, thousands of
# times a second. So this module reads the connection before the library does, and answers pings. The first
# unusual frame (fragmented, long, a close, malformed) and all later frames go to the library. This module
# has handled all earlier frames, so the order stays.


# The first byte of an unfragmented text. A frame's second byte is its size; two values mean: size follows.
_WHOLE_TEXT, _PING, _PONG = 0x81, 0x89, 0x8A
_MASKED = 0x80
_TWO_BYTES, _EIGHT_BYTES = _MASKED + 126, _MASKED + 127


class FastFrames(OuterProtocol):
    """The protocol of a connection after its upgrade; ``library`` is the former one.

    ``on_text`` gets every usual text. Once it returns False, the library reads on. ``write`` sends a frame.
    """

    def __init__(
        self, library: asyncio.Protocol, on_text: Callable[[str], bool], write: Callable[[bytes], object]
    ) -> None:
        super().__init__(library)
        self._on_text = on_text
        self._write = write
        self._rest = b""
        self._is_over = False

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            self._library.data_received(data)
            return
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        while end >= at + 2 and not self._is_over:
            kind, size, begin = data[at], data[at + 1] - _MASKED, at + 6
            is_ping = kind == _PING and 0 <= size < _TWO_BYTES - _MASKED
            if not is_ping and (kind != _WHOLE_TEXT or not 0 <= size < _EIGHT_BYTES - _MASKED):
                self._is_over = True
                break
            if size == _TWO_BYTES - _MASKED:
                size, begin = int.from_bytes(data[at + 2 : at + 4], "big"), at + 8
            if end < begin + size:  # the frame has not arrived whole, or even its size has not
                break
            masks = int.from_bytes((data[begin - 4 : begin] * (size // 4 + 1))[:size], "little")
            masked = int.from_bytes(data[begin : begin + size], "little")
            body = (masked ^ masks).to_bytes(size, "little")
            if is_ping:
                self._write(bytes((_PONG, size)) + body)
                at = begin + size
                continue
            try:
                text = body.decode()
            except UnicodeDecodeError:
                self._is_over = True
                break
            at = begin + size
            self._is_over = not self._on_text(text)
        self._rest = data[at:]
        if self._is_over:
            rest, self._rest = self._rest, b""
            self._library.data_received(rest)


log = logging.getLogger(__name__)

FIRST_MESSAGE_S = 10.0
STATUS_SILENCE_S = 10.0
_CLOSE_S = 2.0
_KEEP_ALIVE = (
    (sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1),
    (sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, 10),
    (sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, 5),
    (sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, 3),
)


class MemberSocket(ABC):
    """One WebSocket of a job. A message that is not valid closes it with a sentence."""

    most_bytes = MAX_STATUS_BYTES
    silence_s: float | None = None  # the longest silence of the peer after its first message; None: any

    def __init__(self, request: web.Request, jobs: Jobs) -> None:
        self._request, self._jobs, self._name = request, jobs, request.match_info["job"]
        self._job: Job | None = None  # found or made when the first valid message arrives
        self._gate = LayoutGate(jobs.layouts, self._name, request.transport)
        jobs.find(self._name)

    @abstractmethod
    def hear(self, text: str) -> bool:
        """Take one message; return whether to go on. Raises FabricError."""

    @abstractmethod
    def left(self, job: Job) -> None:
        """Note that the connection is closed."""

    async def serve(self) -> web.WebSocketResponse:
        """Take messages until either side closes."""
        self._socket, self._connection = await _accept(self._request, self.most_bytes)
        if (transport := self._request.transport) is not None:
            library = transport.get_protocol()
            assert isinstance(library, asyncio.Protocol)
            # A peer that pings and reads no answer is cut.
            transport.set_protocol(FastFrames(library, self.on_text, self._connection.send))
        # A separate task, because every message would wake the request's task and all its callers.
        reading = asyncio.get_running_loop().create_task(self._read())
        try:
            await reading
            await self._connection.ended()
        finally:
            reading.cancel()
            self._gate.close()
            if self._job is not None:
                self.left(self._job)
                self._jobs.release(self._job)
            self._connection.forget()
        return self._socket

    def on_text(self, text: str) -> bool:
        """Take one message of this connection; return whether to go on."""
        return not self._connection.is_ending and self._take(text)

    def _take(self, text: str) -> bool:
        try:
            return self.hear(text)
        except FabricError as error:
            self.refuse(text, error)
            return False

    def led_job(self) -> Job:
        """Return the job. Raises StoreUnavailable when this lighthouse does not lead it (any more)."""
        if self._job is None:
            self._job = self._jobs.find_or_make(self._name)
        if not self._jobs.leads or not self._job.is_running:
            raise StoreUnavailable("this lighthouse does not lead the job now: connect again")
        return self._job

    def refuse(self, text: str, error: FabricError) -> None:
        """Close the connection for this message."""
        connection = self._connection
        if isinstance(error, StoreUnavailable):
            connection.end(NOT_THE_LEADER, str(error))
            return
        log.warning("job %s: a connection of %s is closed: %s", self._name, connection.replica or "?", error)
        connection.send(FrameCache().of(Rejected(str(error)), accepts_compression=False))
        connection.end(MALFORMED, str(error))

    async def _read(self) -> None:
        """Take the messages that the library reads: the first unusual frame and all later ones."""
        wait_s: float | None = FIRST_MESSAGE_S
        while True:
            try:
                message = await self._socket.receive(wait_s)
            except TimeoutError:
                wait_s = None  # the fast path has read the first message, and may read more
                if self.silence_s is not None:
                    heard_at, now = self._connection.heard_at, asyncio.get_running_loop().time()
                    wait_s = heard_at + self.silence_s - now
                if (self._job is None and not self._gate.is_shut) or (wait_s is not None and wait_s <= 0):
                    self._connection.end(MALFORMED, "nothing was said for too long")
                    return
                continue
            wait_s = self.silence_s
            if message.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR):
                return
            if message.type is not WSMsgType.TEXT:
                self.refuse("", ProtocolError("messages are JSON text, not binary"))
                return
            if not self.on_text(message.data):
                return


class SessionSocket(MemberSocket):
    """``GET /v1/jobs/{job}/session``: the first message opens it; it lasts until either side closes."""

    most_bytes = MOST_BYTES

    def __init__(self, request: web.Request, jobs: Jobs) -> None:
        super().__init__(request, jobs)
        self._policy = parse_policy(request.query.get("replicas", ""), jobs.start_wait_s)

    def on_text(self, text: str) -> bool:
        if self._connection.is_ending or self._gate.holds(text):
            return not self._connection.is_ending
        if self._job is not None and self._job.defer(text, partial(self._take, text)):
            return True
        return self._take(text)

    def hear(self, text: str) -> bool:
        message = decode_member(text) if self._job else decode_session(text)
        if not isinstance(message, OpenSession):
            self.led_job().hear(self._connection, message)
            return True
        if self._job and not self._connection.is_of(message.replica, message.incarnation):
            raise ProtocolError("a session speaks for one process: open another one for another process")
        if self._gate.reads(message.cuts, text, self.on_text, partial(self.refuse, text)):
            return True
        return self.led_job().open(self._connection, message, self._policy)

    def refuse(self, text: str, error: FabricError) -> None:
        super().refuse(text, error)
        if text and self._job is None and not isinstance(error, StoreUnavailable):
            with suppress(FabricError):  # it names no replica, or the job's record cannot be read
                replica, job = check_name("replica", sender_of(text)), self._jobs.find(self._name)
                if job is not None:
                    job.note(REFUSED, replica, str(error))

    def left(self, job: Job) -> None:
        job.session_closed(self._connection)


class StatusSocket(MemberSocket):
    """``GET /v1/jobs/{job}/trainer-status``: a checkpoint server's statuses until either side closes."""

    silence_s = STATUS_SILENCE_S

    def hear(self, text: str) -> bool:
        connection = self._connection
        connection.heard_at = asyncio.get_running_loop().time()
        statuses = decode_statuses(text)
        if isinstance(statuses, StatusUnchanged):
            self.led_job().statuses_unchanged(connection)
            return True
        for status in statuses:
            if connection.replica not in ("", status.replica):
                raise ProtocolError("a checkpoint server speaks for one replica: open another connection")
            connection.replica = status.replica
        self.led_job().trainer_statuses(connection, statuses)
        return True

    def left(self, job: Job) -> None:
        job.server_closed(self._connection)


class _ExplainingSocket(web.WebSocketResponse):
    """A WebSocket that says why it is closed, also if its frames are malformed."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(max_msg_size=most_bytes, timeout=_CLOSE_S, compress=False)
        self._faults = {
            int(WSCloseCode.MESSAGE_TOO_BIG): f"a message is over {most_bytes} bytes: send shorter messages",
            int(WSCloseCode.PROTOCOL_ERROR): "this is no frame of a WebSocket: speak RFC 6455, uncompressed",
            int(WSCloseCode.INVALID_TEXT): "a text is not UTF-8: send JSON text",
        }

    async def close(self, *, code: int = WSCloseCode.OK, message: bytes = b"", drain: bool = True) -> bool:
        """Close; add a sentence where the library closes for a malformed frame without one."""
        message = message or self._faults.get(code, "").encode()
        return await super().close(code=code, message=message, drain=drain)


async def _accept(request: web.Request, most_bytes: int) -> tuple[web.WebSocketResponse, MemberConnection]:
    socket = _ExplainingSocket(most_bytes)
    if not socket.can_prepare(request):
        raise ProtocolError("this is a WebSocket: connect to it as one")
    try:
        await socket.prepare(request)
    except ConnectionError as error:
        # The connection closed while the member waited for admission. End as aiohttp does, without traceback.
        raise asyncio.CancelledError from error
    transport = request.transport
    raw = transport.get_extra_info("socket") if transport is not None else None
    if raw is not None:
        for option in _KEEP_ALIVE:
            raw.setsockopt(*option)
    connection = MemberConnection(socket, transport)
    connection.address, connection.is_trusted = request.remote or "", opened_with_own(request)
    return socket, connection
