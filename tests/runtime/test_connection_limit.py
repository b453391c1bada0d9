"""The limit of a service's connections: which connections it closes, and that valid requests are still
answered.
"""

import asyncio
import os
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import aiohttp
import pytest
import uvloop
from aiohttp import web
from authority import Authority

from fabric.runtime.http.connection_limit import (
    FULL,
    IDLE,
    ConnectionLimit,
    ConnectionSlot,
    Limits,
    raise_descriptor_limit,
    share_of,
)
from fabric.runtime.http.http_service import read_body, serve
from fabric.runtime.http.tls import Tls

DEADLINE_S = 60


class Room:
    """A limit, and the names of the connections that it closed."""

    def __init__(self, total: int, idle: int) -> None:
        self.limit = ConnectionLimit(Limits(total, idle))
        self.closed: list[str] = []

    def enter(self, address: str, name: str = "") -> ConnectionSlot | None:
        return self.limit.admit(address, lambda: self.closed.append(name or address))


def test_the_longest_idle_connection_goes_and_never_one_with_a_request():
    room = Room(total=4, idle=4)
    data_slots = [room.enter(name) for name in "abcd"]
    assert all(data_slots)
    data_slots[0].busy()
    data_slots[1].busy()
    data_slots[1].idle()
    assert room.enter("e") is not None
    assert room.closed == ["c"], "b has asked something since, and a is being answered"
    assert room.limit.open == 4 and room.limit.refused == {IDLE: 1, FULL: 0}


def test_where_no_connection_idles_the_new_one_is_refused():
    room = Room(total=4, idle=4)
    for name in "abcd":
        room.enter(name).busy()
    assert room.enter("e") is None
    assert room.closed == [] and room.limit.open == 4 and room.limit.refused == {IDLE: 0, FULL: 1}


def test_an_address_over_its_share_loses_its_own_connections():
    room = Room(total=8, idle=8)
    room.enter("victim")
    for number in range(20):
        assert room.enter("attacker", f"attacker {number}") is not None
    assert room.closed == [f"attacker {number}" for number in range(16)], "half of the room is its share"
    assert room.limit.open == 5


def test_an_address_whose_requests_fill_its_share_is_refused():
    room = Room(total=8, idle=8)
    data_slots = [room.enter("attacker") for _ in range(4)]
    for data_slot in data_slots:
        data_slot.busy()
    assert room.enter("attacker") is None
    assert room.enter("victim") is not None
    data_slots[0].leave()
    assert room.enter("attacker") is not None


def test_a_caller_may_wait_until_no_young_connection_is_closed_for_another_address(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    room = Room(total=4, idle=4)
    for name in ("attacker", "attacker", "a"):
        room.enter(name)
    assert room.limit.young_s("b", 0.25) == 0.0, "there is room"
    room.enter("b")
    now += 0.1
    assert room.limit.young_s("c", 0.25) == pytest.approx(0.15)
    assert room.limit.young_s("attacker", 0.25) == 0.0, "it loses its own at once"
    now += 0.2
    assert room.limit.young_s("c", 0.25) < 0
    room.enter("c").leave()
    assert room.closed == ["attacker"] and room.limit.young_s("c", 0.25) == 0.0


def test_idle_connections_have_a_lower_limit_than_all_connections():
    room = Room(total=100, idle=10)
    for number in range(30):
        room.enter(f"host {number}")
    assert room.limit.open == 10 and room.closed == [f"host {number}" for number in range(20)]


def test_a_seat_is_free_once_however_often_it_is_left():
    room = Room(total=4, idle=4)
    data_slot = room.enter("a")
    for _ in range(2):
        data_slot.leave()
    data_slot.idle()
    data_slot.busy()
    assert room.limit.open == 0 and room.limit.idling == 0
    for number in range(10):
        room.enter(f"host {number}").leave()
    assert room.closed == []


@pytest.mark.parametrize("descriptors", [16, 256, 1024, 20_000, 1 << 20])
def test_there_is_always_a_reserve_of_descriptors(descriptors):
    limits = Limits.of(descriptors)
    assert 0 < limits.idle // 2 < limits.idle <= limits.total <= descriptors
    assert descriptors - limits.total >= min(512, descriptors // 2)


def test_many_strangers_are_one_line_in_the_log(caplog):
    room = Room(total=4, idle=4)
    for number in range(50):
        room.enter(f"host {number}")
    (line,) = caplog.messages
    assert "4 of them idle, and the oldest of these was closed, from host 0" in line


@pytest.mark.parametrize(
    ("address", "share"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("what is this", "what is this"),
    ],
)
def test_an_ipv6_host_has_one_share_for_its_whole_network(address, share):
    assert share_of(address) == share


def test_the_limit_of_descriptors_is_raised_to_the_hard_limit():
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), most))
    try:
        assert raise_descriptor_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(most, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


# --- with real sockets ------------------------------------------------------------------------------------


class AnsweringService:
    """A service that answers at once, when the test says so, or after a body."""

    scheme = "http"
    tls: ssl.SSLContext | None = None

    def __init__(self) -> None:
        self.limit = ConnectionLimit(Limits(total=16, idle=8))
        self.port = 0
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def fast(self, _: web.Request) -> web.Response:
        return web.Response(text="fast")

    async def slow(self, _: web.Request) -> web.Response:
        self.asked.set()
        await self.go.wait()
        return web.Response(text="slow")

    async def body(self, request: web.Request) -> web.Response:
        self.asked.set()
        return web.Response(text=str(len(await read_body(request))))

    async def ask(self, path: str) -> str:
        url = f"{self.scheme}://127.0.0.1:{self.port}/{path}"
        async with asyncio.timeout(DEADLINE_S), aiohttp.request("GET", url, ssl=self.tls or True) as answer:
            return await answer.text()


@asynccontextmanager
async def service(tls: Tls | None = None) -> AsyncIterator[AnsweringService]:
    found, tls = AnsweringService(), tls or Tls()
    found.scheme, found.tls = tls.scheme, tls.client_context()
    app = web.Application()
    app.router.add_get("/fast", found.fast)
    app.router.add_get("/slow", found.slow)
    app.router.add_post("/body", found.body)
    context = tls.server_context()
    runner, found.port = await serve(
        app, "127.0.0.1", 0, ssl_context=context, shutdown_s=0.1, limit=found.limit
    )
    try:
        yield found
    finally:
        await runner.cleanup()


@contextmanager
def strangers(port: int, count: int, says: bytes, host: str = "127.0.0.2") -> Iterator[list[socket.socket]]:
    """Open connections from another address that send ``says`` and then nothing."""
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            one = stack.enter_context(
                socket.create_connection(("127.0.0.1", port), DEADLINE_S, source_address=(host, 0))
            )
            one.sendall(says)
            found.append(one)
        yield found


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until ``condition`` is true."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - the service under test signals nothing
            await asyncio.sleep(0)


def in_every_loop(story):
    """Run a scenario on both event loops."""

    @pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
    def test(run):
        run(story())

    return test


@in_every_loop
async def test_silent_strangers_make_room_and_keep_no_member_out():
    async with service() as found:
        slow = asyncio.create_task(found.ask("slow"))
        await found.asked.wait()
        for says in (b"", b"GET / HT", b"\x16\x03\x01"):
            with strangers(found.port, 40, says) as sockets:
                assert await found.ask("fast") == "fast"
                # Connections over the share are closed, and idle connections within the share stay.
                await until(lambda: found.limit.refused.total() >= 36)
                assert await asyncio.to_thread(sockets[0].recv, 1) == b""
            found.limit.refused[IDLE] = 0
        found.go.set()
        assert await slow == "slow", "a request under way is not idle"
        assert found.limit.refused[FULL] == 0


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_handshake_that_does_not_end_is_idle_too(run, tmp_path):
    """An event loop's own server does not report unfinished TLS handshakes, but each takes a descriptor."""
    tls = Authority(tmp_path / "ca").tls("service")

    async def story() -> None:
        async with service(tls) as found:
            for says in (b"", b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n\r\n"):
                with strangers(found.port, 40, says):
                    assert await found.ask("fast") == "fast"
            assert found.limit.refused[IDLE] > 0 and found.limit.refused[FULL] == 0
        await until(lambda: not found.limit.open)

    run(story())


@in_every_loop
async def test_a_body_that_does_not_come_is_no_request_under_way():
    async with service() as found:
        head = b"POST /body HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n\r\n12"
        with strangers(found.port, 1, head) as (first,):
            await found.asked.wait()
            with strangers(found.port, 4, b""):
                assert await asyncio.to_thread(first.recv, 100) == b""
        assert await found.ask("fast") == "fast"


@in_every_loop
async def test_a_service_that_has_ended_accepts_and_leaves_no_connection():
    async with service() as found:
        with strangers(found.port, 3, b""):
            assert await found.ask("fast") == "fast"
    with pytest.raises(aiohttp.ClientConnectionError):
        await found.ask("fast")
    await until(lambda: not found.limit.open)


@in_every_loop
async def test_without_descriptors_an_idle_connection_goes_and_accepting_goes_on():
    async with service() as found:
        with strangers(found.port, 3, b""):
            await until(lambda: found.limit.open == 3)
            with socket.socket() as late, ExitStack() as stack:
                late.setblocking(False)
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)
                stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limit)
                os.close(lowest := os.dup(0))
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limit[1]))
                await asyncio.get_running_loop().sock_connect(late, ("127.0.0.1", found.port))
                await until(lambda: found.limit.refused[IDLE])
            assert await found.ask("fast") == "fast"
