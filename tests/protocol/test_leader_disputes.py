"""Members' snapshots of one step that differ prove a fault: no newcomer gets one of them on a guess."""

import pytest
from msgspec.structs import replace
from protocol.makers import record_of
from protocol.test_leader import started
from protocol.test_member import running

from fabric.model import SnapshotRef
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m


def asked_for(lighthouse, joiner):
    """Let a newcomer ask for a state; return the step of which the members take snapshots."""
    lighthouse.open(joiner)
    lighthouse.status(joiner)
    lighthouse.beat(joiner, 0, generation=0)
    lighthouse.say(joiner, m.RequestState(lighthouse.record.fence, "", True))
    return lighthouse.sent(m.TakeSnapshotFor)[0][1].step


def take(lighthouse, joiner, step, **digests):
    sources = []
    for name, digest in digests.items():
        lighthouse.say(name, m.SnapshotTaken(lighthouse.record.fence, joiner, step, digest))
        sources += lighthouse.sent(m.StateSources)
    return sources


def test_of_two_snapshots_that_differ_a_newcomer_gets_none():
    lighthouse = started("a b")
    step = asked_for(lighthouse, "c")
    assert not take(lighthouse, "c", step, a="flipped", b="right")
    (told,) = lighthouse.told("disputed")
    assert told.about == "c" and "a (flipped), b (right)" in told.why
    for name in "ab":
        lighthouse.beat(name, step)
    lighthouse.wait(1.0)
    later = max(x.step for _, x in lighthouse.sent(m.TakeSnapshotFor))
    assert later == step + 1, "the leader asks again at a later step"
    assert take(lighthouse, "c", later, a="same", b="same")


def test_of_three_snapshots_a_newcomer_gets_that_of_the_majority():
    lighthouse = started("a b c")
    step = asked_for(lighthouse, "d")
    sources = take(lighthouse, "d", step, a="flipped", b="right", c="right")
    assert [x.state.digest for _, x in sources] == ["right"]


def test_members_of_two_layouts_may_have_two_digests():
    record = record_of("a b", epoch=1)
    roster = (replace(record.roster[0], cuts="one"), replace(record.roster[1], cuts="two"))
    lighthouse = started("a b", record=replace(record, roster=roster))
    step = asked_for(lighthouse, "c")
    assert take(lighthouse, "c", step, a="rounded", b="otherwise")


def test_members_that_do_not_expect_equal_states_serve_one_of_them():
    """With FABRIC_DIGEST_EVERY=drift the others once waited a minute for a newcomer that got no state."""
    lighthouse = started("a b")
    for peer in lighthouse.core.state.liveness.peers.values():
        peer.session = replace(peer.session, replay=False)
    step = asked_for(lighthouse, "c")
    assert take(lighthouse, "c", step, a="drifted", b="otherwise")


@pytest.mark.parametrize("theirs", ["other", "start"])
def test_a_replica_outside_loads_the_others_state_where_its_own_differs_at_that_step(theirs):
    trainer = running()
    trainer.leader(m.Epoch(record_of("b", epoch=2)))
    trainer.core.memory.state.generation = 1
    trainer.core.catch_up.fetch.doing = "asked"
    trainer.leader(m.StateSources(record_of("b", epoch=2).fence, SnapshotRef(1, 0, theirs), ("http://b",)))
    assert bool(trainer.found(io.FetchState)) == (theirs == "other")
