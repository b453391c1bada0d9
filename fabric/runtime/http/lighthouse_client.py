"""A client of the lighthouses over HTTP: it asks the first that answers, and follows it to the leader."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from fabric.errors import Refused, Unauthorized, Unreachable
from fabric.runtime.http import redirects
from fabric.runtime.http.dial_errors import describe, permanent_cause
from fabric.runtime.http.tls import Tls

_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 64 << 20
_MAX_REDIRECTS = 3


@dataclass(frozen=True, slots=True)
class Lighthouses:
    """The lighthouses to ask."""

    urls: tuple[str, ...]
    job: str  # the job to ask about, empty for all
    token: str  # empty for none
    tls: Tls = field(default_factory=Tls)

    def path(self, *rest: str) -> str:
        """Return the URL path of the job, or of all jobs, with ``rest`` behind it."""
        parts = [quote(part, safe="") for part in (self.job, *rest) if part]
        return "/".join(["/v1/jobs", *parts])

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON that the first lighthouse answers: to GET, or to POST with a ``body``.

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
        """The answer of the first lighthouse that gives one, its body unread; ``total_s`` bounds it."""
        reasons, mistakes, idle = [], 0, 0
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=_TIMEOUT_S)
        connector = aiohttp.TCPConnector(ssl=self.tls.client_context() or True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
            for url in self.urls:
                try:
                    answer = await self._open_one(client, URL(url + path, encoded=True), body)
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError, Unreachable) as error:
                    reasons.append(f"{url}: {_why(error, url, self.tls)}")
                    mistakes += bool(permanent_cause(error, self.tls))
                    idle += isinstance(error, Unreachable)
                else:
                    async with answer:
                        yield answer
                    return
        listed = "; ".join(reasons)
        if idle == len(reasons):
            raise Unreachable(f"no lighthouse can answer this now ({listed}); training goes on meanwhile")
        # Where certificates are the cause, each reason says what to do.
        advice = "" if mistakes == len(reasons) else ": check the address, and that one runs there"
        raise Unreachable(f"no lighthouse answers ({listed}){advice}")

    async def _open_one(
        self, client: aiohttp.ClientSession, url: URL, body: dict[str, Any] | None
    ) -> aiohttp.ClientResponse:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        method = "GET" if body is None else "POST"
        for _ in range(_MAX_REDIRECTS):
            # Follow redirects here: aiohttp would drop the token on the way to another address.
            answer = await client.request(method, url, json=body, headers=headers, allow_redirects=False)
            if answer.status in (200, 202):
                if answer.content_type not in ("application/json", "application/x-ndjson"):
                    answer.close()
                    raise ValueError("no JSON")
                return answer
            data = await _bounded(answer)
            if answer.status != 307:
                raise _refusal(answer.status, data)
            url = await redirects.check(answer.url, answer.headers.get("Location", ""), self.urls)
        raise Unreachable("the lighthouses redirect in a circle")


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    while len(data) < _MAX_ANSWER_BYTES and (more := await answer.content.read(1 << 20)):
        data += more
    return bytes(data)


def _refusal(status: int, data: bytes) -> Exception:
    try:
        sentence = str(json.loads(data)["error"])
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
