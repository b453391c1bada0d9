"""HTTP to one checkpoint server, over blocking sockets that another thread can end.

Bytes go from the socket straight into the caller's memory; no other copy of a body is kept. A wait in
``recv`` ends when bytes arrive, at the timeout, or by ``shutdown`` from another thread: so a cancel ends
every stream at once. A connection therefore keeps its dial or socket before its thread waits for it.
"""

import contextlib
import http.client
import json
import socket
import ssl
import struct
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any
from urllib.parse import urlsplit

from fabric.ckpt_server.format.manifest import bytes_digest, etag
from fabric.ckpt_server.wire.compression import IDENTITY
from fabric.errors import ConfigError, Gone, IntegrityError, StateError
from fabric.model import Value
from fabric.runtime.http.token_file import TokenFile
from fabric.transport.connecting import begin_connect

CONNECT_S = 5.0
# A transfer slower than this fails, because a job cannot use such a link.
LEAST_BYTES_PER_S = 20e3
PIECE_BYTES = 1 << 20  # each piece is digested while it is in the core's own cache
_JSON_PIECE = 1 << 18
_MOST_IDLE = 32
_MAX_ERROR_BYTES = 64 << 10
_FEW_CONTAINERS, _BYTES_PER_CONTAINER = 64, 24
_MAX_ERROR_CHARACTERS = 300
# The HTTP client's errors for a source that died, stalled or sends malformed HTTP.
TRANSIENT = (OSError, http.client.HTTPException)


class SourceRefused(StateError):
    """The source has refused the request: another attempt is of no use."""


class HttpAccess:
    """How every source is reached. ``tokens`` may be empty; ``timeout_s`` bounds one read.

    ``cancel`` ends all connections made with it, also those made later.
    """

    def __init__(self, tokens: TokenFile, timeout_s: float, ssl_context: ssl.SSLContext | None) -> None:
        self.tokens, self.timeout_s, self.ssl_context = tokens, timeout_s, ssl_context
        self.is_cancelled = False
        self._connections: weakref.WeakSet[HttpConnection] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, connection: "HttpConnection") -> None:
        with self._lock:
            self._connections.add(connection)
            if self.is_cancelled:
                connection.retire()

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            for connection in self._connections:
                connection.retire()


class HttpAddress(Value):
    """The parts of a source's base URL."""

    url: str
    host: str
    port: int
    path: str
    secure: bool

    @classmethod
    def parse(cls, url: str) -> "HttpAddress":
        """Raises ConfigError unless ``url`` is http(s)://host[:port][/path]."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url[:200]!r} is not a URL ({error}).") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ConfigError(f"{url[:200]!r} is not the base URL of a checkpoint server (http://host:port).")
        secure = parts.scheme == "https"
        return cls(url, parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/"), secure)

    @property
    def place(self) -> str:
        """Host and port, in the form that is equal for equal addresses."""
        return f"{self.host.lower()}:{self.port}"


class HttpConnection:
    """One keep-alive connection; dials at the first request, and again after an error."""

    def __init__(self, address: HttpAddress, access: HttpAccess) -> None:
        self.address = address
        self._access = access
        self._http = http.client.HTTPConnection(address.host, address.port)
        self._http.auto_open = 0  # this class dials, so that a cancel can end the dialling
        self._sock: socket.socket | None = None
        self._dialled: Future[socket.socket] | None = None
        self._ended = False
        self._retired = False
        access.add(self)

    def get(
        self,
        path: str,
        byte_range: tuple[int, int] | None = None,
        wait_s: float = 0.0,
        coding: str = IDENTITY,
    ) -> http.client.HTTPResponse:
        """Send a GET; return the response with its headers read. Dial again if a kept connection is closed.

        ``wait_s`` lengthens the timeout; ``coding``: the content coding that may be used.

        Raises the errors in TRANSIENT, or SourceRefused after ``retire``.
        """
        headers = {"Accept-Encoding": coding}
        if token := self._access.tokens.shown():  # the file may change while this process runs
            headers["Authorization"] = f"Bearer {token}"
        if byte_range is not None:
            headers["Range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"
        if self._sock is not None and self._http.sock is not None:
            try:
                return self._ask(self._sock, path, headers, wait_s)
            except TimeoutError:
                raise
            except TRANSIENT:
                if self._ended:
                    raise
        return self._ask(self._dial(), path, headers, wait_s)

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Raise TimeoutError where the block has not ended in time, even if bytes still trickle in."""
        over = threading.Event()

        def end() -> None:
            over.set()
            self.abort()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as error:
            if over.is_set():
                raise TimeoutError from error
            raise
        finally:
            timer.cancel()
        if over.is_set():  # after a time-out, a truncated message may look complete
            raise TimeoutError

    def at_least_rate(self, nbytes: int) -> contextlib.AbstractContextManager[None]:
        """Raise TimeoutError where the block, which reads ``nbytes``, is slower than the least rate."""
        return self.within(self._access.timeout_s + nbytes / LEAST_BYTES_PER_S)

    def read_json(self, response: http.client.HTTPResponse, most: int) -> Any:
        """Return the JSON body of at most ``most`` bytes. Raises SourceRefused for a larger or malformed one,
        IntegrityError for one that does not match its ETag, and TimeoutError for one that trickles."""
        body = bytearray()
        while len(body) <= most:
            with self.at_least_rate(_JSON_PIECE):
                piece = response.read(min(_JSON_PIECE, most + 1 - len(body)))
            if not piece:
                break
            body += piece
        if len(body) > most:
            raise SourceRefused(f"its answer is larger than {most} bytes")
        if response.length:
            raise ConnectionError("its answer ended too early")
        tag = response.getheader("ETag")
        if tag is not None and tag != etag(bytes_digest(memoryview(body))):
            raise IntegrityError("its answer is not what its ETag says")
        # A list takes dozens of bytes in memory, and three in JSON text. Manifests of fabric have few lists.
        if body.count(b"[") + body.count(b"{") > _FEW_CONTAINERS + len(body) // _BYTES_PER_CONTAINER:
            raise SourceRefused("its answer is made of too many lists and objects")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise SourceRefused(f"its answer is not JSON ({' '.join(str(error).split())[:100]})") from error

    def _ask(
        self, sock: socket.socket, path: str, headers: dict[str, str], wait_s: float
    ) -> http.client.HTTPResponse:
        sock.settimeout(self._access.timeout_s + wait_s)
        self._http.request("GET", self.address.path + path, headers=headers)
        response = self._http.getresponse()
        sock.settimeout(self._access.timeout_s)
        return response

    def body(self, response: http.client.HTTPResponse) -> "HttpBody":
        """Return the body of the response of the last ``get``."""
        assert self._sock is not None
        return HttpBody(response, self._sock, self._access.timeout_s)

    @property
    def is_open(self) -> bool:
        """Whether the connection is open and no thread has ended it."""
        return self._sock is not None and not self._ended and not self._retired

    def retire(self) -> None:
        """From another thread: end the current wait and every later wait."""
        self._retired = True
        self.abort()

    def abort(self) -> None:
        """From another thread: end the wait of this connection's user, also while it is dialled.

        Later waits end at once until ``close``.
        """
        self._ended = True
        if (dial := self._dialled) is not None:
            dial.cancel()
        if (sock := self._sock) is not None:
            with contextlib.suppress(OSError):  # it is not connected, or closed: no thread waits on it
                # Not by the TLS socket's own method: it changes the object while another thread reads.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next ``get`` dials again."""
        self._let_go()
        self._ended = False

    def _let_go(self) -> None:
        sock, self._sock = self._sock, None
        self._http.close()
        if sock is not None:
            sock.close()

    def _dial(self) -> socket.socket:
        """Connect by the first address of the name that answers. An abort ends the wait."""
        self._let_go()
        if self._retired:
            raise SourceRefused("it gave no answer in time")
        within_s = min(CONNECT_S, self._access.timeout_s)
        dial = self._dialled = begin_connect(self.address.host, self.address.port, within_s)
        try:
            if self._ended:  # an abort that came before saw no dial
                dial.cancel()
            sock = self._sock = dial.result()
        except CancelledError:
            raise ConnectionAbortedError("the wait for it was ended") from None
        finally:
            self._dialled = None
        try:
            sock.settimeout(within_s)
            if self.address.secure:  # kept before its handshake, so that an abort can end that
                context, host = self._access.ssl_context or ssl.create_default_context(), self.address.host
                sock = self._sock = context.wrap_socket(
                    sock, server_hostname=host, do_handshake_on_connect=False
                )
            if self._ended:
                raise ConnectionAbortedError("the wait for it was ended")
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            self._let_go()
            raise
        self._http.sock = sock
        return sock


class IdleConnections:
    """Open connections without a request under way, kept for the next request to their server."""

    def __init__(self, access: HttpAccess) -> None:
        self._access = access
        self._connections: deque[HttpConnection] = deque()
        self._lock = threading.Lock()

    def take(self, address: HttpAddress) -> HttpConnection:
        """Return a kept connection to ``address``, or a new one."""
        with self._lock:
            kept = next((c for c in self._connections if c.address == address and c.is_open), None)
            if kept is not None:
                self._connections.remove(kept)
                return kept
        return HttpConnection(address, self._access)

    def give(self, connection: HttpConnection, *, reusable: bool) -> None:
        """Return a connection; ``reusable``: its last response was read to the end."""
        if not reusable or not connection.is_open:
            connection.close()
            return
        with self._lock:
            self._connections.appendleft(connection)
            oldest = self._connections.pop() if len(self._connections) > _MOST_IDLE else None
        if oldest is not None:
            oldest.close()

    def close(self) -> None:
        with self._lock:
            while self._connections:
                self._connections.pop().close()


class HttpBody:
    """A response's bytes, read from the socket into their place. Without TLS the kernel wakes this thread for
    a whole piece: each wake-up costs both ends. Over TLS the interpreter has to read.
    """

    def __init__(self, response: http.client.HTTPResponse, sock: socket.socket, timeout_s: float) -> None:
        self._response = response
        self._sock = None if isinstance(sock, ssl.SSLSocket) else sock
        self._buffered = 0
        self._woken_by = 1  # so many bytes wake this thread
        self._timeout_s = timeout_s
        if self._sock is not None and response.length:
            # The response's buffer holds body bytes that came with the head: read them first.
            self._buffered = len(response.fp.peek(1))
            seconds = int(timeout_s)
            limit = struct.pack("@ll", seconds, int((timeout_s - seconds) * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._sock.settimeout(None)

    def read(self, into: memoryview) -> None:
        """Fill ``into``. Raises ConnectionError where the body ends too early, TimeoutError."""
        if self._buffered:
            first = min(self._buffered, len(into))
            self._buffered -= first
            read_exactly(self._response, into[:first])
            into = into[first:]
        length = self._response.length
        rest = length - len(into) if length else 0
        if self._sock is not None and (least := PIECE_BYTES if rest >= PIECE_BYTES else 1) != self._woken_by:
            self._woken_by = least
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
        if self._sock is None or length is None or rest <= 0:
            if self._sock is not None:
                self._sock.settimeout(self._timeout_s)
            read_exactly(self._response, into)  # read to the body's end, so that the response counts as read
            return
        filled = 0
        while filled < len(into):
            try:
                count = self._sock.recv_into(into[filled:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError from None
            if not count:
                raise ConnectionError(f"the body ended {len(into) - filled} bytes too early")
            filled += count
        self._response.length = length - filled


def read_exactly(response: http.client.HTTPResponse, into: memoryview) -> None:
    """Fill ``into`` from the body. Raises ConnectionError where the body ends too early."""
    filled = 0
    while filled < len(into):
        count = response.readinto(into[filled:])
        if not count:
            raise ConnectionError(f"the body ended {len(into) - filled} bytes too early")
        filled += count


def refusal(response: http.client.HTTPResponse) -> StateError:
    """Return the error of a refusing answer: Gone, SourceRefused, or a StateError where a retry may help."""
    body, gone = response.read(_MAX_ERROR_BYTES), None
    try:
        parsed = json.loads(body)
        text, gone = str(parsed["error"]), parsed.get("gone")
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        text = body.decode("utf-8", "replace") or response.reason
    reason = f"it answered {response.status}: {' '.join(text.split())[:_MAX_ERROR_CHARACTERS]}"
    if response.status == 409:
        return StateError(reason) if gone is False else Gone(reason)
    if response.status >= 500 or response.status in (408, 429):
        return StateError(reason)
    return SourceRefused(reason)
