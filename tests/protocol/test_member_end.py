"""The end of a member's loop: its messages, when it may end alone, and when ending is an error."""

from msgspec.structs import replace
from protocol.makers import record_of
from protocol.test_member import FIRST, Trainer, contribution, holding, resume_of, running

from fabric.model import Base, JobEnd
from fabric.protocol.member.ending import LEADER_S, NO_LEADER_S
from fabric.protocol.member.state import Mode
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m


def finished(step=1, epoch=1, why=""):
    return m.Finished(replace(FIRST.fence, epoch=epoch), step, why)


def closed():
    """Return a member that committed step 0 with the other member, and whose loop ended at step 1."""
    trainer = holding()
    trainer.peer("b", m.CommitVote(FIRST.fence, 0, 1, "g0", "start"))
    trainer.do(io.Closing())
    return trainer


def test_the_end_of_a_loop_goes_to_the_leader_and_to_all_members_once():
    trainer = closed()
    assert trainer.said(m.Finished) == trainer.told_peers(m.Finished) == [finished()]
    assert trainer.core.session.phase == "run, finished", "it waits in close, and is not in user code"
    trainer.do(io.Tick())
    assert not trainer.told_peers(m.Finished)


def test_members_hear_of_the_end_again_in_an_epoch_with_new_links():
    trainer = closed()
    second = record_of("a b", epoch=2)
    trainer.leader(m.Epoch(second), resume_of(second, 1))
    assert not trainer.told_peers(m.Finished), "what is sent before the links stand is lost"
    trainer.do(io.Linked(2))
    assert trainer.told_peers(m.Finished) == [finished(epoch=2)]


def test_with_all_loops_ended_no_lighthouse_is_needed():
    trainer = closed()
    trainer.do(io.LeaderLost())
    trainer.peer("b", finished())
    assert not trainer.found(io.Finish), "a lighthouse that comes back at once marks the job itself"
    assert trainer.core.next_deadline() == trainer.now + NO_LEADER_S
    trainer.now += NO_LEADER_S
    [end] = trainer.do(io.Tick())
    assert (end.step, end.ended) == (1, JobEnd(FIRST.fence, 1, 1))
    assert "all members (a, b) have finished at step 1" in end.alone


def test_with_all_loops_ended_an_epoch_under_way_needs_no_lighthouse_either():
    """The processes of others that finished are gone, so the leader evicted them, and then was lost."""
    trainer = closed()
    trainer.peer("b", finished())
    trainer.leader(m.Epoch(record_of("a", epoch=2)))
    trainer.do(io.LeaderLost())
    assert trainer.core.epochs.mode is Mode.REPORTED
    trainer.now += NO_LEADER_S
    [end] = trainer.do(io.Tick())
    assert (end.step, end.ended) == (1, JobEnd(FIRST.fence, 1, 1))


def awaiting():
    """Return a member whose loop ended where it was to wait for the state of a newcomer, c."""
    trainer = closed()
    trainer.peer("b", finished())
    record = record_of("a b c", epoch=2, c={"joining": True, "blocking_join": True})
    trainer.leader(m.Epoch(record), resume_of(record, 1))
    trainer.do(io.Linked(2))
    return trainer


def test_a_newcomer_in_a_blocking_join_does_not_delay_an_end_without_a_lighthouse():
    trainer = awaiting()
    trainer.do(io.LeaderLost())
    trainer.now += NO_LEADER_S
    [end] = trainer.do(io.Tick())
    assert end.ended == JobEnd(replace(FIRST.fence, epoch=2), 1, 1)
    assert "all members (a, b) have finished at step 1" in end.alone


def test_close_waits_longer_for_a_leader_that_answers_but_cannot_write():
    trainer = closed()
    trainer.peer("b", finished())
    trainer.now += LEADER_S - 0.1
    trainer.do(io.Tick())
    assert not trainer.found(io.Finish)
    trainer.now += 0.1
    trainer.do(io.Tick())
    assert trainer.found(io.Finish)


def test_close_returns_after_the_autonomy_whatever_the_others_do():
    trainer = closed()
    trainer.do(io.LeaderLost())
    trainer.now = trainer.core.next_deadline()
    assert trainer.now == 100.0 + trainer.core.context.config.autonomy_s
    [end] = [e for e in trainer.do(io.Tick()) if isinstance(e, io.Finish)]
    assert end.step == 1 and "not all members have said that they finished" in end.alone
    assert end.ended == JobEnd(FIRST.fence, 1, 1), "the first loop that ends is the end of the job"


def test_the_end_of_a_finished_members_link_does_not_abort():
    trainer = closed()
    trainer.peer("b", finished())
    trainer.do(io.LinkLost("b", 1, "b closed the link"))
    assert trainer.core.epochs.mode is Mode.RUN and not trainer.said(m.Aborted)
    assert not trainer.found(io.WriteJournal)


def test_a_members_loop_stops_at_the_step_at_which_another_member_has_finished():
    trainer = holding()
    trainer.peer("b", m.CommitVote(FIRST.fence, 0, 1, "g0", "start"))
    trainer.peer("b", finished())
    assert not trainer.found(io.Stop), "its own loop may end there as well"
    trainer.do(io.Ready(1, "d1"))
    [stop] = trainer.found(io.Stop)
    assert stop.code == 1
    assert stop.reason.startswith(
        "b finished at step 1, and this loop has more steps to do: let it count session."
    )
    why = "b finished at step 1, and this loop has more steps to do"
    assert trainer.said(m.Finished) == trainer.told_peers(m.Finished) == [finished(why=why)]


def test_a_member_in_the_middle_of_the_next_step_stops_at_once_when_another_has_finished():
    trainer = holding()
    trainer.peer("b", m.CommitVote(FIRST.fence, 0, 1, "g0", "start"))
    trainer.do(io.Ready(1, "d1"))
    trainer.peer("b", finished())
    assert [s.code for s in trainer.found(io.Stop)] == [1]


def test_a_finished_member_notes_that_another_members_loop_had_more_steps():
    trainer = closed()
    trainer.peer("b", finished(why="a finished at step 1, and this loop has more steps to do"))
    [note] = trainer.found(io.WriteJournal)
    assert (note.kind, note.about) == ("loops differ", "b") and "b had steps left" in note.why


def test_a_member_ignores_the_end_of_another_generation():
    trainer = holding()
    trainer.peer("b", m.CommitVote(FIRST.fence, 0, 1, "g0", "start"))
    trainer.peer("b", m.Finished(replace(FIRST.fence, generation=7), 1))
    trainer.do(io.Ready(1, "d1"))
    assert not trainer.found(io.Stop) and trainer.found(io.Compute)


def joining():
    """Return a linked newcomer of epoch 2 with the state of step 0."""
    trainer = Trainer("c")
    trainer.core.memory.state.generation = 1
    second = record_of("a b c", epoch=2, forced=1, c={"joining": True})
    trainer.leader(m.Epoch(second))
    trainer.do(io.Linked(2))
    return trainer, second


def test_a_newcomer_does_not_end_the_job():
    """The admitted newcomer's own loop ends at the step of the round that the others have entered."""
    trainer, second = joining()
    trainer.do(io.Closing())
    assert not trainer.told_peers(m.Finished)
    trainer.peer("a", contribution(second, 0, (0, 1)))
    [stop] = trainer.found(io.Stop)
    assert stop.code == 1 and "its loop ended at step 0, before it had caught up" in stop.reason
    assert trainer.said(m.CannotContinue), "nobody waits for it until its user code has had its time"


def test_a_newcomer_at_the_end_follows_the_others():
    trainer, _ = joining()
    trainer.do(io.Closing())
    trainer.peer("a", finished(step=0, epoch=2))
    assert trainer.told_peers(m.Finished) == [finished(step=0, epoch=2)] * 2
    assert not trainer.found(io.Stop)


def test_a_member_that_was_evicted_and_joins_again_says_nothing_in_the_epoch_before():
    trainer = running()
    trainer.leader(m.Epoch(record_of("a b", epoch=2)), m.Epoch(record_of("b", epoch=3)))
    trainer.leader(m.Epoch(record_of("a b", epoch=4, forced=3, a={"joining": True})))
    trainer.do(io.Linked(4), io.Closing())
    trainer.peer("b", finished(step=0, epoch=4))
    assert trainer.told_peers(m.Finished) == [finished(step=0, epoch=4)]


def test_a_newcomer_with_the_final_state_ends_without_a_lighthouse_as_the_others_do():
    """It enters no round any more. It waited for autonomy_s, and ended with 75."""
    trainer, _ = joining()
    trainer.do(io.LeaderLost(), io.Closing())
    trainer.peer("a", finished(step=0, epoch=2))
    assert trainer.core.next_deadline() > trainer.now + NO_LEADER_S, "b may have more steps"
    trainer.peer("b", finished(step=0, epoch=2))
    trainer.now += NO_LEADER_S
    trainer.do(io.Tick())
    assert trainer.found(io.Finish) and not trainer.found(io.Stop)


def test_a_newcomer_whose_loop_ended_before_the_jobs_last_step_leaves():
    trainer, _ = joining()
    trainer.do(io.Closing())
    trainer.peer("a", finished(step=4, epoch=2))
    [stop] = trainer.found(io.Stop)
    assert stop.code == 1 and "the job, which is at step 4" in stop.reason


def test_close_ends_the_process_where_the_job_ended_elsewhere():
    for generation, step, code in ((1, 5, 1), (2, 1, 0)):
        trainer = closed()
        trainer.leader(m.Complete(replace(FIRST.fence, generation=generation), step))
        [stop] = trainer.found(io.Stop)
        assert stop.code == code and f"the job is complete at step {step}" in stop.reason
    trainer = closed()
    trainer.leader(m.Complete(FIRST.fence, 1))
    assert trainer.found(io.Finish) == [io.Finish(1)]


def test_a_loop_that_still_runs_when_the_job_is_complete_hears_so():
    trainer = running()
    trainer.leader(m.Complete(FIRST.fence, 5))
    assert trainer.found(io.Finish) == [io.Finish(5)]


def leaving(prepared=True):
    """Return a member of three in b's last round before b's drain; c's vote is on its way."""
    trainer = Trainer()
    first = record_of("a b c", epoch=1, b={"leaving": True})
    trainer.leader(m.Epoch(first), resume_of(first, 0, a=(0, 1), b=(2,), c=(3,)))
    trainer.do(io.Linked(1), io.Computed(0, (0, 1), 2.0))
    trainer.peer("b", contribution(first, 0, (2,)))
    trainer.peer("c", contribution(first, 0, (3,)))
    trainer.leader(m.Epoch(record_of("a c", epoch=2, forced=1)))
    if prepared:
        trainer.do(io.Linked(2), io.Exchanged(1, 0, "g0"))
    trainer.peer("b", m.CommitVote(first.fence, 0, 2, "g0", "start"))
    trainer.do(io.LinkLost("b", 1, "b closed the link"))
    return trainer, first


def test_a_drained_member_that_goes_with_the_last_vote_aborts_no_round():
    """Found in simulation: the drained member had every vote, and ended before the others had them."""
    trainer, first = leaving()
    assert trainer.core.epochs.mode is Mode.RUN
    trainer.peer("c", m.CommitVote(first.fence, 0, 2, "g0", "start"))
    assert trainer.found(io.Apply) and trainer.core.epochs.current.epoch == 2


def test_a_drained_member_that_dies_before_that_aborts_the_round():
    trainer, _ = leaving(prepared=False)
    assert trainer.core.epochs.mode is Mode.ABORTED


def test_members_hear_of_the_end_again_over_a_new_link_of_the_same_epoch():
    trainer = closed()
    trainer.do(io.LinkLost("b", 1, "reset"))
    trainer.do(io.Linked(1))
    assert trainer.told_peers(m.Finished) == [finished()]


def test_the_end_of_a_loop_is_told_in_the_generation_of_its_state():
    trainer = holding()
    trainer.peer("b", m.CommitVote(FIRST.fence, 0, 1, "g0", "start"))
    again = record_of("a b", epoch=2, cold=2, generation=2, base=Base(1, 0, "older", ("http://b",)))
    trainer.leader(m.Epoch(again), resume_of(again, 0))
    trainer.do(io.Closing())
    told = {x.fence.generation for x in trainer.said(m.Finished)}
    assert told and 2 not in told, "it holds no state of generation 2"


def test_members_that_finished_at_unequal_steps_have_not_ended_the_job():
    trainer = closed()
    trainer.do(io.LeaderLost())
    trainer.peer("b", finished(step=0))
    trainer.now += NO_LEADER_S + 1.0
    trainer.do(io.Tick())
    assert not trainer.found(io.Finish)
