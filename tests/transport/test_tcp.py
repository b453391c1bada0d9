"""Listener and dialler over real sockets: which peers are accepted, and the reasons sent to others."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from fabric.errors import ConfigError, ProtocolError, Refused, Unauthorized, Unconnected, Unreachable
from fabric.transport import tcp
from fabric.transport.greeting import Greeting
from fabric.transport.link import Link
from fabric.transport.tcp import Listener, ListenerIdentity, dial, parse_address

TOKEN = b"token"


def greeting(**changes) -> Greeting:
    fields = {"job": "job", "store_id": "s1", "replica": "replica-1", "incarnation": 4}
    return Greeting(**{**fields, "kind": "control", **changes})


class StartedListener:
    """A started listener and the connections that it let in."""

    def __init__(self, **options) -> None:
        self.arrivals: asyncio.Queue[tuple[Greeting, socket.socket]] = asyncio.Queue()
        identity = ListenerIdentity("job", "replica-0", "s1")
        self.listener = Listener(identity, TOKEN, lambda g, s: self.arrivals.put_nowait((g, s)), **options)

    @property
    def address(self) -> str:
        host, port = self.listener.address
        return f"{host}:{port}"

    async def arrival(self) -> tuple[Greeting, socket.socket]:
        return await asyncio.wait_for(self.arrivals.get(), 10)


@contextlib.asynccontextmanager
async def open_door(**options):
    door = StartedListener(**options)
    await door.listener.start("127.0.0.1")
    try:
        yield door
    finally:
        await door.listener.close()
        while not door.arrivals.empty():
            door.arrivals.get_nowait()[1].close()


async def test_an_authenticated_socket_is_handed_on_with_its_greeting():
    async with open_door() as door:
        ours = await dial(door.address, greeting(to="replica-0"), TOKEN, 5)
        got, theirs = await door.arrival()
        assert got == greeting(to="replica-0")
        with ours, theirs:
            for sock in (ours, theirs):
                assert sock.getblocking() is False
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1_600
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_a_rank_that_is_cut_off_is_noticed_in_seconds_unless_the_network_is_slow(monkeypatch):
    for retry_s, expected in ((tcp.QUICK_RETRY_S, 3_000), (0.0, 10_000)):
        monkeypatch.setattr(tcp, "QUICK_RETRY_S", retry_s)
        async with open_door() as door:
            ours = await dial(door.address, greeting(kind="rank", replica="replica-0"), TOKEN, 5)
            _, theirs = await door.arrival()
            with ours, theirs:
                assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == expected
                assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == expected


async def test_an_address_that_leads_back_to_the_dialler_is_named_once(capfd):
    """Two hosts of one name: each resolves it to its own address, where it listens on the same port."""
    async with open_door() as door:
        address = door.address
        for _ in range(3):
            with pytest.raises(Unconnected, match="its address leads back to replica-0 itself"):
                await dial(address, greeting(replica="replica-0", to="replica-1"), TOKEN, 5)
    assert capfd.readouterr().err == (
        f"fabric: replica-0: replica-1 at {address} cannot be reached: its address leads back to "
        "replica-0 itself, as where two hosts have one name; set FABRIC_ADVERTISE on the host of replica-1\n"
    )


async def test_a_data_socket_may_stay_unread_as_long_as_its_owner_computes():
    async with open_door() as door:
        ours = await dial(door.address, greeting(kind="data", epoch=9), TOKEN, 5)
        got, theirs = await door.arrival()
        with ours, theirs:
            assert got.epoch == 9
            assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


async def test_bytes_right_behind_the_handshake_are_left_for_the_owner():
    async with open_door() as door:
        ours = await dial(door.address, greeting(), TOKEN, 5)
        link = Link(ours, "replica-0")
        link.send(b"first")
        _, theirs = await door.arrival()
        other = Link(theirs, "replica-1")
        got: list[bytes] = []
        run = asyncio.create_task(other.run(got.append, lambda _reason: None))
        await link.close(0.01)
        await asyncio.wait_for(run, 5)
        assert got == [b"first"]


@pytest.mark.parametrize(
    ("changes", "token", "error", "sentence"),
    [
        ({}, b"wrong", Unauthorized, "token"),
        ({}, b"", Unauthorized, "token"),
        ({"job": "other"}, TOKEN, Refused, "belongs to job 'other'"),
        ({"store_id": "s2"}, TOKEN, Refused, "store"),
        ({"to": "replica-5"}, TOKEN, Refused, "looks for 'replica-5'"),
        ({"protocol": 99}, TOKEN, Refused, "protocol version 99"),
    ],
)
async def test_a_refusal_is_one_sentence_on_both_sides(changes, token, error, sentence, caplog):
    async with open_door() as door:
        with pytest.raises(error, match=sentence):
            await dial(door.address, greeting(**changes), token, 5)
        assert sentence in caplog.text
        assert door.arrivals.empty()
        ours = await dial(door.address, greeting(), TOKEN, 5)
        ours.close()
        await door.arrival()


async def test_a_link_of_a_lane_comes_from_any_rank_to_the_one_that_it_names():
    async with open_door() as door:
        lane = {"kind": "data", "rank": 3, "lane": 5, "to_rank": 0}
        (await dial(door.address, greeting(**lane), TOKEN, 5)).close()
        assert (await door.arrival())[0].lane == 5
        with pytest.raises(Refused, match="rank 0 of 'replica-1' reached rank 0 of 'replica-0'"):
            await dial(door.address, greeting(**{**lane, "rank": 0, "to_rank": 1}), TOKEN, 5)


async def test_a_probe_of_a_process_that_has_no_record_yet_is_no_alarm(caplog):
    async with open_door() as door:
        (await dial(door.address, greeting(kind="probe", store_id=""), TOKEN, 5)).close()
        assert (await door.arrival())[0].kind == "probe"
        assert "refused" not in caplog.text
        for changes in ({"kind": "probe", "store_id": "s2"}, {"kind": "control", "store_id": ""}):
            with pytest.raises(Refused, match="control store was wiped"):
                await dial(door.address, greeting(**changes), TOKEN, 5)


async def test_a_listener_without_a_store_id_admits_links_of_any_store():
    async with open_door() as door:
        door.listener.identity.store_id = ""
        (await dial(door.address, greeting(store_id="s7"), TOKEN, 5)).close()
        assert (await door.arrival())[0].store_id == "s7"


async def test_an_empty_token_means_no_authentication():
    arrived: asyncio.Queue[socket.socket] = asyncio.Queue()
    listener = Listener(ListenerIdentity("job", "r0"), b"", lambda _g, s: arrived.put_nowait(s))
    await listener.start("127.0.0.1")
    host, port = listener.address
    (await dial(f"{host}:{port}", greeting(), b"", 5)).close()
    (await asyncio.wait_for(arrived.get(), 5)).close()
    await listener.close()


@pytest.mark.parametrize(
    "noise",
    [b"", b"\0\0", b"\0\0\0\x04evil", b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\0" * 500],
)
async def test_bad_clients_do_not_stop_the_listener(noise: bytes):
    async with open_door() as door:
        for end in ("close", "reset"):
            _, writer = await asyncio.open_connection(*door.listener.address)
            writer.write(noise)
            if end == "reset":
                linger = (1).to_bytes(4, sys.byteorder) + bytes(4)
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        (await dial(door.address, greeting(), TOKEN, 5)).close()
        await door.arrival()


async def test_a_silent_client_is_dropped_in_time_and_silent_ones_do_not_lock_others_out():
    async with open_door(handshake_s=0.1) as door:
        silent = [await asyncio.open_connection(*door.listener.address) for _ in range(80)]
        (await dial(door.address, greeting(), TOKEN, 10)).close()
        await door.arrival()
        for reader, writer in silent:
            with contextlib.suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 10)
            writer.close()


async def test_a_callback_that_fails_costs_its_own_connection_only():
    seen: asyncio.Queue[str] = asyncio.Queue()

    def fail_once(g: Greeting, sock: socket.socket) -> None:
        seen.put_nowait(g.replica)
        if g.replica == "first":
            raise Refused("no room")
        sock.close()

    listener = Listener(ListenerIdentity("job", "r0"), TOKEN, fail_once)
    await listener.start("127.0.0.1")
    address = f"127.0.0.1:{listener.address[1]}"
    for name in ("first", "second"):
        (await dial(address, greeting(replica=name), TOKEN, 5)).close()
        assert await asyncio.wait_for(seen.get(), 5) == name
    await listener.close()


async def test_an_address_without_a_process_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(Unreachable, match="refused"):
        await dial(f"127.0.0.1:{port}", greeting(to="replica-3"), TOKEN, 5)


async def test_a_silent_peer_is_unreachable_after_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(Unreachable, match=r"replica-3 at .* did not answer within 0\.05 s"):
            await dial(f"127.0.0.1:{port}", greeting(to="replica-3"), TOKEN, 0.05)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"\0\0\0\x04evil"])
async def test_a_peer_that_is_not_fabric_is_told_apart(answer: bytes):
    async def serve(_reader, writer):
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        with pytest.raises(ProtocolError, match="check the address"):
            await dial(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", greeting(), TOKEN, 5)


async def test_a_range_of_ports_takes_the_first_free_one_and_says_when_none_is():
    async with open_door() as door:
        port = door.listener.address[1]
        with pytest.raises(ConfigError, match="taken by another process: choose another"):
            await Listener(ListenerIdentity("job", "r0"), b"", lambda _g, _s: None).start(
                "127.0.0.1", range(port, port + 1)
            )
        second = Listener(ListenerIdentity("job", "r0"), b"", lambda _g, _s: None)
        await second.start("127.0.0.1", range(port, min(port + 50, 65535) + 1))
        assert second.address[1] > port
        await second.close()


async def test_a_killed_process_shows_at_once_and_not_as_a_clean_close():
    code = (
        "import asyncio, sys\n"
        "from fabric.transport.greeting import Greeting\n"
        "from fabric.transport.tcp import dial\n"
        "async def main():\n"
        "    g = Greeting('job', 's1', 'replica-1', 4, 'control')\n"
        "    s = await dial(sys.argv[1], g, b'token', 20)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    async with open_door() as door:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, door.address)
        _, sock = await asyncio.wait_for(door.arrivals.get(), 30)
        link = Link(sock, "replica-1")
        reasons: list[str] = []
        run = asyncio.create_task(link.run(lambda _m: None, reasons.append))
        os.kill(child.pid, signal.SIGKILL)
        await asyncio.wait_for(run, 10)
        assert reasons[0].startswith("replica-1 is gone")
        assert not link.clean
        await child.wait()


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "a:b", "h:70000", "::1:5", "h:-1"])
def test_a_text_that_is_not_an_address_is_refused(text: str):
    with pytest.raises(ConfigError, match="host:port"):
        parse_address(text)


def test_addresses_of_every_form():
    assert parse_address("node-3:29500") == ("node-3", 29500)
    assert parse_address("[::1]:80") == ("::1", 80)


async def test_ranks_and_connections_are_spread_over_the_addresses_of_a_host():
    door = StartedListener()
    await door.listener.start("0.0.0.0")
    address = f"127.0.0.1,127.0.0.2,127.0.0.3:{door.listener.address[1]}"
    for rank, connection, place in [(0, 0, 1), (0, 1, 2), (0, 5, 3)]:
        asked = greeting(rank=rank, connection=connection, connections=6, kind="data", to_rank=0)
        with await dial(address, asked, TOKEN, 5) as ours:
            assert ours.getpeername()[0] == f"127.0.0.{place}"
        (await door.arrival())[1].close()
    await door.listener.close()


async def test_the_next_address_is_dialled_where_one_leads_nowhere():
    """The listener has one of two addresses: as where an interface is down."""
    async with open_door() as door:
        port = door.listener.address[1]
        for number in range(2):
            asked = greeting(connection=number, connections=2, kind="data")
            with await dial(f"127.0.0.1,127.0.0.2:{port}", asked, TOKEN, 5) as ours:
                assert ours.getpeername()[0] == "127.0.0.1"
            (await door.arrival())[1].close()
        with pytest.raises(Unconnected, match=r"127\.0\.0\.3:"):
            await dial(f"127.0.0.2,127.0.0.3:{port}", greeting(), TOKEN, 5)
        with pytest.raises(ConfigError, match="not an address"):
            await dial("127.0.0.2,127.0.0.3", greeting(), TOKEN, 5)


FORKING = """
import asyncio, os, signal, socket, uvloop
from fabric.transport.greeting import Greeting
from fabric.transport.tcp import Listener, ListenerIdentity, dial

async def main():
    came = asyncio.Queue()
    listener = Listener(ListenerIdentity("job", "r0"), b"token", lambda _, sock: came.put_nowait(sock))
    await listener.start("127.0.0.1", local=True)
    host, port = listener.address
    link = await dial(f"{host}:{port}", Greeting("job", "s", "r1", 1, "data", 3, to="r0"), b"token", 5.0)
    theirs = await came.get()
    ready, begun = os.pipe()
    worker = os.fork()
    if not worker:
        os.write(begun, b"1")
        signal.pause()
    os.read(ready, 1)
    try:
        await listener.close()
        theirs.close()
        assert await asyncio.get_running_loop().sock_recv(link, 1) == b"", "it is closed"
        socket.create_server((host, port)).close()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)

uvloop.run(asyncio.wait_for(main(), 20))
"""


def test_a_forked_worker_keeps_neither_the_port_nor_the_links_of_its_trainer():
    """A worker that hung in a read held the only port of its killed trainer, which never came back."""
    # Python 3.12 warns of each fork beside threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
