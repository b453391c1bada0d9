"""The leader's answers to members with notice, and its work for them."""

import sys
from dataclasses import replace

import pytest
from protocol.makers import record_of
from protocol.test_leader import started

from fabric.protocol.leader.orders import UNSAVED
from fabric.protocol.messages import network as m


def says(lighthouse, name, **more):
    """Let a member send a heartbeat; return the answer."""
    beat = m.Heartbeat(1, lighthouse.record.epoch, 1, 5, noticed=True)
    lighthouse.say(name, replace(beat, **more))
    (ack,) = [x for n, x in lighthouse.sent(m.HeartbeatAck) if n == name]
    return ack


def calls(act) -> int:
    count = 0

    def note(_frame, event, _argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def names_of(number):
    return [f"r{i:03}" for i in range(number)]


def work_of_plan(number, noticed):
    lighthouse = started(" ".join(names_of(number)))
    for name in names_of(noticed):
        lighthouse.say(name, m.Heartbeat(1, lighthouse.record.epoch, 1, 5, noticed=True))
    orders, record = lighthouse.core.orders, lighthouse.record
    return calls(lambda: orders.drain(record))


def work_of_answers(number):
    lighthouse = started(" ".join(names_of(number)))
    beat = m.Heartbeat(1, lighthouse.record.epoch, 1, 5, noticed=True)
    peers = list(lighthouse.core.state.liveness.peers.values())
    for peer in peers:
        peer.beat = beat
    answer = lighthouse.core.orders.heed
    return calls(lambda: [answer(peer, m.HeartbeatAck(1)) for peer in peers])


@pytest.mark.parametrize(
    "work",
    [lambda n: work_of_plan(n, 0), lambda n: work_of_plan(n, 1), work_of_answers],
    ids=["plan without notice", "plan with one notice", "answers to all"],
)
def test_the_work_for_notices_grows_with_the_members_and_not_with_their_square(work):
    """A plan once compared each member with each other one, also where no member had notice."""
    assert work(80) < 2.5 * work(40)


def test_one_member_saves_and_ends_last():
    lighthouse = started(record=record_of("a b", epoch=1))
    says(lighthouse, "b")
    lighthouse.now += 1.0
    first = says(lighthouse, "a")
    assert first.save and not first.leave
    second = says(lighthouse, "b")
    assert not second.save and not second.leave
    lighthouse.now += 1.0
    assert not says(lighthouse, "a", saved=True).leave, "b might go on alone"
    assert "step 5 is saved" in says(lighthouse, "b").leave
    lighthouse.lose("b")
    lighthouse.now += 1.0
    assert "step 5 is saved" in says(lighthouse, "a", saved=True).leave


def test_members_without_storage_may_end_at_once():
    record = record_of("a b", epoch=1, a={"stores": False}, b={"stores": False})
    lighthouse = started(record=record)
    says(lighthouse, "a")
    lighthouse.now += 1.0
    assert says(lighthouse, "b").leave == UNSAVED
