"""Silent connections from strangers are dropped when needed, and the job's own links still form."""

import asyncio
import socket
from contextlib import ExitStack

import pytest
import uvloop

from fabric.transport.greeting import Greeting
from fabric.transport.tcp import MAX_HANDSHAKES, Listener, ListenerIdentity, dial

TOKEN = b"token"
DEADLINE_S = 60.0
# This time limit is longer than the test: only making room can free a handshake.
NEVER_S = 1000.0


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
