"""The links of one process over real sockets: the peers that a failure names, and the results of probes."""

import asyncio
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from protocol.makers import record_of

from fabric.client.control import link_echo
from fabric.client.control import peers as shell
from fabric.client.control.peers import Peers
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.model import Member
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.network import LARGE_BYTES
from fabric.runtime.http.token_file import TokenFile
from fabric.transport.greeting import Greeting
from fabric.transport.tcp import ListenerIdentity, dial


class Party:
    """One process's links; ``events`` holds the events that the links feed to the core."""

    def __init__(self, name: str, plane: CpuRing | None = None) -> None:
        self.name = name
        self.plane = plane or CpuRing(shared_memory=False)
        self.peers = Peers(ListenerIdentity("job", name), 1, TokenFile.of("token"), self.plane, link_s=1.0)
        self.events: asyncio.Queue = asyncio.Queue()
        self.member = Member(name, 1, "", "")

    async def __aenter__(self) -> "Party":
        port = await self.peers.start("127.0.0.1", "0", self.events.put_nowait)
        self.member = Member(self.name, 1, f"127.0.0.1:{port}", "")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.peers.close()
        self.plane.close()

    async def event(self):
        return await asyncio.wait_for(self.events.get(), 60)


def of(*members):
    found = record_of(" ".join(x.replica for x in members), epoch=1)
    return structs.replace(found, roster=members)


@pytest.fixture
def nobody():
    """An address at which no process listens during the test."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


async def test_a_link_that_is_not_made_names_the_next_member_of_the_ring():
    """The next member accepts the connection but answers no greeting, so it is late and not unreachable."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with Party("b") as b:
            silent = Member("a", 1, f"127.0.0.1:{mute.getsockname()[1]}", "")
            b.peers.link_up(of(silent, b.member))
            failed = await b.event()
    assert isinstance(failed, io.LinkFailed)
    assert (failed.about, failed.why, failed.unreachable) == ("a", "no link to a within 1 s", ())


async def test_a_peer_that_cannot_be_reached_is_named_as_unreachable(nobody, monkeypatch):
    monkeypatch.setattr(shell, "CONNECT_S", 0.2)
    async with Party("a") as a:
        a.peers.link_up(of(a.member, Member("b", 1, nobody, "")))
        failed = await a.event()
    assert (failed.about, failed.unreachable) == ("b", ("b",))
    assert "b at 127.0.0.1:" in failed.why and "cannot be reached" in failed.why


async def test_a_probe_finds_the_reachable_peers_and_leaves_no_link(nobody):
    async with Party("a") as a, Party("b") as b:
        a.peers.probe((a.member, b.member, Member("c", 1, nobody, "")))
        assert await a.event() == io.Probed(("c",))
        assert a.peers.linked == b.peers.linked == [] and b.events.empty()


async def test_a_probe_tells_that_large_messages_are_lost_and_small_ones_pass(nobody, monkeypatch):
    """The end that answers reads the greeting, and nothing of the large message."""

    async def read_nothing(sock):
        await asyncio.Event().wait()

    monkeypatch.setattr(link_echo, "PROBE_S", 0.2)
    monkeypatch.setattr(link_echo, "answer_probe", read_nothing)
    async with Party("a") as a, Party("b") as b:
        a.peers.probe((b.member,))
        assert await a.event() == io.Probed(("b",), LARGE_BYTES)
        a.peers.probe((b.member, Member("c", 1, nobody, "")))
        assert await a.event() == io.Probed(("b", "c")), "small messages do not pass to c"


async def test_a_probed_member_of_the_version_before_ends_the_connection_and_counts_as_reached(monkeypatch):
    async def close(sock):
        sock.close()

    monkeypatch.setattr(link_echo, "answer_probe", close)
    async with Party("a") as a, Party("b") as b:
        a.peers.probe((b.member,))
        assert await a.event() == io.Probed(())


async def test_two_members_that_reach_each_other_are_linked():
    async with Party("a") as a, Party("b") as b:
        record = of(a.member, b.member)
        for party in (a, b):
            party.peers.link_up(record)
        assert [await a.event(), await b.event()] == [io.Linked(1), io.Linked(1)]
        assert (a.peers.linked, b.peers.linked) == (["b"], ["a"])


class ManyPlane(CpuRing):
    """Wants so many connections, and counts those that it gets: to the next member, from the previous one."""

    def __init__(self, connections: int, shared_memory: bool) -> None:
        super().__init__(shared_memory=shared_memory)
        self.connections, self.counts, self.pairs = connections, (0, 0), set()

    def install(self, ring, next_socket, previous_socket, further_next=(), further_previous=()) -> None:
        self.counts = 1 + len(further_next), 1 + len(further_previous)
        self.pairs |= {(x.getsockname(), x.getpeername()) for x in (next_socket, *further_next)}
        self.pairs |= {(x.getpeername(), x.getsockname()) for x in (previous_socket, *further_previous)}
        super().install(ring, next_socket, previous_socket, further_next, further_previous)


@pytest.mark.parametrize(
    ("of_a", "of_b", "is_local"), [(4, 4, False), (4, 1, False), (2, 16, False), (4, 4, True)]
)
async def test_the_dialler_says_how_many_connections_a_link_has_and_one_host_needs_one(of_a, of_b, is_local):
    planes = ManyPlane(of_a, is_local), ManyPlane(of_b, is_local)
    async with Party("a", planes[0]) as a, Party("b", planes[1]) as b:
        record = of(a.member, b.member)
        for party in (a, b):
            party.peers.link_up(record)
        assert [await a.event(), await b.event()] == [io.Linked(1), io.Linked(1)]
        expected = (1, 1) if is_local else (of_a, of_b)
        assert (planes[0].counts, planes[1].counts) == (expected, expected[::-1])
        # Both ends have the same connections, in number and in order.
        assert planes[0].pairs == planes[1].pairs


async def test_a_link_of_which_a_connection_is_missing_is_not_made():
    async with Party("a") as a, Party("b") as b:
        a.peers.link_up(record := of(a.member, b.member))
        key = b.peers._greeting(record.store_id, a.member, "data", 1)
        for number in (0, 2):
            sock = await dial(a.member.link, replace(key, connection=number, connections=3), b"token", 60)
            sock.setblocking(False)
        failed = await a.event()
        while not isinstance(failed, io.LinkFailed):
            failed = await a.event()
        assert failed.about == "b"
        assert not a.peers._arrived(shell._RingArrival(1, shell.ProcessKey("b", 1), 0))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("kind", ["data", "control", "echo", "probe"])
async def test_links_that_no_epoch_needs_keep_few_descriptors(kind, monkeypatch):
    """1,500 ring links of a process with the token once kept 1,500 descriptors."""
    monkeypatch.setattr(shell, "MOST_EARLY", 8)
    monkeypatch.setattr(link_echo, "MOST_ECHOES", 8)
    monkeypatch.setattr(link_echo, "MOST_PROBES", 8)
    monkeypatch.setattr(link_echo, "PROBE_S", 3600.0)  # no probe ends by itself in this test
    async with Party("a") as a, Party("b") as b:
        record = of(a.member, b.member)
        before = descriptors()
        with ExitStack() as undo:
            for number in range(60):
                greeting = Greeting("job", "", f"x{number}", number, kind, epoch=number, lane=number)
                undo.enter_context(await dial(a.member.link, greeting, b"token", 60))
            async with asyncio.timeout(60):
                # The dialler's ends are in this process too.
                while descriptors() - before > 60 + 8 + 2:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            for party in (a, b):
                party.peers.link_up(record)
            found = [await b.event()]
            while not isinstance(linked := await a.event(), io.Linked):
                assert isinstance(linked, io.LinkLost) and linked.replica.startswith("x")
        assert (found, linked) == ([io.Linked(1)], io.Linked(1))


async def test_a_link_that_an_epoch_needs_outlives_a_flood_of_others(monkeypatch):
    monkeypatch.setattr(shell, "MOST_EARLY", 8)
    async with Party("a") as a, Party("b") as b:
        record = of(a.member, b.member)
        b.peers.link_up(record)
        a.peers.link_up(record)
        with ExitStack() as undo:
            for number in range(60):
                greeting = Greeting("job", record.store_id, f"x{number}", number, "data", epoch=9)
                undo.enter_context(await dial(a.member.link, greeting, b"token", 60))
            assert [await a.event(), await b.event()] == [io.Linked(1), io.Linked(1)]
