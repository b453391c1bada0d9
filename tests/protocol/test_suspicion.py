"""The history of failed hosts over days, and its effect on admissions."""

import pytest
from msgspec.structs import replace
from protocol.makers import record_of
from protocol.test_leader import Lighthouse
from protocol.test_leader_orders import UNIX_S, led, newcomer, on_hosts, order

from fabric.model import RankAddress
from fabric.protocol.leader import evidence
from fabric.protocol.leader.state import JobState, LeaderConfig
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages.roster_delta import for_members

DAY_S = 86400.0


def failed(*ages_days, host="h3", now=UNIX_S):
    """Return the history of a host that failed this many days ago, newest last."""
    known = ()
    for age in ages_days:
        known = evidence.with_failures(known, {host: "a test"}, now - age * DAY_S, DAY_S)
    return known


@pytest.mark.parametrize(
    ("ages_days", "suspect"),
    [((0,), False), ((1, 0), True), ((1.2, 0), False), ((2, 1, 0), True), ((4, 3, 2), False)],
)
def test_two_failures_within_a_day_make_a_host_suspect_and_days_take_it_back(ages_days, suspect):
    (history,) = failed(*ages_days)
    assert history.times == len(ages_days)
    assert (evidence.score(history, UNIX_S, DAY_S) >= evidence.SUSPECT) == suspect


def test_a_failure_is_remembered_for_days_and_forgotten_after_a_week():
    known = failed(6)
    assert [x.host for x in evidence.with_failures(known, {"h1": "why"}, UNIX_S, DAY_S)] == ["h1", "h3"]
    known = failed(8)
    assert [x.host for x in evidence.with_failures(known, {"h1": "why"}, UNIX_S, DAY_S)] == ["h1"]


def test_the_history_is_bounded_and_the_least_suspect_are_forgotten():
    known = failed(1, 0, host="bad")
    for n in range(evidence.MAX_HOSTS + 50):
        known = evidence.with_failures(known, {f"h{n:03}": "why"}, UNIX_S + n, DAY_S)
    assert len(known) == evidence.MAX_HOSTS
    names = {x.host for x in known}
    assert "bad" in names and "h000" not in names and f"h{evidence.MAX_HOSTS + 49:03}" in names


def test_a_clock_that_goes_back_makes_no_host_more_suspect():
    (history,) = failed(1, 0)
    assert evidence.score(history, UNIX_S - 1000.0, DAY_S) == history.score
    state = JobState("job", LeaderConfig(), UNIX_S - 1000.0)
    memory = evidence.FailureEvidence(state)
    memory.recall(replace(record_of("a"), hosts=(history,)))
    (again,) = memory.hosts
    assert again.at == UNIX_S - 1000.0 and again.score == history.score


@pytest.mark.parametrize(
    ("words", "host"),
    [
        ({1: "gone", 2: "gone"}, "h1"),  # the first of them ended the other
        ({2: "stopped"}, "h2"),
        ({1: None}, "h1"),
        ({1: None, 2: None}, ""),
        ({}, ""),
    ],
)
def test_the_failure_of_a_replica_on_several_hosts_counts_against_the_host_that_failed(words, host):
    ranks = tuple(RankAddress(f"h{rank}:1", f"http://h{rank}#{rank}") for rank in (1, 2))
    lighthouse = Lighthouse(record_of("a b", epoch=1, a={"ranks": ranks}))
    for rank in range(3):
        for trainer in ("running", *([words[rank]] if rank in words else [])):
            lighthouse.now += 1.0
            seen = m.TrainerStatus("a", 1, trainer or "running", 1, f"http://h{rank}", rank=rank)
            lighthouse.core.state.liveness.servers.hear(seen, {1}, lighthouse.now)
            if trainer is None:
                lighthouse.core.state.liveness.servers.closed(
                    "a", f"http://h{rank}", rank, lighthouse.record.member("a"), lighthouse.now
                )
    lighthouse.core.state.epoch.pending_evictions["a"] = "a test"
    lighthouse.core.evidence.note_failures(lighthouse.record)
    assert [(x.replica, x.host) for x in lighthouse.core.evidence.failures] == [("a", host)]
    assert [x.host for x in lighthouse.core.evidence.hosts] == ([host] if host else [])


# --- what the leader makes of it --------------------------------------------------------------------------


def with_a_suspect(**policy):
    """Return a job with r0 to r2 on good hosts; host h3 has failed twice today."""
    record = replace(on_hosts(a="h1", b="h2", c="h4"), hosts=failed(0.5, 0.1))
    return led(record, **{"start_replicas": 3, **policy})


def comes_from(lighthouse, name, host):
    newcomer(lighthouse, name)
    peer = lighthouse.core.state.liveness.peers[name]
    peer.session = replace(peer.session, link=f"{host}:1")
    lighthouse.wait(0.5)
    return peer


def test_a_replica_on_a_suspect_host_stands_by_where_the_job_has_its_members():
    lighthouse = with_a_suspect()
    lighthouse.open("d", incarnation=2, generation=1, step=5)
    peer = lighthouse.core.state.liveness.peers["d"]
    peer.session = replace(peer.session, link="h3:1")
    lighthouse.status("d", incarnation=2)
    lighthouse.beat("d", 5)
    lighthouse.wait(0.5)
    assert "d" not in lighthouse.record.names
    sentence = lighthouse.core.admission.kept_out(peer)
    assert "its host h3 failed 2 times in the last days, last: a test" in sentence
    assert "`fabric admit h3` lets it in at once" in sentence
    assert lighthouse.core.admission.waiting_outside["d"] == sentence, "it was told"


def test_a_replica_on_a_suspect_host_is_admitted_where_a_member_is_missing():
    lighthouse = with_a_suspect(start_replicas=4)
    comes_from(lighthouse, "d", "h3")
    assert "d" in lighthouse.record.names


def test_an_operator_ends_the_suspicion_of_a_host():
    lighthouse = with_a_suspect()
    lighthouse.open("d", incarnation=2, generation=1, step=5)
    peer = lighthouse.core.state.liveness.peers["d"]
    peer.session = replace(peer.session, link="h3:1")
    assert lighthouse.core.evidence.knows_of("h3")
    order(lighthouse, "admit", "h3")
    assert not lighthouse.record.hosts, "it is written"
    assert lighthouse.core.admission.kept_out(peer) == ""


def test_an_admitted_replica_takes_its_host_along():
    lighthouse = with_a_suspect()
    lighthouse.open("d", incarnation=2, generation=1, step=5)
    peer = lighthouse.core.state.liveness.peers["d"]
    peer.session = replace(peer.session, link="h3:1")
    order(lighthouse, "admit", "d")
    assert lighthouse.core.admission.kept_out(peer) == ""


def test_a_suspect_host_is_trusted_again_after_some_days():
    lighthouse = with_a_suspect()
    lighthouse.open("d", incarnation=2, generation=1, step=5)
    peer = lighthouse.core.state.liveness.peers["d"]
    peer.session = replace(peer.session, link="h3:1")
    assert lighthouse.core.evidence.stands_by(peer)
    lighthouse.core.state.now += DAY_S
    assert not lighthouse.core.evidence.stands_by(peer)


def test_no_host_is_suspect_where_the_job_has_no_other_or_failures_do_not_count():
    record = replace(on_hosts(a="h3", b="h3"), hosts=failed(0.5, 0.1))
    lighthouse = led(record, start_replicas=2)
    peer = lighthouse.core.state.liveness.peers["a"]
    peer.session = replace(peer.session, link="h3:1")
    assert lighthouse.core.evidence.suspect_host(peer) is None
    lighthouse = with_a_suspect()
    peer = lighthouse.core.state.liveness.peers["a"]
    peer.session = replace(peer.session, link="h3:1")
    assert lighthouse.core.evidence.suspect_host(peer) is not None
    lighthouse.core.state.config = replace(lighthouse.core.state.config, failures=0)
    assert lighthouse.core.evidence.suspect_host(peer) is None


def test_a_failure_is_written_with_its_host_and_the_next_leader_knows_it():
    lighthouse = Lighthouse(start_replicas=2)
    record = on_hosts(a="h1", b="h2")
    lighthouse = led(record, start_replicas=2)
    lighthouse.status("b", "gone")
    lighthouse.wait(0.1)
    (history,) = lighthouse.record.hosts
    assert (history.host, history.times, history.score) == ("h2", 1, 1.0)
    assert history.why == "its process is gone"
    following = Lighthouse(start_replicas=2)
    following.do(io.Elected("s", lighthouse.record, UNIX_S - 5000.0))
    assert [(x.host, x.at) for x in following.core.evidence.hosts] == [("h2", UNIX_S - 5000.0)], (
        "by its own clock"
    )


def test_replicas_that_fail_together_on_one_host_are_one_failure_of_it():
    lighthouse = led(on_hosts(a="h1", b="h2", c="h2"), start_replicas=3)
    for name in "bc":
        lighthouse.status(name, "gone")
    lighthouse.wait(0.1)
    (history,) = lighthouse.record.hosts
    assert (history.host, history.times) == ("h2", 1)


def test_members_do_not_get_the_evidence():
    assert not for_members(replace(record_of("a b"), hosts=failed(0))).hosts


def test_a_cold_start_keeps_the_history_of_hosts():
    record = replace(record_of("a b", epoch=9), hosts=failed(0))
    lighthouse = Lighthouse(start_replicas=2)
    lighthouse.do(io.Elected("s", record, UNIX_S + 60.0))
    for name in "ab":
        lighthouse.open(name, incarnation=2, predecessors=(1,))
        lighthouse.status(name, incarnation=2)
    lighthouse.wait(10.0)
    assert lighthouse.record.generation == 2
    assert {x.host for x in lighthouse.record.hosts} >= {"h3"}
