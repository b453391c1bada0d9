"""A host is reached by name, although the name server is away or some addresses of the name are dead."""

import asyncio
import socket
import threading

import pytest

from fabric.errors import Unconnected
from fabric.transport.connecting import connect
from fabric.transport.greeting import Greeting
from fabric.transport.tcp import dial

DEAD = ("127.0.0.2", 9)
WITHIN_S = 30.0


class Network:
    """A name server with one name's addresses, and a network on which ``DEAD`` swallows packets."""

    def __init__(self, monkeypatch) -> None:
        self.answer: list[tuple] = []
        self.failure: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.dialled: list[tuple] = []
        self._real = socket.getaddrinfo
        self._connect = asyncio.get_running_loop().sock_connect
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", self._sock_connect)

    def _look_up(self, host, port, *args, flags=0, **options):
        if flags & socket.AI_NUMERICHOST:
            return self._real(host, port, *args, flags=flags, **options)
        assert self.may_answer.wait(60)
        if self.failure is not None:
            raise self.failure
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in self.answer]

    async def _sock_connect(self, sock, address):
        self.dialled.append(address)
        if address == DEAD:
            await asyncio.Event().wait()
        await self._connect(sock, address)


@pytest.fixture
async def network(monkeypatch):
    network = Network(monkeypatch)
    yield network
    network.may_answer.set()


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


async def reaches(host: str, server, within_s: float = WITHIN_S) -> bool:
    with await connect(host, server[1], within_s) as sock:
        return sock.getpeername() == server


async def test_a_dead_first_address_does_not_delay_the_others(network, server):
    network.answer = [DEAD, server]
    assert await asyncio.wait_for(reaches("dead-first", server, 3600.0), 30)


async def test_a_dead_address_is_given_up_in_time(network):
    with pytest.raises(TimeoutError):
        await connect(*DEAD, 0.01)


async def test_the_kept_address_serves_while_the_look_up_fails(network, server):
    network.answer = [server]
    assert await reaches("fails-later", server)
    network.failure = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    assert await reaches("fails-later", server)


async def test_the_kept_address_serves_while_the_look_up_is_slow(network, server):
    network.answer = [server]
    assert await reaches("slow-later", server)
    network.may_answer.clear()
    assert await asyncio.wait_for(reaches("slow-later", server, 3600.0), 30)


async def test_a_name_that_has_moved_is_not_dialled_at_its_old_address(network, server):
    network.answer = [server]
    assert await reaches("moves", server)
    network.dialled.clear()
    with socket.create_server(("127.0.0.1", 0)) as other:
        network.answer = [other.getsockname()]
        assert await reaches("moves", other.getsockname())
        assert network.dialled == [other.getsockname()]


async def test_a_failed_look_up_is_told_in_words(network):
    network.failure = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    greeting = Greeting(job="job", store_id="s1", replica="r1", incarnation=4, kind="control", to="r0")
    with pytest.raises(Unconnected, match="cannot be reached: temporary failure in name resolution"):
        await dial("never-seen:9", greeting, b"token", 5)


async def test_a_slow_look_up_of_a_new_name_is_given_up_in_time(network):
    network.may_answer.clear()
    with pytest.raises(OSError, match="the name new-and-slow was not resolved within"):
        await connect("new-and-slow", 9, 0.01)
