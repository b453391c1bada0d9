"""The sources of a cold start: memory, then durable checkpoints, and the next source if one cannot be
loaded.
"""

import pytest
from msgspec.structs import replace
from protocol.makers import record_of, report_of
from protocol.test_leader import Lighthouse, started

from fabric.model import DURABLE, Base, SnapshotRef
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m

OLD, NEW = SnapshotRef(1, 40, "old"), SnapshotRef(1, 60, "new")


def all_dead(durable=(), held=(), names="a b"):
    """Return a job whose members all died, with new processes that found these checkpoints in storage.
    Servers hold ``held``.
    """
    lighthouse = Lighthouse(record_of(names, epoch=1), start_replicas=len(names.split()))
    for name in names.split():
        lighthouse.status(name, "gone", snapshots=held)
    for name in names.split():
        lighthouse.open(name, incarnation=2, predecessors=(1,), durable=tuple(durable))
        lighthouse.status(name, incarnation=2, snapshots=held)
    lighthouse.wait(3.1)  # unknown servers may hold a newer state, until the grace period is over
    return lighthouse


def die_and_come_again(lighthouse, durable=(), held=(), incarnation=2):
    """Kill every trainer at once; the new processes open sessions before the leader plans again."""
    for name in "ab":
        lighthouse.status(name, "gone", incarnation=incarnation - 1, snapshots=held)
    for name in "ab":
        lighthouse.open(name, incarnation=incarnation, predecessors=(1,), durable=tuple(durable))
        lighthouse.status(name, incarnation=incarnation, snapshots=held)


def fall(lighthouse, name, why="/checkpoints/step-60/__0_0.distcp is damaged"):
    return lighthouse.say(name, m.CannotContinue(lighthouse.record.fence, why, unusable=True))


def test_a_silent_server_that_delivers_nothing_is_believed_only_once():
    """Only the trainer's session names the snapshot of the server, which has died meanwhile."""
    lighthouse = Lighthouse(record_of("a b", epoch=1), start_replicas=2)
    for name, held in (("a", (NEW,)), ("b", ())):
        lighthouse.open(name, incarnation=2, predecessors=(1,), snapshots=held)
    lighthouse.status("b", incarnation=2, snapshots=[OLD])
    lighthouse.wait(10.0)
    assert lighthouse.record.base.step == 60, "it may connect again in a moment"
    for name in ("a", "b"):
        why = "no source delivered the state of step 60"
        lighthouse.say(name, m.CannotContinue(lighthouse.record.fence, why))
        lighthouse.wait(1.0)
    begun = [x.base.step for x in lighthouse.records if x.cold == x.epoch]
    assert begun == [60, 40], lighthouse.record.reason


def elected_since():
    """Return a job whose members have died, and a new leader that has not heard the server of replica c."""
    lighthouse = Lighthouse(record_of("a b", epoch=1), start_replicas=2)
    die_and_come_again(lighthouse, held=[OLD])
    return lighthouse


def cut_off(has_session):
    """Return the same job, and an old leader that has just lost the connection of c's server."""
    lighthouse = started(start_replicas=2)
    if has_session:
        lighthouse.open("c")
    lighthouse.status("c", "gone", snapshots=[NEW])
    lighthouse.statuses.pop("c")
    if has_session:
        lighthouse.do(io.SessionClosed("c", 1))
    lighthouse.do(io.TrainerStatusClosed("c", "http://c"))
    die_and_come_again(lighthouse, held=[OLD])
    return lighthouse


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize(
    "begin",
    [elected_since, lambda: cut_off(True), lambda: cut_off(False)],
    ids=["elected", "cut", "stranger"],
)
def test_a_cold_start_waits_three_seconds_for_the_server_of_a_replica_outside_the_roster(begin, comes_back):
    """Replica c caught up outside the roster, and its trainer is gone. Its server holds the newest state."""
    lighthouse = begin()
    lighthouse.wait(2.0)
    assert lighthouse.record.generation == 1
    if comes_back:
        lighthouse.status("c", "gone", snapshots=[NEW])
    lighthouse.wait(1.1)
    assert lighthouse.record.generation == 2
    assert lighthouse.record.base.step == (60 if comes_back else 40), lighthouse.record.reason


def test_without_memory_the_newest_durable_checkpoint_is_the_base():
    record = all_dead(durable=[OLD, NEW]).record
    assert record.base == Base(1, 60, "new", (DURABLE,))
    assert record.reason.startswith("cold start from step 60 of generation 1, a durable checkpoint, ")


@pytest.mark.parametrize(
    ("durable", "held", "begins"),
    [
        ([], [NEW], "step 60 of generation 1, 57 steps lost"),
        ([NEW], [], "step 60 of generation 1, a durable checkpoint, 57 steps lost"),
        ([], [], "step 0 of generation 0, 117 steps lost"),
    ],
)
def test_a_cold_start_says_how_many_steps_it_lost_wherever_it_begins(durable, held, begins):
    lighthouse = started(start_replicas=2)
    lighthouse.beat("a", 116)
    lighthouse.beat("b", 117)
    die_and_come_again(lighthouse, durable, held)
    assert f"cold start from {begins} with the memory that held them" in lighthouse.record.reason
    assert lighthouse.core.starts.steps_lost == 117 - lighthouse.record.base.step


def test_steps_of_a_generation_that_began_again_count_from_where_it_began():
    lighthouse = started(start_replicas=2)
    lighthouse.beat("a", 117)
    die_and_come_again(lighthouse, held=[NEW])
    die_and_come_again(lighthouse, held=[NEW], incarnation=3)
    assert lighthouse.record.generation == 3 and "lost" not in lighthouse.record.reason


def test_a_leader_that_was_elected_since_does_not_know_how_many_steps_were_lost():
    lighthouse = all_dead(durable=[NEW])
    assert "how many steps were lost is not known" in lighthouse.record.reason
    assert lighthouse.core.starts.steps_lost is None


def test_a_message_to_a_new_leader_after_a_return_counts():
    lighthouse = Lighthouse(record_of("a b", epoch=1), start_replicas=2)
    lighthouse.open("a", generation=1, step=99, epoch=1)
    die_and_come_again(lighthouse, held=[NEW])
    lighthouse.wait(3.1)
    assert "39 steps lost" in lighthouse.record.reason


def test_newer_memory_goes_before_durable_storage():
    record = all_dead(durable=[OLD], held=[NEW]).record
    assert record.base == Base(1, 60, "new", ("http://a", "http://b"))


def test_a_newer_durable_checkpoint_goes_before_memory():
    assert all_dead(durable=[NEW], held=[OLD]).record.base == Base(1, 60, "new", (DURABLE,))


def test_a_state_in_memory_and_in_storage_comes_from_either():
    assert all_dead(durable=[NEW], held=[NEW]).record.base.sources == (DURABLE, "http://a", "http://b")


def test_a_later_generation_is_newer_whatever_its_step():
    assert all_dead(durable=[NEW, SnapshotRef(2, 50, "later")]).record.base.step == 50


def test_a_state_that_no_member_can_load_is_passed_over_and_the_reason_says_why():
    lighthouse = all_dead(durable=[OLD, NEW])
    first = lighthouse.record
    for name in ("a", "b"):
        fall(lighthouse, name)
        lighthouse.wait(0.1)
    record = lighthouse.record
    assert record.generation == first.generation + 1 and record.cold == record.epoch
    assert record.base == Base(1, 40, "old", (DURABLE,))
    assert "step 60 of generation 1 could not be loaded: /checkpoints/step-60/__0_0.distcp" in record.reason


def test_a_state_that_one_member_could_load_is_not_passed_over():
    lighthouse = all_dead(durable=[OLD, NEW])
    fall(lighthouse, "a")
    lighthouse.wait(0.1)
    lighthouse.beat("b", 60, generation=lighthouse.record.generation)
    assert lighthouse.core.bases.unusable == {} and lighthouse.record.names == ("b",)


def outvoted(lighthouse, name, step):
    report = replace(report_of(lighthouse.record, step, digest="wrong"), outvoted=True)
    return lighthouse.say(name, report)


def left_alone(*others):
    """b and c called a's state wrong and died; their servers still hold the states ``others``."""
    lighthouse = started("a b c", start_replicas=1)
    lighthouse.status("a", snapshots=[SnapshotRef(1, 38, "wrong")])
    for name in "bc":
        lighthouse.beat(name, 40)
        lighthouse.status(name, "gone", snapshots=others)
    lighthouse.wait(1.0)
    assert lighthouse.record.names == ("a",) and lighthouse.record.generation == 1
    outvoted(lighthouse, "a", 40)
    lighthouse.wait(1.0)
    return lighthouse


def test_an_outvoted_member_left_alone_goes_on_with_neither_its_state_nor_a_snapshot_of_it():
    record = left_alone(SnapshotRef(1, 30, "good")).record
    assert record.generation == 2 and record.cold == record.epoch
    assert record.base == Base(1, 30, "good", ("http://b", "http://c"))
    assert "cold start from step 30 of generation 1" in record.reason
    told = "step 38 of generation 1 is not trusted: a disagrees with the majority about the state at step 40"
    assert told in record.reason


def test_a_snapshot_that_another_server_holds_too_is_trusted():
    assert left_alone(SnapshotRef(1, 38, "wrong")).record.base.step == 38, "they took the same: it was right"


def test_a_state_that_is_not_trusted_counts_as_lost():
    record = left_alone(SnapshotRef(0, 0, "start")).record
    assert record.reason.startswith("cold start from step 0 of generation 0, 40 steps lost"), record.reason
    assert "step 38 of generation 1 is not trusted" in record.reason


def test_a_job_with_only_an_untrusted_state_left_stops():
    record = left_alone().record
    assert record.failed.startswith("no state is left that could be loaded: step 38 of generation 1 is not ")


def test_a_member_that_cannot_continue_for_another_reason_does_not_make_a_checkpoint_unusable():
    lighthouse = all_dead(durable=[OLD, NEW])
    for name in ("a", "b"):
        lighthouse.say(name, m.CannotContinue(lighthouse.record.fence, "its host is slow"))
        lighthouse.wait(0.1)
    assert lighthouse.record.base.step == 60


def test_when_no_state_can_be_loaded_the_job_fails_and_does_not_begin_from_scratch():
    lighthouse = all_dead(durable=[NEW])
    for name in ("a", "b"):
        fall(lighthouse, name)
        lighthouse.wait(0.1)
    assert "no state is left that could be loaded: step 60" in lighthouse.record.failed
    # After an operator's retry the replicas read the mended storage once more.
    lighthouse.do(io.Operator("retry", "", "ann", "the storage is mended"))
    for name in ("a", "b"):
        lighthouse.open(name, incarnation=3, predecessors=(2, 1), durable=(NEW,))
        lighthouse.status(name, incarnation=3)
    assert not lighthouse.record.failed and lighthouse.record.base.step == 60


def test_a_new_store_goes_on_from_storage_in_a_generation_above_its():
    lighthouse = Lighthouse(start_replicas=1)
    lighthouse.status("a")
    lighthouse.open("a", durable=(SnapshotRef(7, 90, "x"),))
    record = lighthouse.record
    assert (record.generation, record.base) == (8, Base(7, 90, "x", (DURABLE,)))


def test_a_checkpoint_that_was_written_since_is_known_by_its_writers_status():
    lighthouse = all_dead(durable=[OLD])
    told = lighthouse.do(
        io.TrainerStatusSeen(m.TrainerStatus("a", 2, "running", 9, "http://a", durable=(NEW,)))
    )
    assert [t.kind for t in told if isinstance(t, io.RecordEvent)] == ["durable"]
    assert not lighthouse.do(
        io.TrainerStatusSeen(m.TrainerStatus("a", 2, "running", 10, "http://a", durable=(NEW,)))
    )
    assert lighthouse.core.state.liveness.durable() == {OLD, NEW}
    error = "the disk is full"
    lighthouse.do(
        io.TrainerStatusSeen(m.TrainerStatus("a", 2, "running", 11, "http://a", durable_error=error))
    )
    assert [t.why for t in lighthouse.told("durable failed")] == [error]
    assert lighthouse.core.state.liveness.durable() == {OLD, NEW}


def held_by(**held):
    """Return a job whose members all died. The server of each holds the states of its name."""
    names = sorted(held)
    lighthouse = Lighthouse(record_of(" ".join(names), epoch=1), start_replicas=len(names))
    for name in names:
        lighthouse.status(name, "gone", snapshots=held[name])
    for name in names:
        lighthouse.open(name, incarnation=2, predecessors=(1,))
        lighthouse.status(name, incarnation=2, snapshots=held[name])
    lighthouse.wait(3.1)
    return lighthouse


def at(step, digest):
    return SnapshotRef(1, step, digest)


def test_of_two_unequal_states_of_one_step_neither_is_believed():
    record = held_by(a=[at(40, "x"), at(60, "bad")], b=[at(40, "x"), at(60, "good")]).record
    assert (record.base.step, record.base.digest) == (40, "x")
    assert "step 60 of generation 1 is disputed: there are unequal states of step 60" in record.reason


def test_a_wrong_state_spoils_the_later_states_of_its_holders():
    assert held_by(a=[at(60, "bad"), at(61, "later")], b=[at(40, "x"), at(60, "good")]).record.base.step == 40
    alone = held_by(a=[at(60, "bad"), at(61, "worse")], b=[at(60, "good")], c=[at(60, "good")]).record
    assert (alone.base.step, alone.base.digest) == (60, "good"), "most holders are believed"


def test_where_only_disputed_states_are_left_the_job_stops():
    start = SnapshotRef(0, 0, "start")
    record = held_by(a=[start, at(60, "bad")], b=[start, at(60, "good")]).record
    assert "step 60 of generation 1 is disputed" in record.failed


def test_two_unequal_checkpoints_of_one_step_are_disputed_and_memory_is_believed():
    """A second job writes under the same name."""
    both = [OLD, NEW, replace(NEW, digest="other")]
    assert all_dead(durable=both).record.base == Base(1, 40, "old", (DURABLE,))
    held = all_dead(durable=both, held=[NEW]).record.base
    assert (held.step, held.digest) == (60, "new")


def test_replicas_that_expect_no_equal_states_dispute_none():
    lighthouse = Lighthouse(record_of("a b", epoch=1), start_replicas=2)
    for name in "ab":
        lighthouse.status(name, "gone", snapshots=[at(60, name)])
    for name in "ab":
        lighthouse.open(name, incarnation=2, predecessors=(1,), replay=False)
        lighthouse.status(name, incarnation=2, snapshots=[at(60, name)])
    lighthouse.wait(3.1)
    assert lighthouse.record.base.step == 60


OTHERS = SnapshotRef(7, 10, "another job's")


def test_a_checkpoint_of_another_job_does_not_replace_newer_steps_in_memory():
    record = all_dead(durable=[OTHERS], held=[NEW]).record
    assert (record.base.step, record.generation) == (60, 2)
    why = "step 10 of generation 7 is of another job, because this one has reached only generation 1"
    assert why in record.reason


def test_a_leader_that_has_heard_the_job_knows_checkpoints_of_another_one():
    lighthouse = started(start_replicas=2)
    lighthouse.beat("a", 117)
    die_and_come_again(lighthouse, durable=[OLD, OTHERS])
    assert lighthouse.record.base == Base(1, 40, "old", (DURABLE,))


def test_after_a_restored_store_a_checkpoint_of_a_later_generation_is_the_jobs_own():
    lighthouse = Lighthouse(record_of("a b", epoch=1), start_replicas=2)
    lighthouse.open("a", store_id="s", known_generation=7, durable=(OTHERS,))
    assert lighthouse.core.bases._foreign({OTHERS: {DURABLE}, NEW: {"http://a"}}, True) == {}


def test_after_a_retry_checkpoints_that_only_gone_processes_named_are_forgotten():
    lighthouse = all_dead(durable=[NEW])
    for name in ("a", "b"):
        fall(lighthouse, name)
        lighthouse.wait(0.1)
    for name in "ab":
        lighthouse.status(name, "gone", incarnation=2)
        lighthouse.do(io.SessionClosed(name, 2))
    lighthouse.do(io.Operator("retry", "", "ann", "the storage is gone for good"))
    for name in ("c", "d"):
        lighthouse.open(name)
        lighthouse.status(name)
    lighthouse.wait(10.0)  # until the silent servers of a and b are given up
    assert not lighthouse.record.failed and lighthouse.record.base.step == 0, lighthouse.record.reason
