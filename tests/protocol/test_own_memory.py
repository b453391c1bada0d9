"""A replica that starts again takes its state from its own hosts' memory, where that moves fewer bytes."""

import pytest
from protocol.makers import record_of, report_of
from protocol.test_leader import Lighthouse, runs, started
from protocol.test_leader_ranks import addresses, status
from protocol.test_member import FIRST, Trainer, resume_of, running

from fabric.model import SnapshotRef
from fabric.protocol.leader.joins import EXPECTED_S
from fabric.protocol.messages import leader_events as lo
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.own_memory import own_snapshot, replay_steps

OWN, OTHER = {"http://c"}, {"http://a"}


@pytest.mark.parametrize(
    ("state", "gradient", "most"),
    [(12, 4, 2), (13, 4, 3), (16, 4, 3), (14, 2, 6), (4, 4, 0), (5, 4, 1), (0, 4, 0), (12, 0, 0)],
)
def test_so_many_gradients_have_fewer_bytes_than_the_state(state, gradient, most):
    """Per parameter: AdamW alone, with its steps, with a master copy, with gradients of 16 bits; SGD."""
    assert replay_steps(state, gradient) == most


def ref(step, generation=1, digest=""):
    return SnapshotRef(generation, step, digest or f"s{step}")


@pytest.mark.parametrize(
    ("held", "kept_from", "most", "chosen"),
    [
        ({ref(9): OWN}, 8, 3, ref(9)),
        ({ref(10): OWN | OTHER}, 8, 3, ref(10)),
        ({ref(8): OWN, ref(9): OWN}, 8, 3, ref(9)),
        ({ref(8): OWN, ref(9): OTHER}, 8, 3, ref(8)),  # the newer one is another replica's
        ({ref(7): OWN}, 7, 3, ref(7)),
        ({ref(6): OWN}, 0, 3, None),  # a newer state has fewer bytes
        ({ref(7): OWN}, 8, 3, None),  # members hold no gradient of step 7
        ({ref(6): OWN}, 0, 9, ref(6)),
        ({ref(5): OWN}, 0, 9, None),  # members would soon drop the gradient of step 5
        ({ref(11): OWN}, 8, 3, None),  # ahead of all that the leader knows
        ({ref(9, generation=2): OWN}, 8, 3, None),
        ({ref(9, generation=0): OWN}, 8, 3, None),
        ({ref(9): OWN, ref(9, digest="other"): OTHER}, 8, 3, None),  # one of them is wrong
        ({ref(9): OWN}, 8, 0, None),
        ({ref(10): OWN}, 8, 0, ref(10)),
        ({}, 8, 3, None),
    ],
)
def test_the_newest_own_snapshot_counts_if_the_gradients_since_then_are_there_and_are_fewer(
    held, kept_from, most, chosen
):
    assert own_snapshot(held, OWN, (1, 10), kept_from, most) == chosen


# --- the leader ------------------------------------------------------------------------------------------


def died(step=6, top=7, most=3, names="a b c", **session):
    """Replica c died in step 6, of which its server holds the snapshot, and starts again at step ``top``."""
    lighthouse = started(names)
    lighthouse.status("c", trainer="gone", snapshots=(ref(step),))
    lighthouse.wait(0.1)
    assert lighthouse.record.names == ("a", "b")
    runs(lighthouse, "a b", 6)
    for name in "ab":
        lighthouse.beat(name, top)
    lighthouse.open("c", incarnation=2, replay_steps=most, **session)
    lighthouse.status("c", incarnation=2, snapshots=(ref(step),))
    return lighthouse


def asks(lighthouse, name="c"):
    """The newcomer asks for a state; return the sources that it gets at once."""
    lighthouse.say(name, m.RequestState(lighthouse.record.fence, "nothing held", lost=True))
    return [message for to, message in lighthouse.sent(m.StateSources) if to == name]


def test_a_replica_that_starts_again_gets_its_own_hosts_snapshot_and_the_others_keep_the_gradients():
    lighthouse = died()
    (sources,) = asks(lighthouse)
    assert (sources.state, sources.urls) == (ref(6), ("http://c",))
    assert [(to, x.joiner, x.step) for to, x in lighthouse.sent(m.TakeSnapshotFor)] == [
        ("a", "c", 6),
        ("b", "c", 6),
    ]
    assert [e.why for e in lighthouse.told("serves")] == ["step 6 from its own hosts' memory, and 1 gradient"]


def test_a_request_that_a_session_lost_is_repeated():
    lighthouse = died()
    asks(lighthouse)
    lighthouse.do(lo.SessionClosed("b", 1))
    lighthouse.open("b", generation=1, step=7)
    assert [(to, x.step) for to, x in lighthouse.sent(m.TakeSnapshotFor)] == [("b", 6)]


def test_a_newcomer_whose_own_state_was_of_no_use_gets_the_others():
    lighthouse = died()
    asks(lighthouse)
    assert not asks(lighthouse)
    assert [(to, x.step) for to, x in lighthouse.sent(m.TakeSnapshotFor)] == [("a", 8), ("b", 8)]


def replaced():
    """Replica c has died with its memory, and its ranks start on another host while the job is at step 7."""
    lighthouse = started("a b c")
    lighthouse.status("c", trainer="gone")
    lighthouse.do(lo.SessionClosed("c", 1))
    lighthouse.wait(0.1)
    runs(lighthouse, "a b", 6)
    for name in "ab":
        lighthouse.beat(name, 7)
    lighthouse.do(lo.HostReplaced("c"))
    return lighthouse


def taken(lighthouse, top):
    """The members have snapshot step 8 for c, and are at step ``top`` when c opens its session."""
    for name in "ab":
        lighthouse.say(name, m.SnapshotTaken(lighthouse.record.fence, "c", 8, "d8"))
        lighthouse.beat(name, top)
    lighthouse.open("c", incarnation=2, replay_steps=2)
    lighthouse.status("c", incarnation=2)
    assert not lighthouse.sent(m.StateSources)
    lighthouse.sent(m.TakeSnapshotFor)


def asked_for(lighthouse):
    return [(to, x.joiner, x.step) for to, x in lighthouse.sent(m.TakeSnapshotFor)]


def test_members_snapshot_a_state_before_the_replica_of_a_replaced_host_asks_for_it():
    lighthouse = replaced()
    assert asked_for(lighthouse) == [("a", "c", 8), ("b", "c", 8)]
    taken(lighthouse, 10)
    (sources,) = asks(lighthouse)
    assert (sources.state.step, sources.urls) == (8, ("http://a", "http://b"))
    assert not asked_for(lighthouse)
    assert not asks(lighthouse), "that state was of no use"
    assert asked_for(lighthouse) == [("a", "c", 11), ("b", "c", 11)]


def test_a_snapshot_for_a_replaced_host_that_is_too_old_is_not_used():
    lighthouse = replaced()
    taken(lighthouse, 11)
    assert not asks(lighthouse), "three gradients have more bytes than the state"
    assert asked_for(lighthouse) == [("a", "c", 12), ("b", "c", 12)]


def test_members_keep_no_gradients_for_ever_for_a_replaced_host_that_never_comes():
    lighthouse = replaced()
    lighthouse.wait(EXPECTED_S - 1)
    lighthouse.beat("a", 8)
    assert not lighthouse.sent(m.StopServing)
    lighthouse.wait(2.0)
    assert {to for to, _ in lighthouse.sent(m.StopServing)} == {"a", "b"}


def test_members_that_stand_still_snapshot_the_step_where_they_are_for_a_replaced_host():
    """Found in simulation: the job waited for a second replica, and none came without a later step."""
    lighthouse = started("a b", min_replicas=2)
    lighthouse.status("b", trainer="gone")
    lighthouse.do(lo.SessionClosed("b", 1))
    lighthouse.wait(0.1)
    assert lighthouse.record.names == ("a",)
    lighthouse.say("a", report_of(lighthouse.record, 5))
    lighthouse.do(lo.HostReplaced("b"))
    assert asked_for(lighthouse) == [("a", "b", 5)]


def test_a_replaced_host_of_a_member_asks_nobody_for_a_snapshot():
    lighthouse = started("a b")
    lighthouse.do(lo.HostReplaced("b"))
    assert not asked_for(lighthouse)


@pytest.mark.parametrize(
    "case",
    [
        {"most": 0},  # an older version, or a small state
        {"top": 10},
        {"step": 3},  # members held no gradient of step 3 when c died
        {"replay": False},
    ],
)
def test_without_such_a_snapshot_it_gets_the_others_state(case):
    assert not asks(died(**case))


def test_a_wrong_state_in_memory_is_not_used():
    lighthouse = died()
    lighthouse.core.bases.mistrusted[ref(6)] = "c was evicted for it"
    assert not asks(lighthouse)


def test_the_next_leader_gives_the_same_answer():
    before = died()
    lighthouse = Lighthouse(before.record)
    for name in "ab":
        lighthouse.open(name, generation=1, step=7, epoch=before.record.epoch)
        lighthouse.beat(name, 7)
    runs(lighthouse, "a b", 6)
    lighthouse.open("c", incarnation=2, replay_steps=3, snapshots=(ref(6),))
    assert [x.state for x in asks(lighthouse)] == [ref(6)]


@pytest.mark.parametrize(("held_by_a", "begins"), [((ref(6),), True), ((ref(7),), False)])
def test_a_lost_hosts_rank_fetches_the_same_step_from_another_replica_or_all_take_a_newer_one(
    held_by_a, begins
):
    lighthouse = Lighthouse(start_replicas=2)
    lighthouse.open("a", ranks=addresses("a"))
    lighthouse.open("b", ranks=addresses("b"))
    runs(lighthouse, "a b", 6)
    generation = lighthouse.record.generation
    for rank in (0, 1):
        status(lighthouse, "a", rank, *held_by_a)
        status(lighthouse, "b", rank, ref(6), trainer="gone")
    lighthouse.wait(0.1)
    assert lighthouse.record.names == ("a",)
    runs(lighthouse, "a", 6)
    lighthouse.beat("a", 7, generation=generation)
    lighthouse.do(lo.TrainerStatusClosed("b", "http://b/1#1", 1))
    lighthouse.open("b", incarnation=2, ranks=addresses("b"), replay_steps=3)
    status(lighthouse, "b", 0, ref(6), incarnation=2)
    status(lighthouse, "b", 1, incarnation=2)
    sources = asks(lighthouse, "b")
    assert [(x.state, x.urls) for x in sources] == (
        [(ref(6), ("http://a", "http://a/1#1", "http://b"))] if begins else []
    )


# --- the member ------------------------------------------------------------------------------------------


def retained(trainer):
    return [e.on for e in trainer.found(io.RetainGradients)]


def test_members_keep_the_next_gradients_for_a_lost_replica():
    trainer = running("a")
    trainer.do(io.Computed(0, (0, 1), 2.0))
    alone = record_of("a", epoch=2)
    trainer.leader(m.Epoch(alone))
    assert retained(trainer) == [True]
    trainer.leader(resume_of(alone, 0, a=(2, 3)))
    trainer.do(io.Linked(2), io.Computed(0, (2, 3), 2.0))
    for step in range(6):
        trainer.do(io.Exchanged(2, step, f"g{step}"), io.Ready(step + 1, f"d{step + 1}"))
        assert retained(trainer) == ([False] if step == 5 else []), step
        trainer.do(io.Computed(step + 1, (0, 1, 2, 3), 4.0))


def test_a_member_that_is_past_the_step_keeps_gradients_from_now_on():
    trainer = running("a")
    trainer.leader(m.TakeSnapshotFor(FIRST.fence, "c", -1))
    assert retained(trainer) == [True] and trainer.said(m.SnapshotTaken)
    trainer.leader(m.StopServing(FIRST.fence, "c"))
    assert retained(trainer) == [False]


def test_a_newcomer_does_not_ask_its_own_server_for_gradients():
    trainer = Trainer("c")
    trainer.leader(m.Epoch(FIRST))
    trainer.leader(m.StateSources(FIRST.fence, ref(5), ("http://b", "http://c")))
    (fetch,) = trainer.found(io.FetchState)
    assert fetch.urls == ("http://b", "http://c")
    trainer.do(io.StateFetched(5, "s5"), io.Installed(5, "s5"))
    (gradient,) = trainer.found(io.FetchGradient)
    assert gradient.urls == ("http://b", "http://a")
