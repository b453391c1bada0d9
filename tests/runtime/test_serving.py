"""Clients that keep a connection and ask nothing are cut off, and the others go on being served."""

import asyncio

import aiohttp
from aiohttp import web

from fabric.runtime.web import serve


async def test_a_client_that_never_ends_its_request_is_cut_off(monkeypatch):
    monkeypatch.setattr("fabric.runtime.web.IDLE_S", 0.2)
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
            for said in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"):
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
