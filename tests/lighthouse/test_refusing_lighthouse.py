"""A trainer at addresses that refuse it: at its first contact, and after an admission."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from fabric.client.control import lighthouse_link
from fabric.client.control.lighthouse_link import LighthouseLink
from fabric.protocol.messages import member_events as io
from fabric.runtime.config import Settings

REFUSALS = (400, 401, 403, 404)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(lighthouse_link, "_BACKOFF_S", (0.001, 0.005))


class Stub:
    """An address whose answers the test chooses: a status, or 101 for a session that ends at once."""

    def __init__(self) -> None:
        self.status = 101
        self.asked = 0
        self.shown: list[str] = []
        self.url = ""
        self.more = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        self.shown.append(request.headers.get("Authorization", "").removeprefix("Bearer "))
        self.more.set()
        if self.status != 101:
            return web.json_response({"error": "no"}, status=self.status)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.close()
        return socket

    async def has_been_asked(self, times: int) -> None:
        wanted = self.asked + times
        while self.asked < wanted:
            self.more.clear()
            await self.more.wait()


@asynccontextmanager
async def stubs(count: int) -> AsyncIterator[list[Stub]]:
    found, runners = [], []
    for _ in range(count):
        stub, app = Stub(), web.Application()
        app.router.add_get("/v1/jobs/{job}/session", stub.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        found.append(stub)
        runners.append(runner)
    try:
        async with asyncio.timeout(60):
            yield found
    finally:
        for runner in runners:
            await runner.cleanup()


@asynccontextmanager
async def linked(
    *found: Stub, restarted: bool = False, **more: object
) -> AsyncIterator[tuple[list[str], list[io.Event]]]:
    """Return the refusal, and the events of the core."""

    refused: list[str] = []
    events: list[io.Event] = []
    settings = Settings(job="j", replica="r0", lighthouse=tuple(s.url for s in found), **more)  # type: ignore[arg-type]
    link = LighthouseLink(settings, restarted)
    task = asyncio.create_task(link.run(events.append, refused.append))
    try:
        yield refused, events
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def refusal_comes(refused: list[str]) -> None:
    while not refused:  # noqa: ASYNC110  (a list, that nobody tells of)
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("status", REFUSALS)
async def test_an_admitted_process_outlives_every_refusal(status, caplog):
    """A rotated token, an ingress or another program at the address must not end healthy trainers."""
    async with stubs(1) as (stub,), linked(stub) as (refused, events):
        await stub.has_been_asked(2)
        stub.status = status
        await stub.has_been_asked(5)
        assert not refused
        said = [r for r in caplog.records if "goes on training without a lighthouse" in r.message]
        assert len(said) == 1, "once, not at every try"
        sessions = events.count(io.LeaderConnected())
        stub.status = 101
        await stub.has_been_asked(2)
        assert not refused and events.count(io.LeaderConnected()) > sessions


async def test_a_process_that_its_launcher_has_restarted_waits_for_a_lighthouse_without_end():
    """Its launcher would take an error for final, and all lighthouses may be away for long."""
    async with stubs(1) as (stub,):
        stub.status = 503
        async with linked(stub, autonomy_s=0.0) as (refused, _):
            await refusal_comes(refused)
            assert refused[0].startswith("no lighthouse was found within 0 s")
        async with linked(stub, autonomy_s=0.0, restarted=True) as (refused, events):
            await stub.has_been_asked(5)
            stub.status = 101
            await stub.has_been_asked(7)
            assert not refused and io.LeaderConnected() in events


@pytest.mark.parametrize("status", REFUSALS)
async def test_at_the_first_contact_another_address_may_let_it_in(status):
    async with stubs(2) as (bad, good):
        bad.status = status
        async with linked(bad, good) as (refused, events):
            await good.has_been_asked(1)
            await bad.has_been_asked(2)
            assert not refused and io.LeaderConnected() in events


async def test_at_the_first_contact_it_ends_when_every_address_has_refused():
    async with stubs(2) as (first, second):
        first.status, second.status = 503, 404
        async with linked(first, second) as (refused, _):
            await second.has_been_asked(3)
            assert not refused, "the first one may let it in yet"
            first.status = 401
            await refusal_comes(refused)
        assert len(refused) == 1 and "refused the token" in refused[0]


async def test_an_address_that_stopped_refusing_is_no_longer_counted():
    async with stubs(2) as (first, second):
        first.status, second.status = 401, 503
        async with linked(first, second) as (refused, _):
            await first.has_been_asked(1)
            first.status = 503
            await first.has_been_asked(2)
            second.status = 401
            await second.has_been_asked(3)
            assert not refused


async def test_the_token_file_is_read_again_at_every_connection(tmp_path):
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("old\n")
    async with stubs(1) as (stub,), linked(stub, token_file=file):
        await stub.has_been_asked(1)
        file.write_text("new-one\nold\n")
        await stub.has_been_asked(2)
        assert stub.shown[0] == "old" and stub.shown[-1] == "new-one"
