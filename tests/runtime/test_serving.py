"""Clients that keep a connection and ask nothing are cut off, and the others go on being served."""

import asyncio
import logging

import aiohttp
import pytest
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from fabric.runtime.http.http_service import NoBytesOfRequests, errors_as_json, serve


async def test_a_client_that_never_ends_its_request_is_cut_off(monkeypatch):
    monkeypatch.setattr("fabric.runtime.http.http_service.IDLE_S", 0.2)
    app = web.Application()
    asked, go = asyncio.Event(), asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        asked.set()
        await go.wait()
        return web.Response(text="done")

    app.router.add_get("/slow", slow)
    runner, port = await serve(app, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as client:
            answering = asyncio.create_task(client.get(f"http://127.0.0.1:{port}/slow"))
            await asked.wait()
            for said in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(said)
                async with asyncio.timeout(30):
                    assert await reader.read() == b"", said
                writer.close()
            go.set()
            async with await answering as answer:
                assert await answer.text() == "done", "a request under way is not idle"
    finally:
        await runner.cleanup()


async def test_a_client_that_leaves_before_its_answer_is_nothing_to_report(caplog):
    app = web.Application(middlewares=[errors_as_json])
    asked, go, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()
    requests: list[web.Request] = []

    async def slow(request: web.Request) -> web.Response:
        requests.append(request)
        asked.set()
        await go.wait()
        asyncio.get_running_loop().call_soon(answered.set)
        return web.Response(text="x" * 10_000_000)

    app.router.add_get("/", slow)
    runner, port = await serve(app, "127.0.0.1", 0)
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await asked.wait()
        writer.transport.abort()
        async with asyncio.timeout(30):
            while (line := requests[0].transport) is not None and not line.is_closing():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            go.set()
            await answered.wait()
    finally:
        await runner.cleanup()
    assert caplog.text == ""


SECRET = "a-secret-token"
HEAD = f"Host: 127.0.0.1\r\nAuthorization: Bearer {SECRET}\r\n"
NO_HTTP = {
    "a long header": f"GET / HTTP/1.1\r\n{HEAD}X: {'x' * 9000}\r\n\r\n".encode(),
    "a long token": f"GET / HTTP/1.1\r\nAuthorization: Bearer {SECRET * 900}\r\n\r\n".encode(),
    "no request line": f"GARBAGE\r\n{HEAD}\r\n".encode(),
    "a version": f"GET / HTTP/9.9\r\n{HEAD}\r\n".encode(),
    "a length": f"POST / HTTP/1.1\r\n{HEAD}Content-Length: zz{SECRET}\r\n\r\n".encode(),
    "a header without a colon": f"GET / HTTP/1.1\r\nAuthorization Bearer {SECRET}\r\n\r\n".encode(),
    "a chunk": f"POST / HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n{SECRET}\r\n\r\n".encode(),
    "a compressed body": (
        f"POST / HTTP/1.1\r\n{HEAD}Content-Encoding: gzip\r\nContent-Length: {len(SECRET)}\r\n\r\n{SECRET}"
    ).encode(),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + SECRET.encode(),
    "a second request": f"GET / HTTP/1.1\r\n{HEAD}\r\nGARBAGE {SECRET}\r\n\r\n".encode(),
}


@pytest.mark.parametrize("what", NO_HTTP)
async def test_a_malformed_request_is_refused_and_leaves_no_bytes_in_the_log(what, caplog, monkeypatch):
    app = web.Application(middlewares=[errors_as_json])

    async def read(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app.router.add_route("*", "/", read)
    monkeypatch.setattr("fabric.runtime.http.http_service.IDLE_S", 0.2)
    # Use a fresh log limit, which has not counted the lines of earlier cases.
    monkeypatch.setattr(
        logging.getLogger("fabric.runtime.http.http_service.requests"), "filters", [NoBytesOfRequests()]
    )
    runner, port = await serve(app, "127.0.0.1", 0)
    try:
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(NO_HTTP[what])
            async with asyncio.timeout(30):
                answer = await reader.read()
            writer.close()
            assert b"HTTP/1.1 400 " in answer or b"HTTP/1.0 400 " in answer, answer
    finally:
        await runner.cleanup()
    assert SECRET not in caplog.text and "Traceback" not in caplog.text
    assert len(caplog.text.splitlines()) <= 1, "a line at most"


def test_a_flood_of_malformed_requests_is_a_line_a_minute_with_a_count():
    now = [0.0]
    found = NoBytesOfRequests(clock=lambda: now[0])
    error = BadHttpMessage(SECRET)
    lines = []
    for second in range(200):
        now[0] = float(second)
        record = logging.LogRecord(
            "x",
            logging.ERROR,
            "",
            0,
            "Error handling request from %s",
            ("10.0.0.1",),
            (type(error), error, None),
        )
        if found.filter(record):
            lines.append(record.getMessage())
    first = "Error handling request from 10.0.0.1: it is malformed (BadHttpMessage)"
    later = f"{first}; so were 59 more since the last such line"
    assert lines == [first, later, later, later]


def test_another_error_than_a_malformed_request_keeps_its_line():
    found = NoBytesOfRequests(clock=lambda: 0.0)
    for error in (BadHttpMessage("x"), ValueError("x"), ValueError("x")):
        last = logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), (type(error), error, None))
        assert found.filter(last)
    assert last.levelno == logging.ERROR and last.exc_info
