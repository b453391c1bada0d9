"""The leader gets the members' waits: stalls, bad links, long user code, blocking joins."""

import pytest
from msgspec.structs import replace
from protocol.makers import report_of
from protocol.test_leader import started

from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.decide import Resume


def stalled(lighthouse, **waiting):
    """Send each member's abort after a stall, with the member that it waited for."""
    fence = lighthouse.record.fence
    for name, others in waiting.items():
        about = others[0] if others else ""
        lighthouse.say(name, m.Aborted(fence, 5, "stalled", about, tuple(others), stalled=True))
    lighthouse.wait(0.3)


def resumed(lighthouse):
    """Let all members report and get the decision, without a commit."""
    for name in lighthouse.record.names:
        lighthouse.say(name, report_of(lighthouse.record, 5))
        lighthouse.say(name, m.Running(lighthouse.record.fence, 5))


def test_a_member_without_an_excuse_is_evicted_after_the_second_stall():
    lighthouse = started("a b c")
    stalled(lighthouse, a="c", b="a", c="")
    assert len(lighthouse.record.names) == 3, "once may be chance"
    resumed(lighthouse)
    stalled(lighthouse, a="b", b="c")
    lighthouse.wait(0.5)
    assert sorted(lighthouse.record.names) == ["a", "b"]
    assert (
        "c evicted: all others waited for it in 2 rounds, and it waited for none of them"
        in lighthouse.record.reason
    )


def test_a_circle_is_a_links_fault_and_the_ring_avoids_it():
    lighthouse = started("a b c d")
    # The link from a to b is broken; every member waits for the member before it.
    stalled(lighthouse, b="a")
    names = lighthouse.record.names
    assert sorted(names) == list("abcd")
    assert ("a", "b") not in zip(names, names[1:] + names[:1], strict=True)


def late(lighthouse, step, busy="", busy_s=0.0):
    """Return a job in which a and b wait for c; c may announce long work."""
    epoch = lighthouse.record.epoch
    lighthouse.say("c", m.Heartbeat(1, epoch, 1, step, busy=busy, busy_s=busy_s))
    for name in "ab":
        lighthouse.say(name, m.Heartbeat(1, epoch, 1, step, waiting_for=("c",)))


@pytest.fixture
def lighthouse():
    found = started("a b")
    found.open("c", generation=1, step=5, user_code_s=100.0)
    found.beat("c", 5)
    for name in "abc":
        found.say(name, m.Running(found.record.fence, 5))
        found.beat(name, 6)
    assert found.record.names == ("a", "b", "c")
    return found


def wait_for(lighthouse, seconds, **busy):
    for _ in range(int(seconds)):
        late(lighthouse, 6, **busy)
        lighthouse.wait(1.0)


def test_user_code_is_waited_for_up_to_its_bound(lighthouse):
    wait_for(lighthouse, 99)
    assert "c" in lighthouse.record.names
    wait_for(lighthouse, 3)
    assert lighthouse.record.names == ("a", "b")
    assert "c evicted: it was in user code while the others waited for 100 s" in lighthouse.record.reason


@pytest.mark.parametrize(
    ("step", "phase", "is_back"),
    [(6, "outside", False), (6, "outside, waiting", True), (7, "outside", True)],
)
def test_a_member_still_in_user_code_is_not_readmitted(lighthouse, step, phase, is_back):
    """The member is only one step behind, but the others would wait for it again."""
    wait_for(lighthouse, 102)
    for name in "ab":
        lighthouse.say(name, report_of(lighthouse.record, 6))
        lighthouse.say(name, m.Running(lighthouse.record.fence, 6))
    for _ in range(60):
        lighthouse.say("c", m.Heartbeat(1, lighthouse.record.epoch, 1, step, phase=phase))
        for name in "ab":
            lighthouse.beat(name, 7)
        lighthouse.wait(1.0)
    assert ("c" in lighthouse.record.names) is is_back


def test_a_member_that_came_early_is_not_evicted_when_its_vote_is_late(lighthouse):
    """First a waits for b and c; then a and b wait for c for half an hour; last a waits for b's vote."""
    epoch = lighthouse.record.epoch
    lighthouse.say("c", m.Heartbeat(1, epoch, 1, 6, busy="evaluation", busy_s=4000.0))
    lighthouse.say("a", m.Heartbeat(1, epoch, 1, 6, waiting_for=("b", "c")))
    for _ in range(1900):
        lighthouse.say("c", m.Heartbeat(1, epoch, 1, 6, busy="evaluation", busy_s=4000.0))
        for name in "ab":
            lighthouse.say(name, m.Heartbeat(1, epoch, 1, 6, waiting_for=("c",)))
        lighthouse.wait(1.0)
    assert tuple(lighthouse.core.evictions.stragglers.since) == ("c",)
    lighthouse.say("a", m.Heartbeat(1, epoch, 1, 6, waiting_for=("b",)))
    lighthouse.wait(1.0)
    assert lighthouse.record.names == ("a", "b", "c")


def test_announced_user_code_gets_the_announced_time(lighthouse):
    wait_for(lighthouse, 250, busy="evaluation", busy_s=300.0)
    assert "c" in lighthouse.record.names
    wait_for(lighthouse, 90)
    assert "c" in lighthouse.record.names, "back from it, its user code has its own time again"


def test_user_code_beyond_its_announced_time_is_evicted(lighthouse):
    wait_for(lighthouse, 13, busy="evaluation, at most 10 s", busy_s=10.0)
    assert lighthouse.record.names == ("a", "b")
    assert (
        "it was busy with evaluation, at most 10 s while the others waited for 10 s"
        in lighthouse.record.reason
    )


def redone(lighthouse, **waiting):
    """End the round of step 6 with each member's waits, and redo it in a forced epoch."""
    before = lighthouse.record.fence
    for name, others in waiting.items():
        lighthouse.say(name, m.Aborted(before, 6, "a link was lost", "", tuple(others)))
    lighthouse.wait(0.3)
    assert lighthouse.record.forced > before.epoch
    for name in lighthouse.record.names:
        lighthouse.say(name, report_of(lighthouse.record, 6))
        lighthouse.say(name, m.Running(lighthouse.record.fence, 6))


def test_a_late_member_of_the_round_has_its_time_again_when_the_round_is_redone(lighthouse):
    wait_for(lighthouse, 60)
    redone(lighthouse, a="b", b="a", c="b")
    wait_for(lighthouse, 60)
    assert sorted(lighthouse.record.names) == ["a", "b", "c"]
    wait_for(lighthouse, 43)
    assert sorted(lighthouse.record.names) == ["a", "b"]


def test_a_member_that_never_came_gets_no_more_time_when_the_round_is_redone(lighthouse):
    wait_for(lighthouse, 60)
    redone(lighthouse, a="c", b="c", c="")
    wait_for(lighthouse, 43)
    assert sorted(lighthouse.record.names) == ["a", "b"]


def awaited(**session):
    """Return a job in which the members wait for c in a blocking join."""
    lighthouse = started("a b")
    lighthouse.open("c", generation=0, step=0, replay=False, exchange_s=20.0, **session)
    lighthouse.beat("c", 0, generation=0)
    lighthouse.say("c", m.RequestState(lighthouse.record.fence, "I do not catch up by replay", lost=True))
    lighthouse.beat("c", 0, generation=0)
    lighthouse.wait(0.1)
    return lighthouse


def test_a_newcomer_without_replay_is_awaited_with_a_snapshot_of_the_decided_step():
    lighthouse = awaited()
    member = lighthouse.record.member("c")
    assert member.blocking_join and member.joining and lighthouse.record.is_forced
    assert "c joins while the others wait for its state, at most 20 s" in lighthouse.record.reason
    for name in "ab":
        lighthouse.say(name, report_of(lighthouse.record, 5))
    lighthouse.say("c", report_of(lighthouse.record, 0, generation=0))
    assert {r.step for _, r in lighthouse.sent(Resume)} == {5}
    assert {(n, s.step) for n, s in lighthouse.sent(m.TakeSnapshotFor)} >= {("a", 5), ("b", 5)}
    for name in "ab":
        lighthouse.say(name, m.SnapshotTaken(lighthouse.record.fence, "c", 5, "d"))
    [(to, sources)] = lighthouse.sent(m.StateSources)
    assert (to, sources.state.step, len(sources.urls)) == ("c", 5, 2)


def test_an_awaited_newcomer_has_its_time_and_no_more():
    lighthouse = awaited()
    for name in "ab":
        lighthouse.say(name, report_of(lighthouse.record, 5))
    lighthouse.say("c", report_of(lighthouse.record, 0, generation=0))
    for second in range(22):
        assert second == 20 or ("c" in lighthouse.record.names) == (second < 20), second
        for name in "abc":
            lighthouse.beat(name, 5)
        lighthouse.wait(1.0)
    assert "the others waited 20 s for its state, which did not arrive" in lighthouse.record.reason


def test_a_newcomer_that_was_awaited_too_long_loads_a_newer_state_outside_first():
    lighthouse = awaited()
    for name in "ab":
        lighthouse.say(name, report_of(lighthouse.record, 5))
    lighthouse.say("c", report_of(lighthouse.record, 0, generation=0))

    def on_to(step, seconds):
        for _ in range(seconds):
            for name in "ab":
                lighthouse.beat(name, step)
            lighthouse.beat("c", 0, generation=0)
            lighthouse.wait(1.0)

    on_to(5, 22)
    assert lighthouse.record.names == ("a", "b")
    for name in "ab":
        lighthouse.say(name, report_of(lighthouse.record, 5))
        lighthouse.say(name, m.Running(lighthouse.record.fence, 5))
    again = m.RequestState(lighthouse.record.fence, "I do not catch up by replay", lost=False)
    lighthouse.say("c", again)
    on_to(90, 82)
    assert lighthouse.record.names == ("a", "b") and lighthouse.core.joins.serving["c"].asked == {"a", "b"}
    for name in "ab":
        lighthouse.say(name, m.SnapshotTaken(lighthouse.record.fence, "c", 91, "d"))
    [(to, sources)] = lighthouse.sent(m.StateSources)
    assert (to, sources.state.step) == ("c", 91)
    on_to(140, 30)
    assert lighthouse.record.names == ("a", "b"), "nobody waits while it loads that state"
    lighthouse.say("c", again)
    lighthouse.beat("c", 91)
    lighthouse.wait(0.1)
    assert lighthouse.record.member("c").blocking_join


def test_a_failure_counts_although_no_heartbeat_has_come_since_the_generation_began():
    """The loop raises at its first step, before the leader has had a heartbeat of this process."""
    lighthouse = started("a b")
    peer = lighthouse.core.state.liveness.peers["a"]
    peer.beat, peer.session = None, replace(peer.session, generation=0)
    assert peer.generation != lighthouse.record.generation
    lighthouse.say("a", m.LoopFailed(lighthouse.record.fence, 0, "ValueError: no such sample"))
    lighthouse.wait(0.1)
    assert "a failed at step 0: ValueError: no such sample" in lighthouse.record.failed


def forced_without_d(**sessions):
    """Return a job with a, b and c in a forced epoch after d's death; c has the bounds of ``sessions``."""
    lighthouse = started("a b c d")
    lighthouse.open("c", generation=1, step=5, **sessions)
    lighthouse.beat("c", 5)
    lighthouse.say("a", m.Running(lighthouse.record.fence, 5))
    lighthouse.do(io.Operator("evict", "d", "me", "a test"))
    lighthouse.wait(0.1)
    assert lighthouse.record.names == ("a", "b", "c") and lighthouse.record.is_forced
    return lighthouse


def test_a_living_member_that_does_not_answer_has_its_bound():
    lighthouse = forced_without_d(user_code_s=100.0)
    for name in "ab":
        lighthouse.say(name, report_of(lighthouse.record, 5))
    lighthouse.wait(99.0)
    assert lighthouse.record.names == ("a", "b", "c")
    lighthouse.wait(2.0)
    assert lighthouse.record.names == ("a", "b")
    assert "c evicted: it lives, but did not answer epoch 2 for 100 s" in lighthouse.record.reason


def test_a_member_that_answers_nothing_while_busy_has_the_announced_time():
    lighthouse = forced_without_d(user_code_s=100.0)
    lighthouse.say("c", m.Heartbeat(2, lighthouse.record.epoch, 1, 5, busy="evaluation", busy_s=300.0))
    for name in "ab":
        lighthouse.say(name, report_of(lighthouse.record, 5))
    lighthouse.wait(290.0)
    assert "c" in lighthouse.record.names
    lighthouse.wait(11.0)
    assert lighthouse.record.names == ("a", "b")


def test_no_member_is_given_up_before_one_that_knows_the_state_has_answered():
    lighthouse = forced_without_d(user_code_s=100.0)
    lighthouse.wait(500.0)
    assert lighthouse.record.names == ("a", "b", "c")


# --- a process that another one replaced --------------------------------------------------------------------


def test_the_wait_for_a_process_does_not_count_against_its_next_process():
    lighthouse = started("a b c")
    lighthouse.say("a", m.Heartbeat(2, lighthouse.record.epoch, 1, 5, waiting_for=("c",)))
    lighthouse.say("c", m.Heartbeat(2, lighthouse.record.epoch, 1, 5, waiting_for=("b",)))
    lighthouse.say("a", m.Heartbeat(3, lighthouse.record.epoch, 1, 5, waiting_for=("b", "c")))
    assert set(lighthouse.core.evictions.stragglers.since) == {"b", "c"}
    lighthouse.open("c", incarnation=2, predecessors=(1,))
    assert set(lighthouse.core.evictions.stragglers.since) == {"b"}
    lighthouse.say("a", m.Heartbeat(4, lighthouse.record.epoch, 1, 5, waiting_for=("a",)))
    assert "b" not in lighthouse.core.evictions.stragglers.since, "the word of the former c counts no more"


def test_a_complaint_about_a_process_does_not_count_against_its_next_process():
    lighthouse = started("a b c")
    stalled(lighthouse, a="c", b="a", c="")
    lighthouse.open("c", incarnation=2, predecessors=(1,))
    lighthouse.wait(1.0)
    assert not lighthouse.core.rebuilds.ring_rebuilds.stuck


def test_a_wait_in_a_generation_that_is_over_does_not_count_in_the_next_one():
    """The next generation repeats steps, so the same step would look like the same wait."""
    lighthouse = started("a b")
    lighthouse.say("a", m.Heartbeat(2, lighthouse.record.epoch, 1, 5, waiting_for=("b",)))
    for name in "ab":
        lighthouse.status(name, "gone")
        lighthouse.open(name, incarnation=2, predecessors=(1,))
        lighthouse.status(name, incarnation=2)
    lighthouse.say("a", m.Heartbeat(1, 0, 0, 0))
    lighthouse.wait(10.0)
    assert lighthouse.record.generation == 2 and not lighthouse.core.evictions.stragglers.since
