"""The end of a job: which members must have finished, and which members the leader does not wait for."""

from msgspec.structs import replace
from protocol.makers import record_of
from protocol.test_leader import Lighthouse, started

from fabric.model import JobEnd, SnapshotRef
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m


def finished(lighthouse, *names, step=9):
    for name in names:
        lighthouse.say(name, m.Finished(lighthouse.record.fence, step))
    return lighthouse


def of_roster(names, **changes):
    """Return a job in a planned second epoch with these changed roster entries; all but joining members
    run.
    """
    record = replace(record_of(names, epoch=2, forced=1, **changes), incident_id="e2")
    fresh = [x.replica for x in record.roster if x.joining]
    lighthouse = started(names, record=record)
    for name in fresh:
        lighthouse.core.state.epoch.running.pop(name)
    return lighthouse


def test_a_leaving_member_need_not_finish_while_others_stay():
    lighthouse = of_roster("a b", a={"leaving": True})
    assert finished(lighthouse, "b").record.complete


def test_the_last_member_ends_the_job_though_it_is_to_leave():
    """Found in simulation: all others had died and the last member was leaving, so the job never
    completed.
    """
    lighthouse = of_roster("a", a={"leaving": True})
    lighthouse.wait(1.0)
    assert not lighthouse.record.complete
    assert finished(lighthouse, "a").record.complete and lighthouse.record.base.step == 9


def test_a_newcomer_that_no_round_waits_for_does_not_delay_the_end_of_the_job():
    """Found in simulation: the newcomer was admitted at the last step, whose gradient was lost with a
    checkpoint server.
    """
    lighthouse = finished(of_roster("a b", b={"joining": True}), "a")
    lighthouse.wait(50.0)
    assert not lighthouse.record.complete, "it may still get to the end by itself"
    lighthouse.wait(20.0)
    assert lighthouse.record.complete and lighthouse.record.base.step == 9
    assert sorted(x for x, _ in lighthouse.sent(m.Complete)) == ["a", "b"]


def test_no_member_waits_at_the_end_for_a_newcomer_in_a_blocking_join():
    """Found with 16 jobs on two cores: the others' loops had ended where they were to wait for its state."""
    lighthouse = of_roster("a b", b={"joining": True, "blocking_join": True})
    assert not lighthouse.record.complete
    assert finished(lighthouse, "a").record.complete and lighthouse.record.base.step == 9


def test_a_newcomer_that_takes_part_is_waited_for():
    lighthouse = of_roster("a b", b={"joining": True})
    lighthouse.say("b", m.Running(lighthouse.record.fence, 8))
    finished(lighthouse, "a").wait(100.0)
    assert not lighthouse.record.complete
    assert finished(lighthouse, "b").record.complete


def test_a_replica_whose_loop_ended_outside_while_the_job_goes_on_is_refused():
    lighthouse = started("a b")
    lighthouse.open("c", generation=1, step=4, epoch=1)
    finished(lighthouse, "c", step=5)
    assert not lighthouse.sent(m.Rejected), "the others may end there, too"
    lighthouse.beat("a", 6)
    [(name, refusal)] = lighthouse.sent(m.Rejected)
    assert name == "c" and not refusal.retry
    assert (
        "this loop ended at step 5, before it had caught up with the job, which is at step 6"
        in refusal.reason
    )
    finished(lighthouse, "a", "b")
    assert lighthouse.record.complete and lighthouse.record.base.step == 9


def test_a_member_that_waits_in_close_is_not_evicted_for_its_user_code():
    lighthouse = finished(started("a b"), "a", step=5)
    for _ in range(4):
        lighthouse.say("b", m.Heartbeat(1, 1, 1, 5, waiting_for=("a",)))
        lighthouse.beat("a", 5)
        lighthouse.wait(600.0)
    assert lighthouse.record.names == ("a", "b")


def test_a_job_end_in_a_trainer_status_completes_the_job():
    lighthouse = Lighthouse(record_of("a b", epoch=3))
    ended = JobEnd(lighthouse.record.fence, 7, 1)
    lighthouse.do(io.TrainerStatusSeen(m.TrainerStatus("b", 1, "gone", 1, "http://b", ended=ended)))
    assert lighthouse.record.complete and lighthouse.record.base.step == 7


def test_a_job_end_in_the_session_of_a_members_next_process_completes_the_job():
    lighthouse = Lighthouse(record_of("a b", epoch=3))
    lighthouse.open("b", incarnation=2, ended=JobEnd(lighthouse.record.fence, 7, 1))
    assert lighthouse.record.complete and lighthouse.record.base.step == 7
    assert lighthouse.sent(m.Complete)


def test_a_job_end_of_another_store_generation_or_step_is_ignored():
    """Such a note is of an earlier job of this name, of an abandoned generation, or of a step that members
    have passed.
    """
    lighthouse = started("a b")
    fence = lighthouse.record.fence
    for ended in (
        JobEnd(replace(fence, store_id="another"), 7, 1),
        JobEnd(replace(fence, generation=2), 7, 1),
        JobEnd(fence, 7, 99),
        JobEnd(fence, 4, 1),
    ):
        lighthouse.do(io.TrainerStatusSeen(m.TrainerStatus("b", 1, "running", 1, "http://b", ended=ended)))
        assert not lighthouse.record.complete


def test_links_that_end_with_the_job_are_no_abort():
    lighthouse = finished(started("a b"), "a", "b")
    assert lighthouse.record.complete
    lighthouse.say("a", m.Aborted(lighthouse.record.fence, 9, "the link to b ended: b closed the link", "b"))
    assert not lighthouse.told("aborted")


def test_a_member_that_finished_and_died_does_not_complete_the_job_that_went_on():
    lighthouse = started("a b", start_replicas=1)
    finished(lighthouse, "a")
    lighthouse.status("a", "gone")
    lighthouse.do(io.SessionClosed("a", 1))
    lighthouse.wait(1.0)
    assert lighthouse.record.names == ("b",)
    lighthouse.beat("b", 120)
    held = [SnapshotRef(1, 120, "new")]
    lighthouse.status("b", "gone", snapshots=held)
    lighthouse.open("b", incarnation=2, predecessors=(1,))
    lighthouse.status("b", incarnation=2, snapshots=held)
    lighthouse.wait(10.0)
    assert not lighthouse.record.complete, lighthouse.record.reason
    assert (lighthouse.record.generation, lighthouse.record.base.step) == (2, 120)


def test_the_leader_ignores_the_end_of_another_generation():
    lighthouse = started("a b")
    lighthouse.say("a", m.Finished(replace(lighthouse.record.fence, generation=0), 5))
    assert not lighthouse.core.endings.finished
