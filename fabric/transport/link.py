"""One ordered message link on a connected socket, for the thread of an event loop; any thread may send.

A write goes straight to the socket, and only the bytes that the socket does not take are queued. If a peer
stops reading and the queue exceeds its limit, the link closes. Reads are driven by readiness, so the link
reports the end of the peer's process as soon as the kernel knows. A clean close sends a goodbye, half-closes,
and reads on until the peer has closed too: closing a socket with unread bytes would reset it, and the reset
would destroy bytes that the peer had not read yet. For the same reason a failed write only ends the writing;
the reader then reads the peer's last messages and the end.
"""

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from fabric.errors import ProtocolError

# Messages on a byte stream: four bytes of length, big-endian, then the payload.
#
# A length of zero is the goodbye that a clean close sends, so a message is never empty. The parser is
# incremental and pure: it takes bytes as they arrive and returns complete payloads. It refuses a length
# over its limit before it keeps a byte of that payload.


MAX_FRAME_BYTES = 1024 * 1024
HEADER_BYTES = 4
GOODBYE = b"\0" * HEADER_BYTES


def frame(payload: bytes, limit_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return ``payload`` with its length in front; raises ProtocolError for an empty or oversized one."""
    if not payload:
        raise ProtocolError("a message cannot be empty: nothing was sent")
    if len(payload) > limit_bytes:
        raise ProtocolError(
            f"a message of {len(payload)} bytes is over the limit of {limit_bytes}: it was not sent"
        )
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class FrameParser:
    """Turns pieces of a stream into payloads; holds at most one unfinished frame and the newest piece."""

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.pending = bytearray()  # the bytes of an unfinished frame

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Return the payloads that ``data`` completes, ``b""`` for a goodbye.

        Raises ProtocolError at a length over the limit; the stream cannot be used after that.
        """
        self.pending += data
        payloads: list[bytes] = []
        start = 0
        while len(self.pending) - start >= HEADER_BYTES:
            body = start + HEADER_BYTES
            length = int.from_bytes(self.pending[start:body], "big")
            if length > self._limit_bytes:
                self.pending.clear()
                raise ProtocolError(
                    f"a message announces {length} bytes, over the limit of {self._limit_bytes}: "
                    "the other side is not fabric, or of another version"
                )
            if len(self.pending) - body < length:
                break
            payloads.append(bytes(self.pending[body : body + length]))
            start = body + length
        del self.pending[:start]
        return payloads


OnMessage = Callable[[bytes], None]
OnClosed = Callable[[str], None]

# Limit of bytes that wait for a slow peer: many times the size of all messages of an epoch.
QUEUE_LIMIT_BYTES = 16 * 1024 * 1024
_READ_BYTES = 256 * 1024
# The kernel's errors when the peer's host acknowledges nothing for too long, or cannot be routed to.
_SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class Link:
    """Ordered messages to and from one peer, over a connected stream socket, which the link owns.

    Construct it inside the running loop. Sending works at once and from any thread, reading begins with
    ``run``; everything else is for the loop's thread. A link that ends without a goodbye means that the
    peer's process or host has died.
    """

    def __init__(self, sock: socket.socket, peer: str, queue_limit_bytes: int = QUEUE_LIMIT_BYTES) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._guard = threading.Lock()  # guards the outbox, and keeps the socket open while a thread sends
        self._sock = sock
        self.peer = peer
        self._outbox = _Outbox(sock, queue_limit_bytes)
        self._parser = FrameParser()
        self._inbox: deque[bytes] = deque()  # complete messages that are not delivered yet
        self.clean = False  # the peer has sent a goodbye, which must be its last frame
        self.reason = ""  # why the link closed, in one sentence; empty while it is open
        self.silent = False  # the link ended because the peer's host no longer answered
        self._leaving = False
        self._on_message: OnMessage | None = None
        self._error: Exception | None = None
        self._writing = False
        self._ended = asyncio.Event()
        sock.setblocking(False)

    def send(self, *messages: bytes) -> bool:
        """Queue messages; on a closed link queue nothing and return False.

        Never blocks. A peer that does not read closes the link when the queue is over its limit.
        Raises ProtocolError for an empty or oversized message, which is the caller's mistake.
        """
        with self._guard:
            if self.reason or self._leaving or self._outbox.failure:
                return False
            self._outbox.add(messages)
            left = self._outbox.flush()
            overflowed = self._outbox.overflowed
        if overflowed:
            waiting = self._outbox.queued_bytes
            why = f"{self.peer} does not read: {waiting} bytes wait for it, so the link was closed"
            self._on_loop(partial(self.abort, why))
        elif left or self._writing:
            self._on_loop(self._flush)
        return not self.reason and not self._outbox.failure

    async def run(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        """Deliver messages in order until the link closes, then call ``on_closed(reason)`` once.

        A ProtocolError of ``on_message`` closes the link with that reason. Any other exception closes it,
        calls ``on_closed``, and is raised here.
        """
        try:
            self._start_reading()
            self._on_message = on_message
            self._deliver()
            await self._ended.wait()
            if self._error is not None:
                raise self._error
        finally:
            self.abort(f"the link to {self.peer} was dropped here")
            on_closed(self.reason)

    async def close(self, linger_s: float = 1.0) -> None:
        """Send queued messages and a goodbye; wait at most ``linger_s`` for the peer to close too."""
        if not self.reason and not self._leaving:
            with self._guard:
                self._leaving = True
                self._outbox.end()
            self._start_reading()
            self._flush()
        try:
            async with asyncio.timeout(linger_s):
                await self._ended.wait()
        except TimeoutError:
            self.abort(f"closed here; {self.peer} did not close its side within {linger_s:g} s")

    def abort(self, reason: str) -> None:
        """Close at once; queued messages may be lost."""
        if self.reason:
            return
        self._loop.remove_reader(self._sock)
        if self._writing:
            self._loop.remove_writer(self._sock)
        with self._guard:
            self.reason = reason
            self._sock.close()
        self._ended.set()

    def _on_loop(self, work: Callable[[], None]) -> None:
        if threading.get_ident() == self._thread:
            work()
            return
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and the link with it
            self._loop.call_soon_threadsafe(work)

    def _start_reading(self) -> None:
        if not self.reason:
            self._loop.add_reader(self._sock, self._readable)

    def _flush(self) -> None:
        with self._guard:
            left = not self.reason and self._outbox.flush()
        if self.reason:
            return
        if left:
            self._loop.add_writer(self._sock, self._flush)
            self._writing = True
        elif self._writing:
            self._loop.remove_writer(self._sock)
            self._writing = False

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.silent = error.errno in _SILENCE
            self.abort(f"{self.peer} is gone: {words_of(error)}")
            return
        if not data:
            # The error that ended the link may have occurred in a write.
            self.silent = self._outbox.silent
            self.abort(self._end_sentence())
            return
        try:
            for payload in self._parser.feed(data):
                if self.clean:
                    raise ProtocolError("there is a message after the goodbye")
                if payload:
                    self._inbox.append(payload)
                else:
                    self.clean = True
        except ProtocolError as error:
            self.abort(f"{self.peer} sent what cannot be used: {error}")
            return
        if self._leaving:
            self._inbox.clear()
        self._deliver()

    def _deliver(self) -> None:
        """Deliver in the callback of the event loop: a task would cost a turn of the loop."""
        messages = self._inbox
        try:
            while messages and self._on_message is not None and not self._leaving:
                self._on_message(messages.popleft())
        except ProtocolError as error:
            messages.clear()
            self.abort(f"{self.peer} sent what cannot be used: {error}")
        except Exception as error:  # noqa: BLE001  (raised where ``run`` is awaited)
            messages.clear()
            self._error = error
            self.abort(f"the link to {self.peer} was dropped here")

    def _end_sentence(self) -> str:
        if self._leaving:
            return "closed here"
        if self.clean:
            return f"{self.peer} closed the link"
        detail = self._outbox.failure or "its end of the link closed without a goodbye"
        return f"{self.peer} is gone: {detail}"


class _Outbox:
    """Frames that the socket has not taken yet, in order, with a bound on their bytes."""

    def __init__(self, sock: socket.socket, limit_bytes: int) -> None:
        self._sock = sock
        self._limit_bytes = limit_bytes
        self._frames: deque[memoryview] = deque()
        self._ending = False
        self.queued_bytes = 0
        self.failure = ""
        self.silent = False

    @property
    def overflowed(self) -> bool:
        return self.queued_bytes > self._limit_bytes

    def add(self, payloads: Iterable[bytes]) -> None:
        self._append(b"".join(map(frame, payloads)))

    def end(self) -> None:
        """Queue the goodbye; send nothing after it."""
        self._append(GOODBYE)
        self._ending = True

    def flush(self) -> bool:
        """Write as many bytes as the socket takes; return whether some are left."""
        try:
            return self._flush()
        except OSError as error:
            self.failure, self.silent = words_of(error), error.errno in _SILENCE
            self._frames.clear()
            self.queued_bytes = 0
            return False

    def _append(self, framed: bytes) -> None:
        if not self.failure:
            self._frames.append(memoryview(framed))
            self.queued_bytes += len(framed)

    def _flush(self) -> bool:
        while self._frames:
            head = self._frames[0]
            try:
                sent = self._sock.send(head)
            except BlockingIOError:
                return True
            self.queued_bytes -= sent
            if sent == len(head):
                self._frames.popleft()
            else:
                self._frames[0] = head[sent:]
        if self._ending:
            self._ending = False
            self._sock.shutdown(socket.SHUT_WR)
        return False


def words_of(error: OSError) -> str:
    if isinstance(error, socket.gaierror):  # its number is not one of the system's errors
        return str(error.strerror).lower()
    return os.strerror(error.errno).lower() if error.errno else str(error.strerror or error)
