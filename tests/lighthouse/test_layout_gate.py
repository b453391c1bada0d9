"""A layout that a session announces is read in a thread: the lighthouse's loop serves all jobs meanwhile."""

import threading

import pytest
from in_process import lighthouse_on
from lighthouse_support import WireMember, close_all, get
from memory_store import MemorySpace, MemoryStore
from protocol.test_lanes import LINEAR, sharded, single

from fabric.lighthouse.connections import connection
from fabric.lighthouse.connections.connection import LayoutGate, LayoutReader
from fabric.model import RankAddress
from fabric.protocol.messages import network as m
from fabric.protocol.rules import layout_text
from fabric.protocol.rules.layout_text import layout_summary

RANK = RankAddress("127.0.0.1:1", "http://127.0.0.1:1")


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Begin without any layout that an earlier test has made known."""
    monkeypatch.setattr(layout_text, "_known", {})


async def test_other_jobs_and_requests_go_on_while_a_layout_is_read(http, monkeypatch):
    may_end, threads = threading.Event(), []

    def read(text):
        threads.append(threading.current_thread())
        assert may_end.wait(30.0)
        return layout_summary(text)

    monkeypatch.setattr(connection, "layout_summary", read)
    async with lighthouse_on(MemoryStore(MemorySpace())) as lighthouse:
        cuts = layout_text.layout_text(sharded(LINEAR, 2))
        slow = await WireMember(
            http, lighthouse.url, "r0", job="a", replicas="1", cuts=cuts, ranks=(RANK,)
        ).open()
        # This message follows at once; it is held back in its place behind the first one.
        await slow.say(m.Heartbeat(7, 0, 0, 0))
        other = await WireMember(http, lighthouse.url, "r0", job="b", replicas="1").open()
        assert (await other.epoch(1)).names == ("r0",)
        assert (await get(http, f"{lighthouse.url}/v1/jobs/b"))[0] == 200
        assert (await get(http, f"{lighthouse.url}/v1/jobs/a"))[0] == 404, "the session is not open yet"
        may_end.set()
        assert (await slow.next(m.HeartbeatAck)).number == 7
        again = await WireMember(
            http, lighthouse.url, "r0", job="c", replicas="1", cuts=cuts, ranks=(RANK,)
        ).open()
        assert (await again.epoch(1)).names == ("r0",)
        assert len(threads) == 1 and threads[0] is not threading.current_thread(), "a layout is read once"
        await close_all([slow, other, again])


@pytest.mark.parametrize(
    ("cuts", "why"),
    [
        ("no layout", "announced a layout that cannot be read"),
        (layout_text.layout_text(single(LINEAR)), "r0 has 2 ranks and announced the layout of 1"),
    ],
)
async def test_a_wrong_layout_ends_its_own_connection_with_a_sentence(http, cuts, why):
    async with lighthouse_on(MemoryStore(MemorySpace())) as lighthouse:
        member = await WireMember(http, lighthouse.url, "r0", cuts=cuts, ranks=(RANK,)).open()
        assert why in (await member.next(m.Rejected)).reason
        await member.close()


async def test_messages_of_a_connection_that_has_ended_are_forgotten(monkeypatch):
    may_end, taken = threading.Event(), []
    monkeypatch.setattr(connection, "layout_summary", lambda text: may_end.wait(30.0))
    reader = LayoutReader()
    gate = LayoutGate(reader, "a", None)
    assert gate.reads("cuts", "session", taken.append, taken.append) and gate.holds("beat")
    reading = reader.read("b", "other cuts")  # it runs after the first one
    gate.close()
    may_end.set()
    await reading
    assert not taken
