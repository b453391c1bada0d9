"""The common part of all HTTP services of fabric: tokens, error answers, listening.

A service has open paths (health, metrics); all others need the job's bearer token. An error is answered with
``{"error": sentence}`` and a fitting status, so that `curl` shows a person what to do. A defect of fabric is
logged here, and answered with a sentence, never with a traceback. A service listens on a port, or on the
first free one of a range ("8000-8010").
"""

import asyncio
import logging
import math
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fabric.errors import (
    ConfigError,
    FabricError,
    Gone,
    ProtocolError,
    Refused,
    StateError,
    StoreError,
    StoreIndefinite,
    Unauthorized,
)
from fabric.runtime.http import bind_first_free, is_loopback, parse_ports, resolved
from fabric.runtime.http.connection_limit import (
    Acceptor,
    ConnectionLimit,
    ConnectionSlot,
    SlottedProtocol,
)
from fabric.runtime.http.token_file import TokenFile

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# An idle connection is closed after this time, even if half of a request's head has arrived.
IDLE_S = 60.0
# A request's body must arrive within this time: the bodies that we read are small.
BODY_S = 10.0
# A reader is cut off if it takes fewer than _STALL_BYTES of an answer in STALL_S: the answer costs memory.
STALL_S = 60.0
_STALL_BYTES = 4 << 20
# Seconds for which the service still reads a refused body, so that the sender gets the answer, not a reset.
_LINGER_S = 1.0
# Thousands of members reconnect at once after a fail-over. The kernel lowers a large backlog to its limit.
_BACKLOG = 4096

# Error class -> HTTP status: the first class that an error is an instance of decides.
_STATUSES: tuple[tuple[type[FabricError], int], ...] = (
    (Unauthorized, 401),
    (ProtocolError, 400),
    (ConfigError, 400),
    (Refused, 409),
    (Gone, 409),
    (StoreIndefinite, 504),
    (StoreError, 503),
    (StateError, 409),
)


_MALFORMED_EVERY_S = 60.0


class NoBytesOfRequests(logging.Filter):
    """Logs a malformed request as one line, without aiohttp's traceback, which quotes it with its token.

    Anyone can send such requests, so there is one line per minute, with the number of requests
    since the line before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._due = -math.inf
        self._unsaid = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError | web.RequestPayloadError):
            return True
        if self._clock() < self._due:
            self._unsaid += 1
            return False
        more = f"; so were {self._unsaid} more since the last such line" if self._unsaid else ""
        self._due, self._unsaid = self._clock() + _MALFORMED_EVERY_S, 0
        record.msg += f": it is malformed ({type(error).__name__}){more}"
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


_requests_log = logging.getLogger(f"{__name__}.requests")
_requests_log.addFilter(NoBytesOfRequests())


def json_error(
    status: int,
    sentence: str,
    *,
    headers: Mapping[str, str] | None = None,
    details: Mapping[str, object] | None = None,
) -> web.Response:
    """Return an error response ``{"error": sentence}``, with the keys of ``details`` beside it."""
    return web.json_response({"error": sentence, **(details or {})}, status=status, headers=headers)


def status_of(error: FabricError) -> int:
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


async def _name_no_versions(_: web.Request, response: web.StreamResponse) -> None:
    """Replace the header in which aiohttp names itself, Python and their versions to attackers."""
    response.headers["Server"] = "fabric"


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error as JSON. Put it first, so that it also answers for errors of the other
    middlewares."""
    try:
        return await handler(request)
    except FabricError as error:
        headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else None
        details = getattr(error, "details", None)  # what the answer says beside the sentence
        return json_error(status_of(error), str(error), headers=headers, details=details)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        dropped = {"content-type", "content-length"}
        headers = {name: value for name, value in error.headers.items() if name.lower() not in dropped}
        return json_error(error.status, _http_sentence(request, error), headers=headers)
    except web.RequestPayloadError:
        return json_error(400, "the request's body is malformed: check its Content-Encoding and its length")
    except ConnectionError:
        raise  # the peer has closed the connection
    except Exception:  # the client must not see the traceback of a defect
        log.exception("%s %s failed", request.method, request.path)
        return json_error(500, "the service has a defect that this request met: see its log")


@web.middleware
async def _cut_off_stuck(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Send the complete answer here, and cut off a reader that is slower than STALL_S allows.

    The handler itself sends, and bounds, any response that is not a ``web.Response``.
    """
    response = await handler(request)
    if isinstance(response, web.Response):
        try:
            async with asyncio.timeout(STALL_S * (1 + (response.content_length or 0) // _STALL_BYTES)):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the reader has closed the connection, which aiohttp notices too
    return response


@web.middleware
async def _keep_busy(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Mark the connection as busy while a request is under way (``connection_limit``)."""
    slot = _slot_of(request)
    if slot is None:
        return await handler(request)
    slot.busy()
    try:
        return await handler(request)
    finally:
        slot.idle()


def _slot_of(request: web.Request) -> ConnectionSlot | None:
    """Return the connection's slot; None where the connection has ended."""
    protocol = None if request.transport is None else request.transport.get_protocol()
    return protocol.slot if isinstance(protocol, SlottedProtocol) else None


def bearer_required(token: TokenFile | str | None, open_paths: frozenset[str]) -> Middleware:
    """Return a middleware that requires ``Authorization: Bearer <token>`` on all paths but ``open_paths``.

    Without a token (None) all paths are open. The comparison takes the same time for every guess.
    """
    tokens = TokenFile.of(token)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not tokens.is_open and request.path not in open_paths:
            check_bearer(request.headers.get("Authorization", ""), tokens)
        return await handler(request)

    return check


def check_bearer(header: str, token: TokenFile | str) -> None:
    """Raises Unauthorized unless ``header`` is a bearer authorization with ``token``."""
    if not TokenFile.of(token).accepts(bearer_of(header)):
        raise Unauthorized("the token does not match this job's: use the token file that the job was given")


def bearer_of(header: str) -> str:
    """Return the token of an Authorization header. Raises Unauthorized where it has none."""
    scheme, _, given = header.partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthorized("this needs the job's token: send the header Authorization: Bearer <token>")
    return given.strip()


async def read_body(request: web.Request) -> bytes:
    """Read the body of a request. Raises HTTPRequestTimeout (408) where it has not arrived within
    ``BODY_S``."""
    slot = _slot_of(request)
    if slot is not None:
        slot.idle()
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(
            text=f"the request's body did not arrive within {BODY_S:g} s: send all of it",
            headers={"Connection": "close"},
        ) from None
    finally:
        if slot is not None:
            slot.busy()


def query_integer(request: web.Request, name: str, *, low: int, high: int) -> int | None:
    """Return query parameter ``name``, an integer from ``low`` to ``high``, or None. Raises ProtocolError."""
    text = request.query.get(name)
    if text is None:
        return None
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdecimal() and len(digits) <= 19 and low <= int(text) <= high:
        return int(text)
    raise ProtocolError(f"the query parameter {name} must be an integer from {low} to {high}")


def query_seconds(request: web.Request, name: str, *, most: float) -> float:
    """Return query parameter ``name``, seconds from 0 to ``most``; 0 when absent. Raises ProtocolError."""
    text = request.query.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise ProtocolError(f"the query parameter {name} must be a number of seconds from 0 to {most:g}")
    return value


def check_exposure(host: str, token: str | None) -> None:
    """Raises ConfigError where other machines could reach a service without a token."""
    if token is None and not is_loopback(resolved(host)[1]):
        raise ConfigError(
            f"listening on {host or 'every address'} without a token would serve anybody who can reach it:"
            " give a token file, or bind to 127.0.0.1"
        )


class ConnectionMetrics(Collector):
    """The metrics in ``registry`` of a service's connections; ``prefix`` begins their names."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self._prefix = prefix
        self.limit = ConnectionLimit()
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        prefix, limit = self._prefix, self.limit
        yield GaugeMetricFamily(f"{prefix}connections", "Open HTTP connections.", limit.open)
        yield GaugeMetricFamily(f"{prefix}connections_limit", "Most open connections.", limit.limits.total)
        refused = CounterMetricFamily(
            f"{prefix}connections_refused",
            "Connections closed for want of room: idle ones, and new ones where none was idle (full).",
            labels=["why"],
        )
        for why, count in limit.refused.items():
            refused.add_metric([why], count)
        yield refused


async def serve(
    app: web.Application,
    host: str,
    port: str | int,
    *,
    ssl_context: ssl.SSLContext | None = None,
    shutdown_s: float = 2.0,
    cancel_abandoned: bool = False,
    limit: ConnectionLimit | None = None,
) -> tuple[web.AppRunner, int]:
    """Listen on ``host`` and the first free one of ``port``; returns the runner and the port.

    The caller ends it with ``await runner.cleanup()``, which waits at most ``shutdown_s`` for requests under
    way. ``cancel_abandoned`` cancels a handler whose client has closed the connection. ``limit`` bounds the
    connections; None: as many as this process has descriptors for. Raises ConfigError where nothing can be
    bound.
    """
    listening = bind_first_free(host, parse_ports(str(port)))
    taken = int(listening.getsockname()[1])
    app.middlewares[:0] = [_keep_busy, _cut_off_stuck]
    app.on_response_prepare.append(_name_no_versions)
    accepting: list[Acceptor] = []

    async def accept_no_more(_: web.Application) -> None:
        for acceptor in accepting:
            acceptor.close()

    app.on_shutdown.insert(0, accept_no_more)
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=shutdown_s,
        handler_cancellation=cancel_abandoned,
        logger=_requests_log,
        keepalive_timeout=IDLE_S,
        lingering_time=_LINGER_S,
    )
    try:
        await runner.setup()
        assert runner.server is not None
        listening.listen(_BACKLOG)
        accepting.append(Acceptor(listening, runner.server, limit or ConnectionLimit(), ssl_context))
    except BaseException:
        listening.close()
        await runner.cleanup()
        raise
    return runner, taken


def _http_sentence(request: web.Request, error: web.HTTPException) -> str:
    if error.status == 404 and error.text == f"404: {error.reason}":
        return f"there is nothing at {request.path[:200]}: look up the paths in the documentation"
    if error.status == 405:
        return f"{request.method[:20]} is not possible at {request.path[:200]}: use another method"
    if error.status == 413:
        return f"the request's body is too long: send at most {request.client_max_size} bytes"
    return error.text or error.reason


# Keeps web pages out of services without a token.
#
# Without a token a service listens on loopback alone. But any web page can make a browser on that host
# send requests there, by a form, by a script, or by a host name that resolves to 127.0.0.1. Such a
# request has a foreign ``Origin``, a foreign ``Host``, or a body of a type that a form can send.


_READS = frozenset({"GET", "HEAD", "OPTIONS"})


def host_of(url: str) -> str:
    """Return the host in a URL, or in a host with or without a port; empty where it cannot be read."""
    try:
        return (urlsplit(url if "://" in url else f"//{url}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_own_page(request: web.Request) -> bool:
    """Whether the request comes from this service's own page, or from no page."""
    origin = request.headers.get("Origin")
    if origin is None:
        return True
    scheme, _, host = origin.partition("://")
    # Where a proxy speaks TLS for a service, the page's scheme is https and the request's is http.
    return host == request.host and (scheme == "https" or not request.secure)


def pages_kept_out(names: Iterable[str] = ()) -> Middleware:
    """Return a middleware for a service without a token; ``names`` are its host names besides loopback."""
    own = frozenset(name.lower() for name in map(host_of, names) if name)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = host_of(request.host)
        if not is_loopback(host) and host not in own:
            raise web.HTTPForbidden(
                text="without a token this service answers to loopback addresses alone, not to"
                f" {host[:200]!r}: ask at 127.0.0.1, or start it with a token file"
            )
        if not is_own_page(request):
            raise web.HTTPForbidden(
                text="a page of another site may not ask here: use the service's own page, or a token file"
            )
        # A missing path or method gets an error of its own, with the allowed methods.
        has_body = request.match_info.http_exception is None and request.method not in _READS
        if has_body and request.content_type != "application/json":
            raise ProtocolError(
                "without a token a body must say that it is JSON: send the header"
                " Content-Type: application/json"
            )
        return await handler(request)

    return check
