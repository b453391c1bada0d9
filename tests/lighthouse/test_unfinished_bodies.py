"""A client that stops in the middle of a body gets an error and is cut off, and delays no other client."""

import asyncio
from urllib.parse import urlsplit

import pytest
from in_process import TroubledStore, lighthouse_on
from lighthouse_support import TOKEN, eventually, get
from memory_store import MemorySpace

from fabric.lighthouse.http.tokens import Tokens


@pytest.mark.parametrize("path", ["/login", "/v1/jobs/j/drain", "/v1/jobs/j/pause"])
async def test_a_body_that_never_ends_is_refused_and_the_others_are_served(http, monkeypatch, path):
    monkeypatch.setattr("fabric.runtime.http.http_service.BODY_S", 0.3)
    async with lighthouse_on(TroubledStore(MemorySpace()), lease_s=60, tokens=Tokens(TOKEN)) as found:

        async def serves() -> bool:
            return (await get(http, f"{found.url}/v1/jobs"))[0] == 200

        await eventually(serves, "a leader")
        where = urlsplit(found.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        said = f"Host: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n"
        said += "Content-Type: application/json\r\n\r\n"
        writer.write(f"POST {path} HTTP/1.1\r\n{said}".encode() + b'{"token": ')
        await writer.drain()
        assert await serves(), "somebody else is answered meanwhile"
        async with asyncio.timeout(30):
            answer = (await reader.read()).decode()  # read to the end: the service closes the connection
        writer.close()
    assert answer.startswith("HTTP/1.1 408 "), answer
    assert '{"error": "the request\'s body did not arrive within 0.3 s: send all of it"}' in answer
