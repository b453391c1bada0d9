"""The norm of a job's settings: the record and its members, not the process that speaks first."""

import pytest
from msgspec.structs import replace
from protocol.makers import member_of, record_of, session_of
from protocol.test_leader import Lighthouse, started

from fabric.model import JobEnd, Policy
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m

OURS, OTHER = "on_nan propagate", "on_nan skip"
# Three replicas, of which one is enough; and what a stranger asks for.
THREE, EIGHT = Policy(min_replicas=1, start_replicas=3), Policy(min_replicas=8, start_replicas=8)


def refused(lighthouse, name):
    return [x.reason for who, x in lighthouse.sent(m.Rejected) if who == name and not x.retry]


def told_to_wait(lighthouse, name):
    return [x.reason for who, x in lighthouse.sent(m.Rejected) if who == name and x.retry]


def ask(lighthouse, name, policy, incarnation=1, **session):
    lighthouse.incarnations[name] = incarnation
    lighthouse.do(io.SessionOpened(session_of(name, incarnation, **session), policy))


def member(lighthouse, name, policy=None, **session):
    ask(lighthouse, name, policy, generation=1, step=500, epoch=lighthouse.record.epoch, **session)


def stands(lighthouse, name):
    peer = lighthouse.core.state.liveness.peers.get(name)
    return peer is not None and peer.connected


# --- settings --------------------------------------------------------------------------------------------


def test_a_stranger_that_speaks_first_after_a_fail_over_is_refused_and_no_member_is():
    lighthouse = Lighthouse(record_of("a b", epoch=7))
    ask(lighthouse, "c", None, data=OTHER)
    assert stands(lighthouse, "c"), "nobody has spoken yet that could refuse it"
    member(lighthouse, "a", data=OURS)
    assert not refused(lighthouse, "a") and stands(lighthouse, "a")
    (why,) = refused(lighthouse, "c")
    assert "c has other data settings than a (FABRIC_ON_NAN is skip here and propagate there)" in why
    assert not stands(lighthouse, "c")
    member(lighthouse, "b", data=OURS)
    assert stands(lighthouse, "b") and not refused(lighthouse, "b")


def test_members_of_unequal_exchange_types_are_named():
    lighthouse = Lighthouse(record_of("a b", epoch=7))
    member(lighthouse, "a", data="on_nan stop exchange float32")
    ask(lighthouse, "c", None, data="on_nan stop exchange int8")
    (why,) = refused(lighthouse, "c")
    assert "c has other data settings than a (FABRIC_EXCHANGE is int8 here and float32 there)" in why


def test_a_stranger_that_speaks_while_every_session_is_away_is_refused_and_no_member_is():
    lighthouse = started("a b")
    for name in "ab":
        lighthouse.do(io.SessionClosed(name, 1))
    ask(lighthouse, "c", None, data=OTHER)
    member(lighthouse, "b")
    assert refused(lighthouse, "c") and not refused(lighthouse, "b")


def test_a_new_process_of_a_member_with_other_settings_is_refused_for_the_other_members():
    lighthouse = Lighthouse(record_of("a b", epoch=7))
    ask(lighthouse, "b", None, incarnation=2, predecessors=(1,), data=OTHER)
    member(lighthouse, "a", data=OURS)
    assert refused(lighthouse, "b") and stands(lighthouse, "a")


def test_a_stranger_is_refused_for_new_processes_of_the_replicas_that_the_record_names():
    lighthouse = Lighthouse(record_of("a b", epoch=7))
    ask(lighthouse, "c", None, data=OURS)
    ask(lighthouse, "a", None, incarnation=2, predecessors=(1,), data=OTHER)
    assert refused(lighthouse, "c") and not refused(lighthouse, "a")
    ask(lighthouse, "b", None, incarnation=2, predecessors=(1,), data=OTHER)
    assert not refused(lighthouse, "b"), "all replicas of a job may come back with new settings"


def test_a_member_keeps_its_data_slot_from_a_stranger_that_asked_for_it_first():
    record = record_of("a b", epoch=7)
    record = replace(record, roster=(member_of("a", data_slot=0), member_of("b", data_slot=1)))
    lighthouse = Lighthouse(record)
    ask(lighthouse, "c", None, data_slot=1)
    member(lighthouse, "a", data_slot=0)
    assert stands(lighthouse, "c")
    member(lighthouse, "b", data_slot=1)
    assert stands(lighthouse, "b") and "both ask for data slot 1" in refused(lighthouse, "c")[0]


def test_a_newcomer_with_equal_settings_that_speaks_first_stays():
    lighthouse = Lighthouse(record_of("a b", epoch=7))
    ask(lighthouse, "c", None, data=OURS)
    for name in "ab":
        member(lighthouse, name, data=OURS)
    assert stands(lighthouse, "c")
    ask(lighthouse, "d", None, data=OTHER)
    assert refused(lighthouse, "d")


# --- a second process of a member ------------------------------------------------------------------------


def test_a_second_process_waits_for_the_member_whose_place_it_would_take_after_a_fail_over():
    lighthouse = Lighthouse(record_of("a b", epoch=7))
    ask(lighthouse, "a", None, incarnation=2)
    assert "has not spoken to this lighthouse" in told_to_wait(lighthouse, "a")[0]
    assert not stands(lighthouse, "a")
    member(lighthouse, "a")
    assert stands(lighthouse, "a") and not refused(lighthouse, "a")
    ask(lighthouse, "a", None, incarnation=2)
    assert "taken by a living process" in refused(lighthouse, "a")[0]


@pytest.mark.parametrize(
    "proof", [{"predecessors": (1,)}, {"ended": JobEnd(record_of("a b", epoch=7).fence, 500, 1)}]
)
def test_a_next_process_on_the_same_host_does_not_wait(proof):
    lighthouse = Lighthouse(record_of("a b", epoch=7))
    ask(lighthouse, "a", None, incarnation=2, **proof)
    assert not told_to_wait(lighthouse, "a")


def test_a_next_process_does_not_wait_after_the_grace_period_or_the_kernels_word():
    lighthouse = Lighthouse(record_of("a b", epoch=7))
    lighthouse.status("a", "gone")
    ask(lighthouse, "a", None, incarnation=2)
    assert stands(lighthouse, "a")
    later = Lighthouse(record_of("a b", epoch=7))
    later.spend_credit()
    ask(later, "a", None, incarnation=2)
    assert stands(later, "a")


# --- the numbers of replicas -----------------------------------------------------------------------------


def test_the_record_holds_the_policy_on_which_the_replicas_agreed():
    lighthouse = Lighthouse(start_replicas=3)
    for name in "abc":
        ask(lighthouse, name, replace(THREE, min_replicas=2))
    record = lighthouse.record
    assert (record.policy.min_replicas, record.policy.start_replicas, record.min_replicas) == (2, 3, 2)


def test_a_stranger_that_speaks_first_after_a_fail_over_sets_no_policy():
    lighthouse = Lighthouse(replace(record_of("a b c", epoch=7), policy=THREE))
    ask(lighthouse, "d", EIGHT)
    for name in "abc":
        member(lighthouse, name, THREE)
    state = lighthouse.core.state
    assert (state.config.policy.min_replicas, lighthouse.core.limits.full) == (1, 3)
    assert not state.is_short(state.record)


def test_a_member_sets_the_policy_where_an_older_version_wrote_none():
    lighthouse = Lighthouse(record_of("a b c", epoch=7))
    ask(lighthouse, "d", EIGHT)
    member(lighthouse, "a", THREE)
    assert lighthouse.core.state.config.policy == THREE
    for name in "abc":
        member(lighthouse, name, THREE)
        lighthouse.status(name)
        lighthouse.beat(name, 500)
    lighthouse.lose("a")
    lighthouse.wait(10.0)
    assert lighthouse.record.policy == THREE and lighthouse.record.min_replicas == 1


def test_no_epoch_takes_a_strangers_policy():
    lighthouse = Lighthouse(record_of("a b c", epoch=7))
    ask(lighthouse, "d", EIGHT)
    lighthouse.status("a", "gone")
    lighthouse.wait(0.1)
    assert lighthouse.record.epoch == 8
    assert lighthouse.record.policy is None and lighthouse.record.min_replicas == 0


def test_the_epochs_minimum_is_one_number_for_members_that_ask_for_several():
    lighthouse = Lighthouse(start_replicas=3)
    for name, least in (("a", 1), ("b", 3), ("c", 1)):
        ask(lighthouse, name, replace(THREE, min_replicas=least))
    assert lighthouse.record.min_replicas == 1, "b would wait for ever for a third member, and a and c for b"


def test_all_replicas_may_come_back_with_another_policy_after_a_loss():
    lighthouse = started(
        "a b", record=replace(record_of("a b", epoch=1), policy=replace(THREE, min_replicas=2))
    )
    for name in "ab":
        lighthouse.lose(name)
        lighthouse.status(name, "gone")
    lighthouse.wait(5.0)
    ask(lighthouse, "a", THREE, incarnation=2, predecessors=(1,))
    lighthouse.status("a", incarnation=2)
    lighthouse.wait(10.0)
    assert lighthouse.record.generation == 2 and lighthouse.record.names == ("a",)
    assert (lighthouse.record.min_replicas, lighthouse.record.policy) == (1, THREE)
