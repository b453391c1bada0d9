"""The leader gets complaints about cut links: which members it leaves out, and when it admits them again."""

import pytest
from protocol.makers import record_of, report_of
from protocol.test_leader import Lighthouse, runs, started

from fabric.protocol.leader.evictions import QUIET_S
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.link_graph import CALM_LIMIT_S, CALM_S


def complain(lighthouse, **unreachable):
    """Send the complaints of these members; all members stay in contact with the leader."""
    fence = lighthouse.record.fence
    for name, others in unreachable.items():
        why = f"the link to {others[0]} ended: connection timed out"
        lighthouse.say(name, m.Aborted(fence, 5, why, others[0], unreachable=tuple(others)))
    for name in lighthouse.incarnations:
        lighthouse.do(lighthouse.statuses[name])
    lighthouse.wait(0.35)


def outside(lighthouse, name, step=5, unreachable=()):
    """Return a heartbeat of a replica that was left out and knows it."""
    epoch = lighthouse.record.epoch
    lighthouse.say(name, m.Heartbeat(1, epoch, 1, step, phase="outside", unreachable=tuple(unreachable)))


def goes_on(lighthouse, names, seconds, **outsiders):
    """Let members step for this many seconds while replicas outside name the members that they cannot
    reach.
    """
    for _ in range(int(seconds * 2)):
        for name in names.split():
            lighthouse.beat(name, 5)
        for name, away in outsiders.items():
            if name not in lighthouse.record.names:
                outside(lighthouse, name, unreachable=away)
        lighthouse.wait(0.5)


def test_of_two_members_without_a_link_the_newer_is_evicted_at_once():
    lighthouse = started("a b c d")
    complain(lighthouse, a="b", b="a")
    assert lighthouse.record.names == ("a", "c", "d") and lighthouse.record.epoch == 2
    assert "b evicted: it and a cannot reach each other" in lighthouse.record.reason


def test_the_complaint_of_one_end_of_a_link_is_enough():
    lighthouse = started("a b c d")
    complain(lighthouse, c="b")
    assert lighthouse.record.names == ("a", "b", "d")


def test_complaints_after_a_test_are_judged_together_and_name_the_size():
    """Kernels end the tested links of one host within half a second of each other."""
    lighthouse = started("a b c d")
    fence = lighthouse.record.fence
    for name, others in (("a", "b"), ("b", "a"), ("c", "b"), ("d", "b"), ("b", "acd")):
        lighthouse.say(
            name, m.Aborted(fence, 5, "timed out", others[0], (), False, False, tuple(others), 16384)
        )
        for other in lighthouse.incarnations:
            lighthouse.do(lighthouse.statuses[other])
        lighthouse.wait(0.15)
    lighthouse.wait(0.2)
    assert lighthouse.record.names == ("a", "c", "d") and lighthouse.record.epoch == 2
    assert "b evicted: it and a, c, d cannot exchange messages of 16384 bytes" in lighthouse.record.reason


def test_a_replica_that_loses_large_messages_is_kept_out_with_their_size():
    lighthouse = started("a b c d")
    complain(lighthouse, a="b", b="a")
    epoch = lighthouse.record.epoch
    beat = m.Heartbeat(1, epoch, 1, 5, phase="outside", unreachable=("a",), lost_bytes=16384)
    lighthouse.say("b", beat)
    lighthouse.wait(0.1)
    said = lighthouse.core.admission.waiting_outside["b"]
    assert said.startswith("small messages pass between it and a, and messages of 16384 bytes are lost:")


def test_a_partition_into_halves_is_resolved_in_one_epoch():
    lighthouse = started("a b c d")
    complain(lighthouse, a="cd", b="cd", c="ab", d="ab")
    assert lighthouse.record.names == ("a", "b") and lighthouse.record.epoch == 2
    assert "c evicted: it and a, b cannot reach each other; d evicted:" in lighthouse.record.reason


def test_complaints_that_arrive_within_a_short_time_are_judged_together():
    """The links of one cut time out one after the other, so the first complaint alone would mislead the
    leader.
    """
    lighthouse = started("a b c d")
    fence = lighthouse.record.fence
    for name, others in (("a", "d"), ("d", "a"), ("d", "ab"), ("d", "abc")):
        lighthouse.say(name, m.Aborted(fence, 5, "timed out", others[0], unreachable=tuple(others)))
        lighthouse.wait(0.05)
    assert lighthouse.record.epoch == 1
    lighthouse.wait(0.3)
    assert lighthouse.record.names == ("a", "b", "c")


def test_a_member_that_loses_its_links_one_after_the_other_goes_and_not_its_peers():
    """The first complaint is judged alone. At the second one the replica that was left out counts too."""
    lighthouse = started("a b c d")
    complain(lighthouse, a="b", b="a")
    assert lighthouse.record.names == ("a", "c", "d")
    outside(lighthouse, "b", unreachable="a")
    complain(lighthouse, a="c", c="a")
    assert lighthouse.record.names == ("c", "d")
    assert "a evicted: it and b, c cannot reach each other" in lighthouse.record.reason


def test_a_broken_link_that_may_be_made_again_evicts_no_member():
    lighthouse = started("a b c d")
    fence = lighthouse.record.fence
    for name, other in ("ab", "ba"):
        lighthouse.say(name, m.Aborted(fence, 5, f"{other} closed the link", other))
    lighthouse.wait(0.35)
    assert sorted(lighthouse.record.names) == list("abcd") and lighthouse.record.epoch == 2


def test_a_missing_link_does_not_count_as_a_failure():
    lighthouse = started("a b c d")
    complain(lighthouse, a="b", b="a")
    assert lighthouse.core.evidence.failures == () and lighthouse.record.failures == ()


def test_a_member_that_is_silent_altogether_is_judged_for_its_silence():
    """The silent member's host may be gone, which counts as a failure, unlike cut links."""
    lighthouse = started("a b c d")
    lighthouse.statuses.pop("d")
    for _ in range(10):
        for name in "abc":
            lighthouse.beat(name, 5)
        lighthouse.wait(QUIET_S / 10 + 0.02)
    fence = lighthouse.record.fence
    for name in "abc":
        lighthouse.say(name, m.Aborted(fence, 5, "timed out", "d", unreachable=("d",)))
    for _ in range(12):
        for name in "abc":
            lighthouse.beat(name, 5)
        lighthouse.wait(0.1)
    assert lighthouse.record.names == ("a", "b", "c")
    assert "d evicted: its host has been silent" in lighthouse.record.reason
    assert [x.replica for x in lighthouse.record.failures] == ["d"]


def test_a_newcomer_that_cannot_be_reached_is_dropped_before_a_veteran():
    lighthouse = started("a b")
    lighthouse.open("c", generation=1, step=5)
    lighthouse.status("c")
    lighthouse.beat("c", 5)
    assert lighthouse.record.names == ("a", "b", "c") and not lighthouse.record.is_forced
    complain(lighthouse, a="c")
    assert lighthouse.record.names == ("a", "b")


def test_a_newcomer_that_no_member_could_link_to_is_dropped_at_once():
    """The newcomer answers no member and no round waits for it, so the members do not try again."""
    lighthouse = started("a b")
    lighthouse.open("c", generation=1, step=5)
    lighthouse.status("c")
    lighthouse.beat("c", 5)
    lighthouse.say("a", m.Aborted(lighthouse.record.fence, 5, "no link to c within 5 s", "c"))
    lighthouse.wait(0.2)
    assert lighthouse.record.names == ("a", "b") and lighthouse.record.epoch == 3
    assert "c evicted: the others could not link to it" in lighthouse.record.reason


@pytest.fixture
def cut():
    """Return a job of a, b, c, d from which b was left out; the others go on."""
    lighthouse = started("a b c d")
    complain(lighthouse, a="b", b="a")
    runs(lighthouse, "a c d", 5)
    return lighthouse


def test_a_member_that_was_left_out_stays_out_while_it_misses_a_member(cut):
    goes_on(cut, "a c d", 60, b="a")
    assert cut.record.names == ("a", "c", "d") and cut.record.epoch == 2
    assert cut.core.admission.kept_out(cut.core.state.liveness.peers["b"]) == (
        "it cannot reach a: it is let in when it reaches every member"
    )


def test_a_replica_is_admitted_when_its_links_have_been_whole_for_a_while(cut):
    goes_on(cut, "a c d", 10, b="a")
    goes_on(cut, "a c d", CALM_S - 1, b="")
    assert cut.record.names == ("a", "c", "d")
    assert "it is let in when they have held for 5 s" in cut.core.admission.kept_out(
        cut.core.state.liveness.peers["b"]
    )
    goes_on(cut, "a c d", 2, b="")
    assert cut.record.names == ("a", "c", "d", "b")


def test_a_link_that_flaps_costs_one_change(cut):
    for _ in range(10):
        goes_on(cut, "a c d", 3, b="a")
        goes_on(cut, "a c d", 3, b="")
    assert cut.record.epoch == 2


def test_a_replica_left_out_for_its_links_waits_longer_each_time_up_to_a_limit(cut):
    for wait_s in (CALM_S, 2 * CALM_S, CALM_LIMIT_S, CALM_LIMIT_S):
        goes_on(cut, "a c d", 1, b="a")
        goes_on(cut, "a c d", wait_s - 1, b="")
        assert "b" not in cut.record.names
        goes_on(cut, "a c d", 2, b="")
        assert "b" in cut.record.names
        runs(cut, " ".join(cut.record.names), 5)
        complain(cut, a="b", b="a")
        assert "b" not in cut.record.names
        runs(cut, " ".join(cut.record.names), 5)


def test_a_job_that_is_short_of_members_waits_for_no_link_to_prove_itself():
    lighthouse = started("a b", min_replicas=2)
    complain(lighthouse, a="b", b="a")
    assert lighthouse.record.names == ("a",)
    lighthouse.say("a", report_of(lighthouse.record, 5))
    goes_on(lighthouse, "a", 3, b="a")
    assert lighthouse.record.names == ("a",)
    goes_on(lighthouse, "a", 1, b="")
    assert sorted(lighthouse.record.names) == ["a", "b"]


def test_an_operator_readmits_a_replica_whose_link_is_repaired(cut):
    goes_on(cut, "a c d", 1, b="")
    cut.do(io.Operator("admit", "b", "me", "new cable"))
    goes_on(cut, "a c d", 1, b="")
    assert "b" in cut.record.names


def test_a_newcomer_names_the_members_that_it_misses_before_its_admission():
    lighthouse = started("a b")
    lighthouse.open("c", generation=1, step=5)
    lighthouse.status("c")
    goes_on(lighthouse, "a b", 2, c="b")
    assert lighthouse.record.names == ("a", "b")
    goes_on(lighthouse, "a b", 1, c="")
    assert lighthouse.record.names == ("a", "b", "c"), "it was never left out: nothing has to prove itself"


def test_no_gradient_is_kept_for_a_newcomer_that_cannot_fetch_it(cut):
    outside(cut, "b", 3, "a")
    cut.say("b", m.RequestState(cut.record.fence, "it holds no state", lost=True))
    goes_on(cut, "a c d", 3, b="a")
    assert not cut.sent(m.TakeSnapshotFor) and cut.core.joins.serving["b"].step == -1
    for _ in range(3):
        cut.say("b", m.RequestState(cut.record.fence, "nobody delivers it", lost=True))
    assert not cut.core.joins.serving["b"].blocking_reason, (
        "the others would wait for it as soon as it is back"
    )


def test_after_a_fail_over_complaints_count_as_before():
    record = record_of("a b c d", epoch=4)
    lighthouse = Lighthouse(record)
    for name in "abcd":
        lighthouse.open(name, generation=1, step=5, epoch=4)
        lighthouse.status(name)
        lighthouse.beat(name, 5)
    complain(lighthouse, a="b", b="a")
    assert lighthouse.record.names == ("a", "c", "d")
