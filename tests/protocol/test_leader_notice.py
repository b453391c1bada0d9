"""The leader's answers to members with notice, and its work for them."""

import sys

import pytest
from msgspec.structs import replace
from protocol.makers import record_of
from protocol.test_leader import Lighthouse, started

from fabric.protocol.leader.orders import NOTICED, UNSAVED
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m


def says(lighthouse, name, **more):
    """Let a member send a heartbeat; return the answer."""
    beat = m.Heartbeat(1, lighthouse.record.epoch, 1, 5)
    lighthouse.say(name, replace(beat, **{"noticed": True, **more}))
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
    assert work(40) < 2.5 * work(20)


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


def all_noticed(before="", **entries):
    """Return a leader whose members a, b and c have notice and storage; ``before`` was told to save."""
    lighthouse = started("a b c", record_of("a b c", epoch=1, **entries))
    for peer in lighthouse.core.state.liveness.peers.values():
        peer.beat = m.Heartbeat(1, 1, 1, 5, noticed=True)
    lighthouse.now += 1.0
    assert not before or says(lighthouse, before).save
    return lighthouse


def savers_of(lighthouse, **more):
    """The members that the leader tells to save at their next heartbeats, by name."""
    lighthouse.now += 1.0
    return [name for name in "abc" if says(lighthouse, name, **more.get(name, {})).save]


def test_of_the_members_that_stay_the_one_that_is_longest_in_the_job_saves():
    """A member without a leader chooses the same one: a lighthouse may die between the two choices."""
    assert savers_of(all_noticed(a={"since": 3}, b={"since": 2}, c={"since": 2})) == ["b"]


def test_no_second_member_saves_when_the_first_one_leaves():
    """Seed 90108 of notice worlds: an epoch in which the member leaves was written while it was told."""
    lighthouse = all_noticed(before="a")
    lighthouse.core.state.record = record_of("a b c", epoch=1, a={"leaving": True})
    assert savers_of(lighthouse) == ["a"]


def test_no_epoch_lets_a_member_go_while_another_saves():
    """Seed 95208 of notice worlds: the epoch could not be entered, and left out the member that saved."""
    lighthouse = all_noticed(before="a")
    lighthouse.core.orders.draining["b"] = NOTICED
    assert not lighthouse.core.orders.drain(lighthouse.record)
    assert lighthouse.record.epoch == 1


def test_a_member_that_a_new_epoch_no_longer_lists_ends_before_the_one_that_has_saved():
    """Seed 95388 of notice worlds: it stayed and began the job again, and its next steps may be lost."""
    lighthouse = all_noticed(before="a")
    lighthouse.core.state.record = record_of("a b", epoch=2)
    lighthouse.now += 1.0
    assert not says(lighthouse, "a", saved=True, saves=True).leave, "c might go on alone"
    assert "step 5 is saved" in says(lighthouse, "c").leave
    lighthouse.lose("b")
    lighthouse.now += 1.0
    assert not says(lighthouse, "a", saved=True, saves=True).leave, "c is still there"
    lighthouse.lose("c")
    lighthouse.now += 1.0
    assert "step 5 is saved" in says(lighthouse, "a", saved=True, saves=True).leave


def test_the_one_that_has_saved_waits_for_a_leaving_member_that_the_next_leader_has_not_seen():
    """Seed 96690 of notice worlds: the one that had saved ended, and the other saved the same state again."""
    lighthouse = Lighthouse(record_of("a b", epoch=1, b={"leaving": True}))
    lighthouse.open("a", generation=1, step=5, epoch=1)
    assert not says(lighthouse, "a", saved=True, saves=True).leave, "b may live, and would save again"
    lighthouse.status("b", "gone")
    lighthouse.now += 1.0
    assert "step 5 is saved" in says(lighthouse, "a", saved=True, saves=True).leave


def test_the_member_that_says_that_it_saves_goes_on_with_it_under_another_leader():
    lighthouse = all_noticed()
    assert says(lighthouse, "c", saves=True).save
    assert savers_of(lighthouse, c={"saves": True}) == ["c"]


def test_no_second_member_saves_while_the_first_one_has_lost_its_session_only():
    lighthouse = all_noticed(before="a")
    lighthouse.status("a")
    lighthouse.do(io.SessionClosed("a", 1))
    lighthouse.now += 1.0
    assert not says(lighthouse, "b").save


def test_the_next_member_saves_when_the_first_one_is_gone():
    lighthouse = all_noticed(before="a")
    lighthouse.status("a", "gone")
    lighthouse.now += 1.0
    assert says(lighthouse, "b").save


def test_the_order_to_save_is_taken_back_while_a_member_without_notice_stays():
    lighthouse = started(record=record_of("a b", epoch=1))
    says(lighthouse, "b", noticed=False)
    ack = says(lighthouse, "a", saves=True)
    assert ack.goes_on and not ack.save
    lighthouse.open("b", generation=1, step=5, epoch=1)
    lighthouse.now += 1.0
    assert not says(lighthouse, "a", saves=True).goes_on, "it is not known whether b has notice"


def test_members_without_storage_may_end_at_once():
    record = record_of("a b", epoch=1, a={"stores": False}, b={"stores": False})
    lighthouse = started(record=record)
    says(lighthouse, "a")
    lighthouse.now += 1.0
    assert says(lighthouse, "b").leave == UNSAVED
