"""With several processes of one replica, the leader counts contact, ends and states per process and per
server.

A cold start may begin only when no process can commit in the last generation, and from the newest state in
memory.
"""

import pytest
from msgspec.structs import replace
from protocol.makers import record_of, session_of
from protocol.test_leader import Lighthouse, runs, started

from fabric.model import SnapshotRef
from fabric.protocol.messages import leader_events as lio
from fabric.protocol.messages import network as m

AUTONOMY_AND_MARGIN_S = 35.0


def for_a_minute(names="a b"):
    """Return a job that has run under one leader for longer than autonomy and margin."""
    lighthouse = started(names)
    for _ in range(60):
        lighthouse.wait(1.0)
        for name in names.split():
            lighthouse.beat(name, 6)
    assert lighthouse.record.epoch == 1
    return lighthouse


def that_runs_at_step_5(names, start_wait_s):
    """Return a leader elected while all members run in epoch 1, at step 5."""
    members = names.split()
    lighthouse = Lighthouse(record_of(names, epoch=1), start_replicas=len(members), start_wait_s=start_wait_s)
    for name in members:
        lighthouse.open(name, generation=1, step=5, epoch=1)
        lighthouse.status(name)
        lighthouse.beat(name, 5)
    runs(lighthouse, names, 5)
    lighthouse.wait(5.0)
    return lighthouse


def elsewhere(name, incarnation=2, *snapshots):
    """Return the status of a checkpoint server on another host."""
    return lio.TrainerStatusSeen(
        m.TrainerStatus(
            name, incarnation, "running", 1, f"http://new-{name}", snapshots or (SnapshotRef(0, 0, "start"),)
        )
    )


def listening(lighthouse, seconds, *statuses):
    """Let time pass while these servers send statuses too."""
    for _ in range(round(seconds * 10)):
        lighthouse.wait(0.1)
        lighthouse.do(*statuses)


# --- contact ---------------------------------------------------------------------------------------------


def test_the_last_contact_of_a_process_outlives_a_newer_process_of_its_replica_on_another_host():
    lighthouse = for_a_minute()
    cut = lighthouse.now
    lighthouse.lose("a"), lighthouse.lose("b")  # a partition: no server has seen a process end
    lighthouse.wait(1.0)
    for name in "ab":
        lighthouse.open(name, incarnation=2)
        lighthouse.do(elsewhere(name))
    lighthouse.wait(cut + AUTONOMY_AND_MARGIN_S - 1 - lighthouse.now)
    assert lighthouse.record.generation == 1
    lighthouse.open("a", "b", incarnation=2)
    lighthouse.wait(2.0)
    assert lighthouse.record.generation == 2


def test_the_last_contact_of_a_process_outlives_a_second_and_a_third_process():
    lighthouse = for_a_minute("a")
    lighthouse.lose("a")
    for incarnation in (2, 3, 4):
        lighthouse.wait(2.0)
        lighthouse.open("a", incarnation=incarnation)
    lighthouse.wait(20.0)
    assert lighthouse.record.generation == 1


def test_the_leader_waits_as_long_when_new_processes_come_under_other_replica_ids():
    lighthouse = for_a_minute()
    lighthouse.lose("a"), lighthouse.lose("b")
    lighthouse.wait(1.0)
    lighthouse.open("c", "d", incarnation=2)
    lighthouse.wait(1.0)
    assert lighthouse.record.generation == 1


def test_a_process_whose_server_says_that_it_runs_is_not_passed_over_for_a_second_one():
    """The first process has lost its session through a bad link, and a second process registers on another
    host.
    """
    lighthouse = for_a_minute("a")
    lighthouse.do(lio.SessionClosed("a", 1))
    lighthouse.wait(0.5)
    lighthouse.do(lio.SessionOpened(session_of("a", 2)))
    listening(lighthouse, 5.0, elsewhere("a"))
    assert lighthouse.record.generation == 1


def test_a_second_process_is_refused_while_the_first_ones_server_says_that_it_runs():
    lighthouse = for_a_minute("a")
    lighthouse.do(lio.SessionClosed("a", 1))
    lighthouse.do(lio.SessionOpened(session_of("a", 2)))
    assert "taken by a living process" in lighthouse.sent(m.Rejected)[0][1].reason
    lighthouse.do(lio.SessionOpened(session_of("a", 1)))
    assert not lighthouse.sent(m.Rejected), "the first one comes back"


def test_a_second_process_is_refused_after_a_fail_over_too():
    lighthouse = Lighthouse(record_of("a", epoch=1))
    lighthouse.status("a")
    lighthouse.do(lio.SessionOpened(session_of("a", 2)))
    assert "taken by a living process" in lighthouse.sent(m.Rejected)[0][1].reason


def test_a_newer_process_is_taken_where_the_first_ones_server_is_silent():
    lighthouse = for_a_minute("a")
    lighthouse.lose("a")
    lighthouse.do(lio.SessionOpened(session_of("a", 2)))
    assert not lighthouse.sent(m.Rejected)


def late(lighthouse, **session):
    """Open a session of an older process of a; return the lighthouse's refusal."""
    lighthouse.do(lio.SessionOpened(session_of("a", 1, **{"roster": ""} | session)))
    [(_, refusal)] = lighthouse.sent(m.Rejected)
    return refusal


def with_a_clock_ahead():
    """Return a job whose member a has incarnation 9."""
    lighthouse = Lighthouse(record_of("a b", epoch=1, a={"incarnation": 9}))
    lighthouse.open("a", incarnation=9, generation=1, step=5, epoch=1)
    lighthouse.open("b", generation=1, step=5, epoch=1)
    for name, incarnation in (("a", 9), ("b", 1)):
        lighthouse.status(name, incarnation=incarnation)
        lighthouse.beat(name, 5)
    return lighthouse


@pytest.mark.parametrize("lost", ["process", "host"])
def test_a_new_process_whose_clock_is_behind_starts_again_above_the_lost_one(lost):
    lighthouse = with_a_clock_ahead()
    if lost == "process":
        lighthouse.do(lio.SessionClosed("a", 9))
        lighthouse.status("a", "gone", incarnation=9)
    else:
        lighthouse.lose("a")
    refusal = late(lighthouse)
    assert refusal.above == 9 and not refusal.retry and "clock of this host is behind" in refusal.reason
    lighthouse.do(lio.SessionOpened(session_of("a", 10, roster="")))
    assert not lighthouse.sent(m.Rejected)


def test_an_older_process_ends_for_good_while_the_newer_one_lives():
    lighthouse = with_a_clock_ahead()
    for closed in ((), (lio.SessionClosed("a", 9),)):  # the server still says that the trainer runs
        lighthouse.do(*closed)
        refusal = late(lighthouse)
        assert refusal.above == 0 and "newer process of a has taken its place" in refusal.reason


def test_a_replaced_member_ends_for_good():
    lighthouse = with_a_clock_ahead()
    lighthouse.lose("a")
    assert late(lighthouse, roster="a-digest").above == 0


# --- certain ends ----------------------------------------------------------------------------------------


def killed(snapshots, servers_speak=True):
    """Let both trainers die; their servers report it."""
    lighthouse = that_runs_at_step_5("a b", start_wait_s=60.0)
    for name in "ab":
        lighthouse.do(lio.SessionClosed(name, 1))
        lighthouse.status(name, "gone", snapshots=snapshots.get(name, ()))
        if not servers_speak:
            lighthouse.lose(name)
    lighthouse.wait(5.0)
    return lighthouse


@pytest.mark.parametrize("servers_speak", [True, False])
def test_a_death_that_was_seen_stays_certain_when_a_newer_process_statuses_from_elsewhere(servers_speak):
    lighthouse = killed({"a": [SnapshotRef(1, 5, "s5")]}, servers_speak)
    began, new = lighthouse.now, []
    for name in "ab":
        lighthouse.open(name, incarnation=2)
        new.append(elsewhere(name))
        listening(lighthouse, 0.5, *new)
    assert lighthouse.record.generation == 2 and lighthouse.now - began < 2.0


def test_a_vouched_end_stays_certain_when_a_third_process_vouches_for_none():
    lighthouse = for_a_minute("a")
    lighthouse.lose("a")
    lighthouse.core.state.config = replace(
        lighthouse.core.state.config, policy=replace(lighthouse.core.state.config.policy, min_replicas=2)
    )
    lighthouse.open("a", incarnation=2, predecessors=(1,))
    lighthouse.do(lio.SessionClosed("a", 2))
    lighthouse.open("a", incarnation=3)
    assert lighthouse.core.state.liveness.proven_dead(lighthouse.record.roster[0])


def test_a_vouch_for_the_end_of_another_process_does_not_count():
    """The new host once ran another process of this replica, which its lock file names."""
    lighthouse = Lighthouse(record_of("a", epoch=1, a={"incarnation": 5}))
    lighthouse.open("a", incarnation=5, generation=1, step=5, epoch=1)
    lighthouse.beat("a", 5)
    lighthouse.do(lio.SessionOpened(session_of("a", 9, predecessors=(3, 2))))
    assert "taken by a living process" in lighthouse.sent(m.Rejected)[0][1].reason
    lighthouse.wait(1.0)
    assert lighthouse.record.generation == 1 and not lighthouse.told("evicting")
    lighthouse.do(lio.SessionOpened(session_of("a", 9, predecessors=(7, 5, 3))))
    assert not lighthouse.sent(m.Rejected)


def test_a_successor_that_names_no_predecessor_proves_nothing():
    lighthouse = for_a_minute("a")
    lighthouse.lose("a")
    lighthouse.open("a", incarnation=2)
    lighthouse.wait(5.0)
    assert lighthouse.record.generation == 1


# --- what memory holds -----------------------------------------------------------------------------------


def test_the_new_hosts_server_does_not_hide_the_state_in_the_old_hosts_server():
    lighthouse = killed({"a": [SnapshotRef(1, 5, "s5")]})
    for name in "ab":
        lighthouse.open(name, incarnation=2)
        lighthouse.do(elsewhere(name))
        lighthouse.wait(0.5)
    assert lighthouse.record.generation == 2
    assert lighthouse.record.base.step == 5, lighthouse.record.reason
    assert lighthouse.record.base.sources == ("http://a",)


def test_a_cold_start_after_a_fail_over_takes_the_state_that_a_session_names():
    """The new leader hears both new processes and one server's status; the other server's status comes
    later.
    """
    new, old = SnapshotRef(1, 60, "s60"), SnapshotRef(1, 50, "s50")
    lighthouse = Lighthouse(record_of("a b", epoch=3, cold=1))
    lighthouse.status("b", incarnation=2, snapshots=[old])
    for name, held in (("a", (old, new)), ("b", (old,))):
        lighthouse.open(name, incarnation=2, predecessors=(1,), snapshots=held)
    lighthouse.wait(0.3)
    assert lighthouse.record.generation == 1
    lighthouse.status("a", incarnation=2, snapshots=[old, new])
    lighthouse.wait(3.0)
    assert lighthouse.record.generation == 2 and lighthouse.record.base.step == 60


def test_a_silent_server_is_waited_for_and_then_the_snapshots_that_its_trainer_names_count():
    lighthouse = Lighthouse(record_of("a b", epoch=3, cold=1))
    lighthouse.status("b", incarnation=2, snapshots=[SnapshotRef(1, 50, "s50")])
    for name in "ab":
        lighthouse.open(name, incarnation=2, predecessors=(1,), snapshots=(SnapshotRef(1, 60, "s60"),))
    lighthouse.wait(2.5)
    assert lighthouse.record.generation == 1
    lighthouse.wait(1.0)
    assert (lighthouse.record.generation, lighthouse.record.base.sources) == (2, ("http://a",))


def test_a_server_that_has_just_lost_its_connection_is_waited_for():
    lighthouse = killed({"a": [SnapshotRef(1, 5, "s5")]})
    lighthouse.do(lio.TrainerStatusClosed("a", "http://a"))
    away = lighthouse.statuses.pop("a")
    for name in "ab":
        lighthouse.open(name, incarnation=2, predecessors=(1,))
        lighthouse.do(elsewhere(name))
    lighthouse.wait(0.5)
    assert lighthouse.record.generation == 1
    lighthouse.do(away)
    lighthouse.wait(0.3)
    assert (lighthouse.record.generation, lighthouse.record.base.step) == (2, 5)


def test_a_state_that_only_a_session_names_is_tried_once():
    """The server is dead, and only an old session of its trainer names its state."""
    lighthouse = Lighthouse(record_of("a b", epoch=3, cold=1))
    lighthouse.status("b", incarnation=2, snapshots=[SnapshotRef(1, 50, "s50")])
    for name in "ab":
        held = (SnapshotRef(1, 60, "s60"),) if name == "a" else ()
        lighthouse.open(name, incarnation=2, predecessors=(1,), snapshots=held)
    lighthouse.wait(4.0)
    assert lighthouse.record.base.step == 60
    for name in "ab":
        lighthouse.say(name, m.CannotContinue(lighthouse.record.fence, "no source delivered it"))
    lighthouse.wait(6.0)
    for name in "ab":
        held = (SnapshotRef(1, 60, "s60"),) if name == "a" else ()
        lighthouse.open(name, incarnation=2, predecessors=(1,), snapshots=held)
    lighthouse.wait(6.0)
    assert lighthouse.record.generation > 2 and lighthouse.record.base.step == 50


# --- autonomy --------------------------------------------------------------------------------------------


def test_the_longest_autonomy_that_any_trainer_has_named_counts():
    lighthouse = for_a_minute()
    lighthouse.do(lio.SessionOpened(session_of("a", 1, generation=1, step=6, epoch=1, autonomy_s=80.0)))
    lighthouse.wait(1.0)
    lighthouse.lose("a"), lighthouse.lose("b")
    lighthouse.open("c", incarnation=2)
    lighthouse.status("c", incarnation=2)
    lighthouse.wait(80.0)
    assert lighthouse.record.generation == 1
    lighthouse.wait(10.0)
    assert lighthouse.record.generation == 2


def test_the_next_leader_knows_the_longest_autonomy_of_members_that_it_has_not_heard():
    before = Lighthouse()
    before.open("a", autonomy_s=80.0)
    assert before.record.autonomy_s == 80.0
    lighthouse = Lighthouse(before.record)
    lighthouse.open("c", incarnation=2)
    lighthouse.status("c", incarnation=2)
    lighthouse.wait(80.0)
    assert lighthouse.record.generation == 1
    lighthouse.wait(10.0)
    assert lighthouse.record.generation == 2


# --- who does not come back ------------------------------------------------------------------------------


def test_a_job_that_has_run_does_not_wait_long_for_its_full_roster():
    lighthouse = that_runs_at_step_5("a b c d", start_wait_s=120.0)
    for name in "abcd":
        lighthouse.do(lio.SessionClosed(name, 1))
        lighthouse.status(name, "gone", snapshots=[SnapshotRef(1, 5, "s5")])
    for name in "abc":
        lighthouse.open(name, incarnation=2, predecessors=(1,))
        lighthouse.status(name, incarnation=2, snapshots=[SnapshotRef(1, 5, "s5")])
    lighthouse.wait(4.5)
    assert lighthouse.record.generation == 1, "the rest has a moment to come"
    lighthouse.wait(1.0)
    assert (lighthouse.record.generation, lighthouse.record.names) == (2, ("a", "b", "c"))
    assert lighthouse.record.base.step == 5


# --- while the store commits -----------------------------------------------------------------------------


def test_no_heartbeat_is_answered_while_a_new_generation_is_being_written():
    """An answered member would count its autonomy from this answer, in a generation that may be over."""
    lighthouse = for_a_minute("a b")
    lighthouse.lose("a"), lighthouse.lose("b")
    lighthouse.open("c", incarnation=2)
    lighthouse.status("c", incarnation=2)
    lighthouse.commits = False
    lighthouse.wait(AUTONOMY_AND_MARGIN_S + 6.0)
    assert lighthouse.core.writer.writing.generation == 2
    lighthouse.open("a", incarnation=1, generation=1, step=6, epoch=1)
    lighthouse.beat("a", 6)
    assert not lighthouse.sent(m.HeartbeatAck)
    lighthouse.do(lio.RecordWritten(lighthouse.records[-1].nonce))
    lighthouse.beat("a", 6)
    assert lighthouse.sent(m.HeartbeatAck)
