"""The client of the lighthouses: it dials one with the job's token, and follows a redirect to the leader."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
from yarl import URL

from fabric.errors import FabricError, ProtocolError, Refused, Unauthorized, Unreachable
from fabric.runtime.http import redirects
from fabric.runtime.http.dial_errors import describe, permanent_cause
from fabric.runtime.http.tls import Tls
from fabric.runtime.http.token_file import TokenFile
from fabric.runtime.logs import printable

_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 64 << 20
_MAX_REDIRECTS = 3


T = TypeVar("T")


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
            trace_configs=[redirects.trace_of(self._urls)],
        )

    async def follow(self, base: str, path: str, dial: Callable[..., Awaitable[T]], **options: Any) -> T:
        """Call ``dial`` with ``path`` of the lighthouse ``base``, or of the leader that it redirects to.

        Raises what ``dial`` raises, RedirectRefused, and Unreachable where redirects go in a circle.
        """
        self.at, url = base, URL(base + path, encoded=True)
        token = self._tokens.shown()  # the token file may have a new token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        for _ in range(_MAX_REDIRECTS):
            try:
                return await dial(url, headers=headers, **options)
            except redirects.Redirected as redirect:
                self.at, url = str(redirect.target.origin()), redirect.target
        raise Unreachable("the lighthouses redirect in a circle")


@contextmanager
def understood(whom: str) -> Iterator[None]:
    """A context for reading an answer of ``whom``. Raises ProtocolError where its JSON has another shape."""
    try:
        yield
    except FabricError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ProtocolError(
            f"what {whom} answered cannot be understood ({type(error).__name__}: {error}): check the address,"
            " and that a lighthouse of this version runs there"
        ) from error


@dataclass(frozen=True, slots=True)
class Lighthouses:
    """The lighthouses to ask."""

    urls: tuple[str, ...]
    job: str  # the job that the request asks about, empty for all jobs
    token: TokenFile | str  # the job's token, empty for none; a file is read again when it changes
    tls: Tls = field(default_factory=Tls)

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
        return asyncio.run(self._ask_lines(path))

    async def _ask_lines(self, path: str) -> list[Any]:
        try:
            async with self.open(path, total_s=_TIMEOUT_S) as answer:
                return [json.loads(line) for line in (await _bounded(answer)).splitlines() if line.strip()]
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise Unreachable(
                f"the lighthouse broke off in the midst of its answer ({error or 'too slow'}): ask again"
            ) from error

    async def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        try:
            async with self.open(path, body, total_s=_TIMEOUT_S) as answer:
                return json.loads(await _bounded(answer))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
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
            dial = partial(client.request, "GET" if body is None else "POST", json=body)
            for url in self.urls:
                try:
                    answer = await dialer.follow(url, path, dial)
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
        raise _refusal(answer.status, await _bounded(answer))
    if answer.content_type not in ("application/json", "application/x-ndjson"):
        answer.close()
        raise ValueError("no JSON")


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    while len(data) < _MAX_ANSWER_BYTES and (more := await answer.content.read(1 << 20)):
        data += more
    return bytes(data)


def _refusal(status: int, data: bytes) -> Exception:
    try:
        sentence = printable(str(json.loads(data)["error"]))
    except (ValueError, TypeError, KeyError):
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
