"""The client of the lighthouses: it dials one with the job's token, and follows a redirect to the leader."""

import asyncio
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
from yarl import URL

from fabric.errors import FabricError, ProtocolError, Refused, Unauthorized, Unreachable
from fabric.model import Value
from fabric.runtime.drill_orders import signed_request
from fabric.runtime.http import is_loopback, parse_address
from fabric.runtime.http.tls import Tls
from fabric.runtime.http.token_file import TokenFile
from fabric.runtime.logs import printable

_MOST_AWAY_S = 60.0  # the longest for which an answer may keep a client away
# The reasons of a failed HTTP request, and the settings to change where TLS is the cause.
_HUNG_UP = re.compile("Server disconnected|Remote end closed connection without response")
_RENEWED = "each process reads its renewed files without a restart"
_UNBELIEVED = re.compile(r"certificate verify failed: (.*?)\.? \(_ssl")


def permanent_cause(error: Exception, tls: Tls) -> str:
    """Say what to change where the TLS settings of the two sides do not match; empty for other errors.

    Such an error lasts until a person changes a setting. ``tls`` is that of the dialling side.
    """
    text = str(error)
    if _passing_cause(text):
        return ""
    if "WRONG_VERSION_NUMBER" in text:
        return "it does not speak TLS: write http://"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        reason = _UNBELIEVED.search(text)
        what = "its certificate is not believed" + (f" ({reason[1]})" if reason else "")
        if not tls.is_on:
            return f"{what}: give FABRIC_TLS"
        return (
            f"{what}: ca.crt in FABRIC_TLS must be the authority that issued it, for the host that is dialled"
        )
    if "ALERT_UNKNOWN_CA" in text or "CERTIFICATE_REQUIRED" in text:
        return "it does not believe the certificate shown to it: give FABRIC_TLS with one of its authority"
    return ""


def _passing_cause(text: str) -> str:
    """Say what to do where a certificate's time is the cause: that mends without another setting."""
    if "certificate has expired" in text:
        return f"its certificate has expired: renew tls.crt in its FABRIC_TLS; {_RENEWED}"
    if "ALERT_CERTIFICATE_EXPIRED" in text:
        return f"the certificate shown to it has expired: renew tls.crt in FABRIC_TLS here; {_RENEWED}"
    if "certificate is not yet valid" in text:
        return "its certificate is not valid yet: set the clocks of both hosts right, or issue it again"
    return ""


def describe(error: Exception, url: str, tls: Tls) -> str:
    """Say why a client could not dial or ask ``url``, and what to change where TLS is the cause."""
    text = str(error) or type(error).__name__
    if cause := permanent_cause(error, tls) or _passing_cause(text):
        return cause
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in text:
        return "nobody listens there"
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        return error.os_error.strerror or str(error.os_error)
    if not _HUNG_UP.search(text):
        return text
    if url.startswith("http://"):
        return "it hung up without an answer: if it speaks TLS, write https:// and give FABRIC_TLS"
    hint = (
        "look whether tls.crt in FABRIC_TLS is of its authority, and has not expired"
        if tls.is_on
        else "give FABRIC_TLS"
    )
    return f"it hung up without an answer: if that is always so, {hint}"


_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 64 << 20
_MAX_REDIRECTS = 3

T = TypeVar("T")

# A client shows the job's token to the target of a redirect. So a lighthouse, or a process that answers in
# its place, must not choose that target freely. Each rule starts from the addresses in the client's settings.


class RedirectRefused(aiohttp.ClientError):
    """A redirect that this client does not follow, with the reason."""


class Redirected(aiohttp.ClientError):
    """A redirect to another lighthouse, ``target``."""

    def __init__(self, target: URL) -> None:
        super().__init__(f"it redirects to {target.origin()}")
        self.target = target


def trace_of(urls: Sequence[str]) -> aiohttp.TraceConfig:
    """Return a trace for a ClientSession: each redirect raises Redirected, or what ``check`` raises."""

    async def look(_: object, __: object, params: aiohttp.TraceRequestRedirectParams) -> None:
        params.response.close()
        raise Redirected(await check(params.response.url, params.response.headers.get("Location", ""), urls))

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(look)
    return trace


async def check(asked: URL, location: str, urls: Sequence[str]) -> URL:
    """Return the target of a redirect from ``asked`` to ``location``.

    Raises RedirectRefused unless a client with ``urls`` may go there.
    """
    try:
        target = asked.join(URL(location))
    except ValueError as error:
        raise RedirectRefused("it redirects to a text that is not an address") from error
    short = f"{target.scheme}://{target.host}"[:200]
    if target.scheme not in ("http", "https") or not target.host:
        raise RedirectRefused("it redirects to a URL that is not an address of a lighthouse")
    if asked.scheme == "https" and target.scheme == "http":
        raise RedirectRefused(f"it redirects from TLS to {short}: give --advertise an https:// address there")
    hosts = [host for host in (URL(url).host for url in urls) if host]
    if not any(_belongs(target.host, host) for host in hosts) and not await _is_at(target.host, hosts):
        raise RedirectRefused(
            f"it redirects to {short}, a host that is none of those given: if a lighthouse runs there,"
            " name it in FABRIC_LIGHTHOUSE"
        )
    return target


def _belongs(host: str, given: str) -> bool:
    """Whether ``host`` is ``given``, a name below it, or a name in the same domain.

    A domain of one label, such as ``com``, does not count.
    """
    host, given = host.lower().rstrip("."), given.lower().rstrip(".")
    if host == given or (is_loopback(host) and is_loopback(given)):
        return True
    if parse_address(host) is not None or parse_address(given) is not None:
        return False
    domain = given.partition(".")[2]
    return host.endswith(f".{given}") or ("." in domain and host.endswith(f".{domain}"))


async def _is_at(host: str, given: Sequence[str]) -> bool:
    """Whether all addresses of ``host`` are addresses of the ``given`` names."""
    wanted = await _addresses(host)
    if not wanted:
        return False
    known_addresses = await asyncio.gather(*map(_addresses, given))
    return wanted <= set().union(*known_addresses)


async def _addresses(host: str) -> set[str]:
    if parse_address(host) is not None:
        return {host}
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {str(entry[4][0]) for entry in entries}


class LighthouseDialer:
    """Dials the lighthouses at ``urls``; ``at`` is the URL that was dialled last.

    It sends the token again to the leader that a follower names, because aiohttp drops the token when it
    follows a redirect to another address.
    """

    def __init__(
        self, urls: Sequence[str], token: TokenFile | str | None, tls: Tls, connect_s: float
    ) -> None:
        self.at = ""
        self._urls = tuple(urls)
        self._tokens = TokenFile.of(token)
        self._tls = tls
        self._connect_s = connect_s

    def client(self, total_s: float | None = None) -> aiohttp.ClientSession:
        """Return the HTTP client to dial with; ``total_s`` bounds each request."""
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=self._connect_s),
            connector=aiohttp.TCPConnector(ssl=self._tls.client_context() or True),
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[trace_of(self._urls)],
        )

    async def follow(
        self,
        base: str,
        path: str,
        dial: Callable[..., Awaitable[T]],
        *,
        show: Callable[[str], str] = "Bearer {}".format,
        **options: Any,
    ) -> T:
        """Call ``dial`` with ``path`` of the lighthouse ``base``, or of the leader that it redirects to.

        ``show`` makes the header Authorization from the token.

        Raises what ``dial`` raises, RedirectRefused, and Unreachable where redirects go in a circle.
        """
        self.at, url = base, URL(base + path, encoded=True)
        token = self._tokens.shown()  # the token file may have a new token
        headers = {"Authorization": show(token)} if token else {}
        for _ in range(_MAX_REDIRECTS):
            try:
                return await dial(url, headers=headers, **options)
            except Redirected as redirect:
                self.at, url = str(redirect.target.origin()), redirect.target
        raise Unreachable("the lighthouses redirect in a circle")


@contextmanager
def understood(whom: str) -> Iterator[None]:
    """A context for reading an answer of ``whom``. Raises ProtocolError where its JSON has another shape."""
    try:
        yield
    except FabricError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ProtocolError(
            f"what {whom} answered cannot be understood ({type(error).__name__}: {error}): check the address,"
            " and that a lighthouse of this version runs there"
        ) from error


class Lighthouses(Value):
    """The lighthouses to ask."""

    urls: tuple[str, ...]
    job: str  # the job that the request asks about, empty for all jobs
    token: TokenFile | str  # the job's token, empty for none; a file is read again when it changes
    tls: Tls = Tls()
    signs: bool = False  # each request proves the token, and does not show it

    def path(self, *rest: str) -> str:
        """Return the URL path of the job, or of all jobs, with ``rest`` behind it."""
        parts = [quote(part, safe="") for part in (self.job, *rest) if part]
        return "/".join(["/v1/jobs", *parts])

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON of the first lighthouse that answers: to GET, or to POST with a ``body``.

        Raises FabricError with all reasons where none answers, Refused with the lighthouse's own sentence.
        """
        return asyncio.run(self._ask(path, body))

    def ask_lines(self, path: str) -> list[Any]:
        """Return the JSON objects of an answer with one per line. Raises as ``ask`` does."""
        return list(asyncio.run(self._ask(path, None, _json_lines)))

    async def _ask(
        self, path: str, body: dict[str, Any] | None, parse: Callable[[bytes], Any] = json.loads
    ) -> Any:
        try:
            async with self.open(path, body, total_s=_TIMEOUT_S) as answer:
                return parse(await read_bounded(answer))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError) as error:
            raise Unreachable(
                f"the lighthouse broke off in the midst of its answer ({error or 'too slow'}): ask again"
            ) from error

    @asynccontextmanager
    async def open(
        self, path: str, body: dict[str, Any] | None = None, *, total_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Give the first answer of a lighthouse, with its body unread; ``total_s`` bounds the request."""
        reasons, mistakes, idle = [], 0, 0
        dialer = LighthouseDialer(self.urls, self.token, self.tls, _TIMEOUT_S)
        async with dialer.client(total_s) as client:
            method, data = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
            dial = partial(client.request, method, json=body)
            signed = partial(signed_request, method=method, path=path, body=data)
            options = {"show": signed} if self.signs else {}
            for url in self.urls:
                try:
                    answer = await dialer.follow(url, path, dial, **options)
                    await _check(answer)
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError, Unreachable) as error:
                    leader = f" names the leader {dialer.at}" if dialer.at != url else ""
                    reasons.append(f"{url}{leader}: {_why(error, dialer.at, self.tls)}")
                    mistakes += bool(permanent_cause(error, self.tls))
                    idle += isinstance(error, Unreachable)
                else:
                    async with answer:
                        yield answer
                    return
        listed = "; ".join(reasons)
        if idle == len(reasons):
            raise Unreachable(f"no lighthouse can answer this now ({listed})")
        # Where the TLS settings are the cause, each reason says what to do.
        advice = "" if mistakes == len(reasons) else ": check the address, and that one runs there"
        raise Unreachable(f"no lighthouse answers ({listed}){advice}")


async def _check(answer: aiohttp.ClientResponse) -> None:
    """Raise the lighthouse's refusal, or ValueError where the answer is not a lighthouse's."""
    if answer.status not in (200, 202):
        raise _refusal(answer.status, await read_bounded(answer))
    if answer.content_type not in ("application/json", "application/x-ndjson"):
        answer.close()
        raise ValueError("no JSON")


def _json_lines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines() if line.strip()]


async def read_bounded(answer: aiohttp.ClientResponse, most: int = _MAX_ANSWER_BYTES) -> bytes:
    """Return the body of an answer; of a longer one at least ``most`` bytes, and at most a MiB more."""
    data = bytearray()
    while len(data) < most and (more := await answer.content.read(1 << 20)):
        data += more
    return bytes(data)


def _refusal(status: int, data: bytes) -> Exception:
    try:
        sentence = printable(str(json.loads(data)["error"]))
    except (ValueError, RecursionError, TypeError, KeyError):
        return Unreachable(f"HTTP {status}, and not from a lighthouse")
    if status == 401:
        return Unauthorized(f"the lighthouse refused the token: {sentence}")
    return Unreachable(sentence) if status >= 500 else Refused(sentence)


def _why(error: Exception, url: str, tls: Tls) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {_TIMEOUT_S:g} s"
    if isinstance(error, ValueError) and not isinstance(error, aiohttp.ClientError | ssl.SSLError):
        return "what answers there is not a lighthouse"
    return describe(error, url, tls)


def come_back_s(headers: Mapping[str, str]) -> float:
    """Return the seconds that a 429 answer tells the client to wait, within bounds."""
    text = headers.get("Retry-After", "")
    return min(float(text), _MOST_AWAY_S) if text.isascii() and text.isdecimal() and len(text) < 9 else 1.0
