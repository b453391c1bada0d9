"""Operator overrides, and evidence against failing replicas: the records, the replicas kept out, and the
reasons sent.
"""

import pytest
from msgspec.structs import replace
from protocol.makers import member_of, record_of
from protocol.test_leader import Lighthouse, runs, started

from fabric.model import HostFailure, OperatorOverrides
from fabric.protocol.leader.evidence import MAX_FAILURES
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m

UNIX_S = 1_800_000_000.0


def order(lighthouse, action, about="", who="ann", why="a test", **scale):
    return lighthouse.do(io.Operator(action, about, who, why, **scale))


def newcomer(lighthouse, name, incarnation=2, **session):
    """Return a healthy replica outside the roster that holds the state."""
    lighthouse.open(name, incarnation=incarnation, generation=1, step=5, **session)
    effects = [*lighthouse.effects, *lighthouse.status(name, incarnation=incarnation)]
    lighthouse.effects = effects + lighthouse.beat(name, 5)


def fail(lighthouse, name):
    """Let its process die, the others go on, and its next process come with the state."""
    incarnation = lighthouse.incarnations[name]
    lighthouse.status(name, "gone", incarnation=incarnation)
    lighthouse.wait(0.1)
    assert name not in lighthouse.record.names
    runs(lighthouse, " ".join(lighthouse.record.names), 5)
    return comes_back(lighthouse, name)


def comes_back(lighthouse, name):
    newcomer(lighthouse, name, incarnation=lighthouse.incarnations[name] + 1)
    lighthouse.wait(0.5)
    if name in lighthouse.record.names:
        runs(lighthouse, " ".join(lighthouse.record.names), 5)
    return lighthouse


def told_to(lighthouse, name):
    return [x.reason for n, x in lighthouse.sent(m.Rejected) if n == name and x.retry]


# --- pause and resume ------------------------------------------------------------------------------------


def test_a_pause_is_written_within_the_epoch_and_keeps_newcomers_out_until_it_ends():
    lighthouse = started("a b")
    before = lighthouse.record
    order(lighthouse, "pause", why="maintenance")
    assert lighthouse.record.fence == before.fence and lighthouse.record.nonce != before.nonce
    assert lighthouse.record.overrides.paused == "by ann: maintenance"
    assert not lighthouse.sent(m.Epoch), "members need not notice"
    newcomer(lighthouse, "c")
    assert lighthouse.record.names == ("a", "b")
    assert "paused by ann: maintenance" in told_to(lighthouse, "c")[0]
    order(lighthouse, "resume")
    lighthouse.wait(0.1)
    assert lighthouse.record.names == ("a", "b", "c") and not lighthouse.record.overrides.paused


def test_a_repeated_operator_command_writes_no_record():
    lighthouse = started("a b")
    order(lighthouse, "pause", why="maintenance")
    written = len(lighthouse.records)
    order(lighthouse, "pause", who="bob", why="me too")
    order(lighthouse, "scale")
    order(lighthouse, "admit", "nobody")
    assert len(lighthouse.records) == written
    assert lighthouse.record.overrides.paused == "by ann: maintenance", "who was first is on record"


def test_a_decision_of_the_epoch_outlives_an_order_in_it():
    lighthouse = started("a b c")
    lighthouse.status("c", "gone")
    lighthouse.wait(0.1)
    record = lighthouse.record
    assert record.is_forced and record.names == ("a", "b")
    runs(lighthouse, "a b", 5)
    decision = lighthouse.core.state.epoch.decision
    assert decision is not None
    order(lighthouse, "pause")
    assert lighthouse.core.state.epoch.decision is decision and set(lighthouse.core.state.epoch.running) == {
        "a",
        "b",
    }


def test_the_next_leader_knows_the_operators_orders():
    overrides = OperatorOverrides(paused="by ann: maintenance", max_replicas=2, scaled="by ann: budget")
    lighthouse = started("a b", replace(record_of("a b", epoch=1), overrides=overrides))
    newcomer(lighthouse, "c")
    assert lighthouse.record.names == ("a", "b")
    assert "maintenance" in told_to(lighthouse, "c")[0]


def test_a_pause_does_not_stop_an_eviction_nor_a_cold_start():
    lighthouse = started("a b")
    order(lighthouse, "pause")
    lighthouse.status("b", "gone")
    lighthouse.wait(0.1)
    assert lighthouse.record.names == ("a",)
    runs(lighthouse, "a", 5)
    lighthouse.status("a", "gone")
    lighthouse.wait(0.1)
    lighthouse.open("a", incarnation=2, predecessors=(1,))
    lighthouse.wait(0.1)
    assert lighthouse.record.generation == 2 and lighthouse.record.overrides.paused


# --- scale -----------------------------------------------------------------------------------------------


def test_a_higher_minimum_parks_the_job_by_a_forced_epoch_and_a_lower_one_wakes_it():
    lighthouse = started("a b")
    order(lighthouse, "scale", min_replicas=3, max_replicas=4, why="no small batches")
    record = lighthouse.record
    assert record.is_forced and record.min_replicas == 3 and "no small batches" in record.reason
    runs(lighthouse, "a b", 5)
    newcomer(lighthouse, "c")
    assert lighthouse.record.names == ("a", "b", "c") and lighthouse.record.is_forced
    runs(lighthouse, "a b c", 5)
    lighthouse.status("c", "gone", incarnation=2)
    lighthouse.wait(0.1)
    runs(lighthouse, "a b", 5)
    parked = lighthouse.record.epoch
    order(lighthouse, "scale", min_replicas=0)
    assert lighthouse.record.epoch == parked + 1 and lighthouse.record.min_replicas == 0
    assert lighthouse.record.is_forced, "everybody must hear that it may go on"


def test_a_minimum_that_changes_nothing_now_waits_for_the_next_epoch():
    lighthouse = started("a b c")
    epoch = lighthouse.record.epoch
    order(lighthouse, "scale", min_replicas=2)
    assert lighthouse.record.epoch == epoch and lighthouse.record.overrides.min_replicas == 2
    lighthouse.status("c", "gone")
    lighthouse.wait(0.1)
    assert lighthouse.record.min_replicas == 2


def test_a_lower_maximum_lets_the_newest_members_leave_at_a_step_boundary():
    roster = {"a": {"since": 1}, "b": {"since": 7}, "c": {"since": 3}}
    lighthouse = started("a b c", record_of("a b c", epoch=8, forced=7, **roster))
    order(lighthouse, "scale", max_replicas=2, why="budget")
    record = lighthouse.record
    assert [x.replica for x in record.roster if x.leaving] == ["b"], "b came last"
    assert not record.is_forced and "budget" in record.reason
    runs(lighthouse, "a b c", 6)
    assert lighthouse.record.names == ("a", "c")
    runs(lighthouse, "a c", 6)
    lighthouse.wait(1.0)
    assert any("scaled by ann: budget" in x.reason for _, x in lighthouse.sent(m.Rejected))


def test_a_replica_that_comes_to_a_full_job_stands_by_and_replaces_the_next_dead():
    lighthouse = started("a b", max_replicas=2)
    newcomer(lighthouse, "c")
    assert lighthouse.record.names == ("a", "b")
    assert "stands by" in told_to(lighthouse, "c")[0]
    lighthouse.status("b", "gone")
    lighthouse.wait(0.1)
    lighthouse.beat("c", 5)
    runs(lighthouse, "a", 5)
    assert lighthouse.record.names == ("a", "c"), "no process had to start"


def test_a_living_process_stands_by_and_an_ended_one_does_not():
    lighthouse = started("a b c", max_replicas=2, start_replicas=2)
    newcomer(lighthouse, "d")
    lighthouse.status("b", "gone")
    lighthouse.status("c", "stopped")
    lighthouse.wait(1.0)
    runs(lighthouse, "a", 5)
    lighthouse.beat("d", 5)
    runs(lighthouse, "a d", 5)
    lighthouse.wait(0.1)
    assert lighthouse.record.names == ("a", "d")
    assert all(lighthouse.core.state.liveness.peers[x].connected for x in "bc"), "their sessions still stand"
    assert not lighthouse.core.admission.waiting_outside.get(
        "b"
    ) and not lighthouse.core.admission.waiting_outside.get("c")
    lighthouse.status("c")
    assert "the job has its 2 members" in told_to(lighthouse, "c")[0]
    assert not lighthouse.core.admission.waiting_outside.get("b")


def test_a_newcomer_that_is_silent_for_a_moment_is_kept_out_once():
    lighthouse = started("a", max_replicas=1, start_replicas=1)
    newcomer(lighthouse, "d")
    lighthouse.wait(0.1)
    sent = list(lighthouse.core.admission.waiting_outside)
    assert sent == ["d"]
    for _ in range(3):
        lighthouse.status("d", "stopped", incarnation=2)
        lighthouse.wait(1.0)
        lighthouse.status("d", incarnation=2)
        assert not lighthouse.told("kept out") and not told_to(lighthouse, "d")


def test_the_record_says_that_the_job_is_back_at_the_replicas_own_limits():
    lighthouse = started("a")
    order(lighthouse, "scale", min_replicas=2)
    lighthouse.wait(0.1)
    assert lighthouse.record.reason == "the job needs 2 replicas: scaled by ann: a test"
    order(lighthouse, "scale", min_replicas=0)
    runs(lighthouse, "a", 5)
    assert lighthouse.record.reason == "the job needs 1 replica: as its replicas ask for"


# --- penalties -------------------------------------------------------------------------------------------


def penalised(names="a b c", who="c"):
    lighthouse = started(names, start_replicas=len(names.split()))
    for _ in range(3):
        fail(lighthouse, who)
    return lighthouse


def test_a_replica_that_failed_three_times_in_half_an_hour_is_kept_out_and_hears_until_when():
    lighthouse = started("a b c", start_replicas=3)
    fail(lighthouse, "c")
    assert "c" in lighthouse.record.names
    fail(lighthouse, "c")
    assert "c" in lighthouse.record.names
    first = lighthouse.record.failures[0].at
    fail(lighthouse, "c")
    assert lighthouse.record.names == ("a", "b")
    penalty = next(x for x in lighthouse.core.evidence.penalties() if x.kind == "replica")
    assert (penalty.about, penalty.times) == ("c", 3) and penalty.until == first + 1800.0
    peer = lighthouse.core.state.liveness.peers["c"]
    sentence = lighthouse.core.admission.kept_out(peer)
    assert "replica c failed 3 times, last: its process is gone; it is not admitted before" in sentence
    assert "fabric admit c" in sentence
    assert lighthouse.core.admission.waiting_outside["c"] == sentence, "it was told"
    lighthouse.now += 1800.0
    lighthouse.beat("c", 5)
    assert "c" in lighthouse.record.names


def test_an_operator_readmits_a_replica_before_its_penalty_ends():
    lighthouse = penalised()
    order(lighthouse, "admit", "c")
    assert not lighthouse.record.failures
    lighthouse.beat("c", 5)
    assert "c" in lighthouse.record.names


def test_a_newcomer_that_is_kept_out_by_a_penalty_costs_the_members_no_snapshot():
    lighthouse = penalised()
    lighthouse.lose("c")
    lighthouse.open("c", incarnation=9)
    lighthouse.status("c", incarnation=9)
    lighthouse.say("c", m.RequestState(lighthouse.record.fence, "nothing here"))
    lighthouse.wait(1.0)
    assert not lighthouse.sent(m.TakeSnapshotFor)
    order(lighthouse, "admit", "c")
    lighthouse.wait(0.1)
    asked = lighthouse.core.joins.serving["c"].asked
    assert asked == {"a", "b"}


def test_an_eviction_by_an_operator_or_by_request_is_not_a_failure():
    lighthouse = started("a b c")
    order(lighthouse, "evict", "c")
    lighthouse.wait(0.1)
    assert lighthouse.record.names == ("a", "b") and not lighthouse.record.failures
    runs(lighthouse, "a b", 5)
    lighthouse.say("b", m.CannotContinue(lighthouse.record.fence, "a gradient is gone"))
    lighthouse.wait(0.1)
    assert lighthouse.record.names == ("a",) and not lighthouse.record.failures


def against(host, *replicas, at=UNIX_S, epochs=(3, 5, 7)):
    pairs = zip(replicas, epochs, strict=False)
    return tuple(HostFailure(name, host, epoch, at, "its process is gone") for name, epoch in pairs)


def on_hosts(**hosts):
    roster = tuple(replace(member_of(name), link=f"{host}:9") for name, host in hosts.items())
    return replace(record_of(" ".join(hosts), epoch=9), roster=roster)


def led(record, clock_s=UNIX_S + 60.0, **policy):
    """Return a leader elected over ``record`` at this time of day; all members run."""
    lighthouse = Lighthouse(**policy)
    lighthouse.do(io.Elected("s", record, clock_s))
    for member in record.roster:
        lighthouse.open(member.replica, generation=1, step=5, epoch=record.epoch)
        lighthouse.status(member.replica)
        lighthouse.beat(member.replica, 5)
    return runs(lighthouse, " ".join(record.names), 5)


def test_three_failures_on_one_host_keep_every_replica_of_that_host_out_where_there_is_another():
    record = replace(on_hosts(a="h1", b="h2"), failures=against("h3", "c", "d", "e"))
    lighthouse = led(record)
    lighthouse.incarnations["f"] = 2
    lighthouse.open("f", incarnation=2, generation=1, step=5)
    peer = lighthouse.core.state.liveness.peers["f"]
    assert lighthouse.core.admission.kept_out(peer) == "", "another host"
    peer.session = replace(peer.session, link="h3:1")
    assert "host h3 failed 3 times" in lighthouse.core.admission.kept_out(peer)
    order(lighthouse, "admit", "h3")
    assert lighthouse.core.admission.kept_out(peer) == ""


def test_a_host_is_not_to_blame_where_the_job_has_no_other():
    record = replace(on_hosts(a="h3", b="h3"), failures=against("h3", "c", "d", "e"))
    lighthouse = led(record)
    lighthouse.open("f", incarnation=2, generation=1, step=5)
    peer = lighthouse.core.state.liveness.peers["f"]
    peer.session = replace(peer.session, link="h3:1")
    assert lighthouse.core.admission.kept_out(peer) == ""


def test_replicas_that_failed_together_on_one_host_count_as_one_failure_of_it():
    record = replace(on_hosts(a="h1", b="h2"), failures=against("h3", "c", "d", "e", epochs=(3, 3, 3)))
    assert not led(record).core.evidence.penalties()


@pytest.mark.parametrize(("clock_s", "until"), [(60.0, 1800.0), (-3600.0, -3600.0 + 1800.0)])
def test_the_next_leader_uses_its_own_clock_and_no_penalty_grows(clock_s, until):
    record = replace(on_hosts(a="h1", b="h2"), failures=against("h3", "c", "c", "c"))
    lighthouse = led(record, UNIX_S + clock_s)
    about = {x.about: x.until - UNIX_S for x in lighthouse.core.evidence.penalties()}
    assert about == {"c": pytest.approx(until), "h3": pytest.approx(until)}
    assert all(x.at <= UNIX_S + max(clock_s, 0.0) for x in lighthouse.record.failures)


def test_a_penalty_does_not_keep_the_whole_job_waiting():
    lighthouse = started("a b", min_replicas=2, start_replicas=2)
    for _ in range(4):
        fail(lighthouse, "b")
    assert len(lighthouse.record.failures) == 4 and lighthouse.record.names == ("a", "b")


def test_a_cold_start_leaves_the_penalised_out_where_enough_others_are_there():
    record = replace(record_of("a b c", epoch=9), failures=against("", "c", "c", "c"))
    lighthouse = Lighthouse(start_replicas=3, start_wait_s=1.0)
    lighthouse.do(io.Elected("s", record, UNIX_S + 60.0))
    for name in "abc":
        lighthouse.open(name, incarnation=2, predecessors=(1,))
        lighthouse.status(name, incarnation=2)
    lighthouse.wait(5.0)
    assert lighthouse.record.generation == 2 and lighthouse.record.names == ("a", "b")


def test_evidence_is_bounded_and_written_once_however_often_the_write_is_tried():
    old = tuple(HostFailure(f"x{n}", "", n, UNIX_S) for n in range(MAX_FAILURES))
    lighthouse = led(replace(record_of("a b c", epoch=900), failures=old))
    lighthouse.commits = False
    lighthouse.status("c", "gone")
    lighthouse.wait(0.1)
    write = lighthouse.records[-1]
    lighthouse.commits = True
    lighthouse.do(io.WriteFailed(write.nonce, definite=True), io.RecordRead(lighthouse.record))
    lighthouse.wait(0.1)
    again = lighthouse.record
    assert again.epoch == write.epoch and again.nonce != write.nonce
    for failures in (write.failures, again.failures):
        assert [x.replica for x in failures] == [*(f"x{n}" for n in range(1, MAX_FAILURES)), "c"]


# --- spares ----------------------------------------------------------------------------------------------


def test_a_spare_stands_by_while_the_job_has_its_members_and_takes_the_place_of_one_that_dies():
    lighthouse = started("a b", start_replicas=2)
    newcomer(lighthouse, "s", spare=True)
    assert lighthouse.record.names == ("a", "b") and "stands by" in told_to(lighthouse, "s")[0]
    newcomer(lighthouse, "c")
    assert lighthouse.record.names == ("a", "b", "c"), "who is no spare joins all the same"
    runs(lighthouse, "a b c", 5)
    for name in "cb":
        lighthouse.status(name, "gone", incarnation=lighthouse.incarnations[name])
        lighthouse.wait(0.1)
        lighthouse.beat("s", 5)
        runs(lighthouse, " ".join(lighthouse.record.names), 5)
    assert lighthouse.record.names == ("a", "s")
    assert {x.replica: x.data_slot for x in lighthouse.record.roster} == {"a": 0, "s": 1}, (
        "in the seat of the dead"
    )


def test_of_two_spares_one_takes_the_free_place():
    lighthouse = started("a b", start_replicas=2)
    for name in ("s", "t"):
        newcomer(lighthouse, name, spare=True)
    lighthouse.status("b", "gone")
    lighthouse.wait(0.1)
    for name in ("s", "t"):
        lighthouse.beat(name, 5)
    runs(lighthouse, "a", 5)
    assert lighthouse.record.names == ("a", "s")
    runs(lighthouse, "a s", 5)
    lighthouse.beat("t", 5)
    lighthouse.wait(1.0)
    assert lighthouse.record.names == ("a", "s")


def test_a_higher_maximum_calls_a_spare_in():
    lighthouse = started("a b", start_replicas=2)
    newcomer(lighthouse, "s", spare=True)
    order(lighthouse, "scale", max_replicas=3)
    lighthouse.beat("s", 5)
    assert lighthouse.record.names == ("a", "b", "s")


def test_a_start_waits_for_regular_replicas_and_then_takes_spares():
    lighthouse = Lighthouse(start_replicas=2, start_wait_s=1.0)
    lighthouse.open("a", "b", spare=True)
    lighthouse.open("c")
    assert lighthouse.record is None, "there may be another that is no spare"
    lighthouse.wait(2.0)
    assert lighthouse.record.names == ("c", "a")
    lighthouse = Lighthouse(start_replicas=2, start_wait_s=1.0)
    lighthouse.open("a", spare=True)
    lighthouse.open("b", "c")
    assert lighthouse.record.names == ("b", "c")


# --- what cannot be ---------------------------------------------------------------------------------------


def objections(lighthouse, name, *actions):
    """Return the answers to drain and evict of this replica, which must change nothing."""
    found = []
    for action in actions or ("drain", "evict"):
        asked = io.Operator(action, name, "ann", "a test")
        found.append(lighthouse.core.orders.objection(asked))
        lighthouse.do(asked)
        if action in ("drain", "evict"):
            assert [t.why for t in lighthouse.told(f"not {action}ed")] == [found[-1]], "it is on record"
        assert not lighthouse.core.state.epoch.pending_evictions and not lighthouse.core.orders.draining
        assert not [e for e in lighthouse.effects if isinstance(e, io.WriteRecord)]
    return found


def test_no_replica_leaves_a_job_that_is_complete():
    lighthouse = started()
    for name in "ab":
        lighthouse.say(name, m.Finished(lighthouse.record.fence, 9))
    assert lighthouse.record.complete
    for why in objections(lighthouse, "a", "drain", "evict", "pause", "scale", "admit"):
        assert "is complete at step 9" in why


def test_no_replica_leaves_a_job_that_has_failed():
    lighthouse = started()
    lighthouse.say("a", m.LoopFailed(lighthouse.record.fence, 5, "ValueError: x"))
    assert lighthouse.record.failed
    assert all("has failed, and has no members" in why for why in objections(lighthouse, "a"))


def failed_job():
    lighthouse = started()
    lighthouse.say("a", m.LoopFailed(lighthouse.record.fence, 5, "ValueError: x"))
    for name in "ab":
        lighthouse.status(name, "gone")
        lighthouse.lose(name)
    return lighthouse


def refusals(lighthouse):
    sent = [e.message for e in lighthouse.effects if isinstance(e, io.SendMember)]
    return [x.reason for x in sent if isinstance(x, m.Rejected)]


def test_every_new_process_of_a_failed_job_is_told_of_the_failure():
    """A launcher that restarts after exit code 1 would repeat the same failure."""
    lighthouse = failed_job()
    for incarnation in (2, 3, 4):
        for name in "ab":
            lighthouse.open(name, incarnation=incarnation, predecessors=tuple(range(1, incarnation)))
            (why,) = refusals(lighthouse)
            assert why.startswith("a failed at step 5: ValueError: x; when that is mended say `fabric retry")
    lighthouse.wait(30.0)
    assert lighthouse.record.failed and lighthouse.record.epoch == 1


def test_a_failed_job_begins_again_by_an_operators_word():
    lighthouse = failed_job()
    order(lighthouse, "retry", why="the sample is mended")
    assert [t.why for t in lighthouse.told("retried")] == [
        "by ann: the sample is mended; it had failed: a failed at step 5: ValueError: x"
    ]
    lighthouse.open("a", incarnation=1)
    assert refusals(lighthouse), "a process that has seen the failure is none of the new ones"
    for name in "ab":
        lighthouse.open(name, incarnation=2, predecessors=(1,))
        assert not refusals(lighthouse)
        lighthouse.status(name, incarnation=2)
    assert not lighthouse.record.failed and lighthouse.record.names == ("a", "b")
    assert lighthouse.record.generation == 2


def test_only_a_job_that_has_failed_is_retried():
    lighthouse = started()
    (why,) = objections(lighthouse, "", "retry")
    assert why == "job job has not failed: there is nothing to begin again"
    order(lighthouse, "retry")
    lighthouse.say("a", m.LoopFailed(lighthouse.record.fence, 5, "ValueError: x"))
    assert lighthouse.record.failed and not lighthouse.core.endings.restart_after_failure


def test_an_answer_about_a_dead_replica_outside_says_that_it_is_dead():
    lighthouse = started("a b c")
    lighthouse.status("c", "gone")
    lighthouse.wait(0.1)
    assert lighthouse.record.names == ("a", "b")
    drain, evict = objections(lighthouse, "c")
    assert drain.startswith("c is not drained: its process is gone; give the command again when")
    lighthouse.lose("c")
    assert objections(lighthouse, "c")[0].startswith("c is not drained: no process of it is connected")
    assert evict.startswith("c is not evicted: it is no member")


def test_the_last_member_that_would_stay_is_not_drained():
    lighthouse = started()
    assert not lighthouse.core.orders.objection(io.Operator("drain", "a", "ann", "a test"))
    order(lighthouse, "drain", "a")
    order(lighthouse, "drain", "b")
    (told,) = lighthouse.told("not drained")
    assert "no other member would stay" in told.why and list(lighthouse.core.orders.draining) == ["a"]
    assert not lighthouse.core.orders.objection(io.Operator("drain", "a", "ann", "again")), (
        "it is leaving already"
    )


def test_a_process_that_waits_outside_can_be_sent_away_but_not_evicted():
    lighthouse = started()
    order(lighthouse, "pause")
    lighthouse.open("d")
    assert not lighthouse.core.orders.objection(io.Operator("drain", "d", "ann", "a test"))
    assert "`fabric drain d`" in objections(lighthouse, "d", "evict")[0]


def test_a_person_ends_the_wait_for_hosts_that_never_return():
    lighthouse = started("a b")
    gone = [io.Operator("evict", name, "ann", "spot reclaim", host_is_gone=True) for name in "ab"]
    assert "a process of it is connected" in lighthouse.core.orders.objection(gone[0])
    for name in "ab":
        lighthouse.lose(name)
    lighthouse.do(gone[0])
    assert "was heard" in lighthouse.told("not evicted")[-1].why, "it may still train"
    lighthouse.wait(6.0)
    for name in "cd":
        lighthouse.status(name)
    lighthouse.open("c", "d")
    generation = lighthouse.record.generation
    lighthouse.do(gone[0])
    lighthouse.wait(6.0)
    assert lighthouse.record.generation == generation, "b may still commit"
    lighthouse.do(gone[1])
    lighthouse.wait(6.0)
    assert lighthouse.record.generation == generation + 1 and lighthouse.record.names == ("c", "d")


@pytest.mark.parametrize("sign", ["its session", "its checkpoint server"])
def test_a_host_that_was_called_gone_and_returns_keeps_its_commits(sign):
    lighthouse = started("a b")
    for name in "ab":
        lighthouse.lose(name)
    lighthouse.wait(6.0)
    for name in "cd":
        lighthouse.status(name)
    lighthouse.open("c", "d")
    generation = lighthouse.record.generation
    for name in lighthouse.record.names:
        lighthouse.do(io.Operator("evict", name, "ann", "spot reclaim", host_is_gone=True))
        if sign == "its session":
            lighthouse.open(name, generation=generation, step=5)
        else:
            lighthouse.status(name)
    lighthouse.wait(6.0)
    assert lighthouse.record.generation == generation, "it lives, and knows the newest state"


def test_the_next_lighthouse_knows_that_a_host_is_gone_until_it_is_heard():
    lighthouse = started("a b")
    for name in "ab":
        lighthouse.lose(name)
    lighthouse.wait(6.0)
    for name in "ab":
        lighthouse.do(io.Operator("evict", name, "ann", "spot reclaim", host_is_gone=True))
    lighthouse.wait(1.0)
    record = lighthouse.record
    assert [x.replica for x in record.overrides.gone] == ["a", "b"] and record.generation == 1
    following = Lighthouse(record)
    for name in "cd":
        following.status(name)
    following.open("c", "d")
    following.wait(6.0)
    assert following.record.generation == 2 and following.record.names == ("c", "d")
    assert not following.record.overrides.gone, "no roster lists these processes any more"

    following = Lighthouse(record)
    following.status("a")
    following.wait(1.0)
    assert [x.replica for x in following.record.overrides.gone] == ["b"], "a was heard again"


# --- the end of a job without its replicas ----------------------------------------------------------------


def test_a_job_whose_processes_are_gone_is_ended_by_an_operator():
    lighthouse = started("a b")
    (why,) = objections(lighthouse, "", "end")
    assert "a, b may still train" in why
    for name in ("a", "b"):
        lighthouse.lose(name)
    lighthouse.wait(1.0)
    order(lighthouse, "end")
    assert "may still train" in lighthouse.told("not ended")[0].why, "a process out of sight may commit"
    lighthouse.wait(lighthouse.core.state.out_of_sight_s)
    order(lighthouse, "end", why="it was a trial")
    assert lighthouse.record.complete and lighthouse.record.reason == "ended by ann at step 5: it was a trial"


def test_a_failed_job_can_be_ended():
    lighthouse = started("a")
    lighthouse.say("a", m.LoopFailed(lighthouse.record.fence, 5, "ValueError: x"))
    lighthouse.lose("a")
    assert lighthouse.record.failed
    order(lighthouse, "end", why="its data are gone")
    assert lighthouse.record.complete and not lighthouse.record.failed
