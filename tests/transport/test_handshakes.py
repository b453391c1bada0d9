"""Silent connections from strangers are dropped when needed, and the job's own links still form."""

import asyncio
import socket
from contextlib import ExitStack

import pytest
import uvloop

from fabric.transport.greeting import Greeting
from fabric.transport.tcp import MAX_HANDSHAKES, Handshakes, Listener, ListenerIdentity, dial

TOKEN = b"token"
DEADLINE_S = 60.0
# This time limit is longer than the test: only making room can free a handshake.
NEVER_S = 1000.0


class Open:
    """Handshakes of a clock that stands still, and which of them were dropped."""

    def __init__(self, most: int) -> None:
        self.handshakes = Handshakes(most)
        self.dropped: list[str] = []

    def begin(self, address: str, name: str = ""):
        return self.handshakes.begin(address, lambda: self.dropped.append(name or address))


async def test_an_address_with_too_many_handshakes_loses_its_own_at_once():
    found = Open(most=4)
    found.begin("victim")
    for number in range(10):
        found.begin("attacker", str(number))
        await found.handshakes.make_room("attacker")
    assert found.dropped == [str(number) for number in range(8)]


async def test_no_young_connection_is_dropped_for_another_address():
    found = Open(most=4)
    begun = [found.begin(f"host {number}") for number in range(5)]
    waiting = asyncio.create_task(found.handshakes.make_room("host 4"))
    await asyncio.sleep(0)
    assert not found.dropped and not waiting.done()
    found.handshakes.end(begun[2])
    await asyncio.wait_for(waiting, DEADLINE_S)
    assert not found.dropped


async def test_the_oldest_connection_goes_when_its_time_is_over(caplog):
    found = Open(most=4)
    for number in range(8):
        found.begin(f"host {number}")
    async with asyncio.timeout(DEADLINE_S):
        await found.handshakes.make_room("host 7")
    assert found.dropped == [f"host {number}" for number in range(4)]
    assert len(caplog.messages) == 1, "one line, however many are dropped"


async def test_a_writer_that_ends_twice_is_counted_once():
    found = Open(most=2)
    one = found.begin("a")
    found.handshakes.end(one)
    found.handshakes.end(one)
    found.begin("a")
    await found.handshakes.make_room("a")
    assert not found.dropped


def connect_strangers(stack: ExitStack, address: tuple[str, int], addresses: int, says: bytes) -> None:
    """Open more connections than handshakes, from these addresses, that send only ``says``."""
    for number in range(MAX_HANDSHAKES + 50):
        source = (f"127.0.0.{number % addresses + 2}", 0)
        sock = stack.enter_context(socket.create_connection(address, DEADLINE_S, source))
        sock.sendall(says)


def greeting(replica: str) -> Greeting:
    return Greeting(job="job", store_id="s1", replica=replica, incarnation=4, kind="control")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("says", [b"", b"\0\0\1\0half a greeting"], ids=["silent", "half"])
@pytest.mark.parametrize("addresses", [1, 50], ids=["one address", "many addresses"])
def test_silent_strangers_keep_no_link_from_forming(run, says, addresses):
    arrived: list[str] = []

    def take(who: Greeting, sock: socket.socket) -> None:
        arrived.append(who.replica)
        sock.close()

    async def story() -> None:
        listener = Listener(ListenerIdentity("job", "r0", "s1"), TOKEN, take, handshake_s=NEVER_S)
        await listener.start("127.0.0.1")
        host, port = listener.address
        with ExitStack() as stack:
            # Connect in a thread, because the listener must accept meanwhile: the kernel's queue may be
            # short.
            await asyncio.to_thread(connect_strangers, stack, (host, port), addresses, says)
            links = [dial(f"{host}:{port}", greeting(f"r{n}"), TOKEN, DEADLINE_S) for n in range(6)]
            for sock in await asyncio.gather(*links):
                sock.close()
        await listener.close()

    run(story())
    assert sorted(arrived) == [f"r{n}" for n in range(6)]
