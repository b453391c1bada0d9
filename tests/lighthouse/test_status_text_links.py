"""The status while the network is partly cut: which member misses which, and no other member."""

import pytest
from protocol.test_leader import runs, started
from protocol.test_leader_links import complain, goes_on, outside

from fabric.lighthouse.diagnosis.status_text import waiting_for
from fabric.protocol.messages import network as m


@pytest.fixture
def job():
    return started("a b c")


def said(job):
    return waiting_for(job.core, job.now)


def beat(job, name, step=6, phase="run, waiting", waiting_for=(), **more):
    job.say(
        name, m.Heartbeat(1, job.record.epoch, 1, step, phase=phase, waiting_for=tuple(waiting_for), **more)
    )


def for_some_time(job, seconds, **beats):
    """Every member sends a heartbeat once a second."""
    for _ in range(seconds):
        for name, more in beats.items():
            beat(job, name, **more)
        job.wait(1.0)


def test_two_members_that_wait_for_each_other_are_not_said_to_be_in_user_code(job):
    for_some_time(job, 4, a={"waiting_for": "b"}, b={"waiting_for": "a"}, c={})
    assert "user code" not in said(job)
    assert "what was sent in step 6 from b to a, a to b, for 4.0 s" in said(job)
    assert "the links between them may be slow or cut" in said(job)


def test_a_member_awaited_in_vain_that_waits_for_none_has_a_bad_link_too(job):
    """Only the direction from b to a is cut: b gets all bytes, but its own bytes do not arrive."""
    for_some_time(job, 4, a={"waiting_for": "b"}, b={}, c={})
    assert "what was sent in step 6 from b to a" in said(job)


def test_a_member_is_named_when_the_newest_heartbeats_name_nobody(job):
    """A round that is given up begins again, and its members wait for nobody until they contribute."""
    for_some_time(job, 4, a={"waiting_for": "b"}, b={}, c={})
    for_some_time(job, 1, a={}, b={}, c={})
    assert "what was sent in step 6 from b, for 5.0 s" in said(job)


def test_a_member_in_user_code_is_named_before_links(job):
    for_some_time(job, 4, a={"waiting_for": "bc"}, b={"waiting_for": "c"}, c={"phase": "run"})
    assert said(job).startswith("c, in user code in step 6, for 4.0 s")


def test_links_that_are_still_to_be_made_are_named(job):
    for_some_time(job, 3, a={"phase": "run, linking, waiting"}, b={"phase": "run, linking"}, c={})
    assert said(job).startswith("the links of a, b in epoch 1, for ")


def test_an_exchange_that_lasts_is_named(job):
    for_some_time(job, 2, a={}, b={}, c={})
    assert said(job) == "nothing: every member runs"
    for_some_time(job, 2, a={}, b={}, c={})
    assert said(job).startswith("the exchange of step 6, in which every member is, for 4.0 s")
    for_some_time(job, 4, a={"phase": "run"}, b={"phase": "run"}, c={"phase": "run"})
    assert said(job) == "nothing: every member runs", "all of them are in user code, as they may be"


def test_complaints_of_missing_links_are_named_with_both_ends(job):
    fence = job.record.fence
    job.say("a", m.Aborted(fence, 6, "timed out", "b", unreachable=("b",)))
    assert said(job).startswith("all complaints of missing links (so far a to b), to leave some out at ")


def test_the_job_waits_for_requested_snapshots_only(job):
    complain(job, a="b", b="a")
    runs(job, "a c", 5)
    outside(job, "b", unreachable="a")
    job.say("b", m.RequestState(job.record.fence, "it holds no state", lost=True))
    goes_on(job, "a c", 1, b="a")
    assert job.core.joins.serving["b"].step == -1
    assert said(job) == "nothing: every member runs"


def test_a_job_that_is_short_of_members_says_why_those_outside_are(job):
    short = started("a b", min_replicas=2)
    complain(short, a="b", b="a")
    runs(short, "a", 5)
    goes_on(short, "a", 2, b="a")
    assert said(short) == (
        "replicas: 1 of at least 2 are members; b is outside: it cannot reach a: it is let in when it "
        "reaches every member"
    )
