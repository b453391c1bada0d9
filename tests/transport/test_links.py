"""One contract for every message link: over a socket pair, over TCP, in memory, and wrapped."""

import asyncio
import random
import socket
from collections.abc import Callable

import pytest
from faulty_link import FaultyLink, LinkFaults
from memory_link import MemoryLink, memory_pair

from fabric.errors import ProtocolError
from fabric.transport.link import Link

AnyLink = Link | MemoryLink | FaultyLink
Pair = tuple[AnyLink, AnyLink]
LIMIT_BYTES = 1024 * 1024


def over_sockets(pair: tuple[socket.socket, socket.socket]) -> Pair:
    return Link(pair[0], "b", LIMIT_BYTES), Link(pair[1], "a", LIMIT_BYTES)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def faulty_pair() -> Pair:
    one, two = over_sockets(tcp_pair())
    rng = random.Random(5)
    faults = LinkFaults(delay_s=(0.0, 0.003))
    return FaultyLink(one, rng, faults), FaultyLink(two, rng, faults)


MAKERS: dict[str, Callable[[], Pair]] = {
    "socketpair": lambda: over_sockets(socket.socketpair()),
    "tcp": lambda: over_sockets(tcp_pair()),
    "memory": lambda: memory_pair("a", "b", LIMIT_BYTES),
    "faulty": faulty_pair,
}


@pytest.fixture(params=MAKERS)
async def pair(request: pytest.FixtureRequest):
    one, two = MAKERS[request.param]()
    yield one, two
    one.abort("test over")
    two.abort("test over")


class Ear:
    """Runs a link, collects what it delivers, and counts its endings."""

    def __init__(self, link: AnyLink) -> None:
        self.link = link
        self.messages: list[bytes] = []
        self.reasons: list[str] = []
        self._arrived = asyncio.Event()
        self.task = asyncio.create_task(link.run(self._on_message, self.reasons.append))

    def _on_message(self, data: bytes) -> None:
        self.messages.append(data)
        self._arrived.set()

    async def count(self, number: int) -> list[bytes]:
        async with asyncio.timeout(10):
            while len(self.messages) < number:
                self._arrived.clear()
                await self._arrived.wait()
        return self.messages

    async def end(self) -> str:
        async with asyncio.timeout(10):
            await self.task
        assert len(self.reasons) == 1
        assert self.reasons[0] == self.link.reason
        return self.reasons[0]


async def test_messages_arrive_whole_and_in_order_in_both_directions(pair: Pair):
    one, two = pair
    here, there = Ear(one), Ear(two)
    sent = [bytes([i % 251]) * (1 + i * 37 % 5000) for i in range(150)]
    for message in sent:
        assert one.send(message)
        assert two.send(message[::-1])
    assert await there.count(150) == sent
    assert await here.count(150) == [m[::-1] for m in sent]


async def test_messages_sent_before_the_reader_runs_are_kept(pair: Pair):
    one, two = pair
    one.send(b"early")
    assert await Ear(two).count(1) == [b"early"]


async def test_a_clean_close_delivers_everything_and_says_goodbye(pair: Pair):
    one, two = pair
    here, there = Ear(one), Ear(two)
    sent = [bytes([i]) * 10_000 for i in range(50)]
    for message in sent:
        two.send(b"unread bytes must not turn the close into a reset")
        one.send(message)
    await one.close(5.0)
    assert await there.end() == "a closed the link"
    assert there.messages == sent
    assert two.clean
    assert await here.end() == "closed here"
    assert not one.send(b"late")


async def test_the_end_of_the_peer_is_reported_once_and_is_not_clean(pair: Pair):
    one, two = pair
    there = Ear(two)
    one.send(b"last words")
    await there.count(1)
    one.abort("crash")
    assert (await there.end()).startswith("a is gone")
    assert not two.clean
    assert not two.send(b"anybody?")
    two.abort("again")
    assert len(there.reasons) == 1


async def test_both_ends_may_close_at_once(pair: Pair):
    one, two = pair
    here, there = Ear(one), Ear(two)
    await asyncio.gather(one.close(5.0), two.close(5.0))
    assert {await here.end(), await there.end()} <= {"closed here", "a closed the link"} | {
        "b closed the link"
    }


async def test_a_close_waits_no_longer_than_its_linger(pair: Pair):
    one, _two = pair
    await asyncio.wait_for(one.close(linger_s=0.02), 5)
    assert "did not close its side" in one.reason


async def test_a_peer_that_does_not_read_costs_bounded_memory(pair: Pair):
    one, _two = pair
    if isinstance(one, FaultyLink):
        pytest.skip("the wrapper's own queue is for tests and unbounded")
    for _ in range(2000):
        if not one.send(b"x" * 16_000):
            break
    assert "does not read" in one.reason
    assert await Ear(one).end() == one.reason


async def test_a_message_that_cannot_be_used_closes_the_link_with_its_sentence(pair: Pair):
    one, two = pair

    def refuse(_data: bytes) -> None:
        raise ProtocolError("epoch must be an integer")

    reasons: list[str] = []
    one.send(b"nonsense")
    await asyncio.wait_for(two.run(refuse, reasons.append), 5)
    assert reasons == ["a sent what cannot be used: epoch must be an integer"]


async def test_an_error_of_ours_is_raised_and_still_ends_the_link_once(pair: Pair):
    one, two = pair

    def fail(_data: bytes) -> None:
        raise KeyError("bug")

    reasons: list[str] = []
    one.send(b"hello")
    with pytest.raises(KeyError):
        await asyncio.wait_for(two.run(fail, reasons.append), 5)
    assert len(reasons) == 1


async def test_a_cancelled_run_closes_the_link(pair: Pair):
    one, two = pair
    ear = Ear(one)
    await asyncio.sleep(0)
    ear.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ear.task
    assert ear.reasons == ["the link to b was dropped here"]
    assert (await Ear(two).end()).startswith("a is gone")


async def test_a_link_that_closed_before_it_ran_still_ends_once(pair: Pair):
    one, _two = pair
    one.abort("not wanted")
    assert await Ear(one).end() == "not wanted"


@pytest.mark.parametrize("data", [b"", b"x" * (1024 * 1024 + 1)])
async def test_a_message_that_no_peer_would_take_is_the_callers_mistake(pair: Pair, data: bytes):
    with pytest.raises(ProtocolError):
        if pair[0].send(data) and isinstance(pair[0], FaultyLink):
            await asyncio.wait_for(pair[0].close(), 5)


async def test_bytes_that_are_no_frames_close_the_link():
    raw, sock = socket.socketpair()
    with raw:
        ear = Ear(Link(sock, "a"))
        raw.sendall(b"\xff\xff\xff\xff GET / HTTP/1.1")
        assert "sent what cannot be used" in await ear.end()


async def test_a_frame_after_the_goodbye_closes_the_link():
    raw, sock = socket.socketpair()
    with raw:
        ear = Ear(Link(sock, "a"))
        raw.sendall(b"\0\0\0\0\0\0\0\1x")
        assert "after the goodbye" in await ear.end()


async def test_a_stalled_direction_holds_its_messages_until_released():
    inner, other = memory_pair("a", "b")
    link = FaultyLink(inner, random.Random(1), LinkFaults())
    here, there = Ear(link), Ear(other)
    link.stall_out()
    link.stall_in()
    link.send(b"one")
    other.send(b"two")
    for _ in range(20):
        await asyncio.sleep(0)
    assert (here.messages, there.messages) == ([], [])
    link.stall_out(False)
    assert await there.count(1) == [b"one"]
    assert here.messages == []
    link.stall_in(False)
    assert await here.count(1) == [b"two"]
    link.abort("over")
    await here.end()
    await there.end()


async def test_the_same_seed_cuts_at_the_same_message():
    async def sent_until_cut(seed: int) -> int:
        inner, other = memory_pair("a", "b")
        link = FaultyLink(inner, random.Random(seed), LinkFaults(cut_probability=0.05))
        there = Ear(other)
        number = 0
        while link.send(b"x"):
            number += 1
        assert "cut by a fault" in link.reason
        assert (await there.end()).startswith("a is gone")
        return number

    first = [await sent_until_cut(seed) for seed in range(8)]
    assert first == [await sent_until_cut(seed) for seed in range(8)]
    assert len(set(first)) > 1
