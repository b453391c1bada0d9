"""A member sends heartbeats for steps at most every quarter of a second, and at once if the leader needs the
step.
"""

from protocol.test_member import FIRST, contribution, outside, running, vote

from fabric.model import EarlierStep, StepTimes
from fabric.protocol.member.session import MOST_EARLIER, STEP_BEAT_S
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m


def step(trainer, number, digest="", times=None):
    """Commit step ``number``; return the steps in the heartbeats of that moment."""
    trainer.do(io.Computed(number, (0, 1), 2.0))
    trainer.peer("b", contribution(FIRST, number, (2, 3)))
    trainer.do(io.Exchanged(1, number, "g"))
    trainer.peer("b", vote(FIRST, number, gradient="g", state=trainer.core.memory.state.digest))
    assert trainer.core.memory.state.step == number + 1
    trainer.do(io.Ready(number + 1, digest, times))
    return [beat.step for beat in trainer.said(m.Heartbeat)]


def stepping():
    """Return a member in its first epoch, already named by a heartbeat, whose step the leader does not
    need.
    """
    trainer = running()
    trainer.now += 2.0
    step(trainer, 0)
    assert trainer.core.session.contact.beaten == trainer.now
    return trainer


def test_short_steps_share_a_heartbeat_and_the_newest_is_sent_in_time():
    trainer = stepping()
    trainer.now += STEP_BEAT_S / 4
    assert step(trainer, 1) == []
    trainer.now += STEP_BEAT_S / 4
    assert step(trainer, 2) == []
    due = trainer.core.next_deadline()
    assert due <= trainer.now + STEP_BEAT_S / 2 + 1e-6
    trainer.now = due
    trainer.do(io.Tick())
    assert [beat.step for beat in trainer.said(m.Heartbeat)] == [3]


def test_a_long_step_is_sent_at_once():
    trainer = stepping()
    trainer.now = trainer.core.next_deadline()
    trainer.do(io.Tick())
    assert [beat.step for beat in trainer.said(m.Heartbeat)] == [1]
    trainer.now += STEP_BEAT_S * 1.01
    assert step(trainer, 1) == [2]


def test_a_newcomer_sends_the_step_of_its_state_at_once_because_the_leader_admits_it_by_that():
    assert [beat.step for beat in outside().said(m.Heartbeat)][-1:] == [5]


def test_a_digest_is_sent_at_once():
    assert step(stepping(), 1, "d2") == [2]


def test_while_a_replica_joins_every_step_is_sent():
    trainer = stepping()
    trainer.leader(m.TakeSnapshotFor(FIRST.fence, "c", 9))
    assert step(trainer, 1) == [2]
    trainer.leader(m.StopServing(FIRST.fence, "c"))
    assert step(trainer, 2) == []


def test_a_member_that_missed_the_step_of_a_snapshot_sends_every_step_for_a_while():
    """The leader chose a past step; these heartbeats let it choose a coming step."""
    trainer = stepping()
    step(trainer, 1)
    trainer.leader(m.TakeSnapshotFor(FIRST.fence, "c", 1))
    assert trainer.said(m.SnapshotTaken) == [m.SnapshotTaken(FIRST.fence, "c", 1, "")]
    assert [beat.step for beat in trainer.said(m.Heartbeat)] == [2]
    assert step(trainer, 2) == [3]


def test_a_new_epoch_is_confirmed_at_once():
    trainer = running()
    assert step(trainer, 0) == [1]
    assert step(trainer, 1) == []


def times_of(seconds):
    return StepTimes(compute_s=seconds, work={0: 3.0, 1: 4.0}, samples=2.0, squares=25.0, micro_batches=2)


def next_beat(trainer):
    trainer.now = trainer.core.next_deadline()
    trainer.do(io.Tick())
    (beat,) = trainer.said(m.Heartbeat)
    return beat


def test_a_heartbeat_carries_the_work_of_every_step_since_the_last_one():
    trainer = stepping()
    next_beat(trainer)
    for number in (1, 2, 3):
        assert step(trainer, number, times=times_of(number / 100)) == []
    beat = next_beat(trainer)
    assert (beat.step, beat.times.compute_s) == (4, 0.03)
    assert beat.earlier == (
        EarlierStep(2, 0.01, 7.0, 25.0, 2.0, 2),
        EarlierStep(3, 0.02, 7.0, 25.0, 2.0, 2),
    )
    step(trainer, 4, times=times_of(0.04))
    assert next_beat(trainer).earlier == (), "each step is sent once"


def test_a_heartbeat_carries_a_bounded_number_of_steps():
    trainer = stepping()
    next_beat(trainer)
    for number in range(1, MOST_EARLIER + 5):
        assert step(trainer, number, times=times_of(0.01)) == []
    assert [x.step for x in next_beat(trainer).earlier] == list(range(5, MOST_EARLIER + 5))


def test_steps_with_announced_other_work_are_not_sent_later():
    trainer = stepping()
    next_beat(trainer)
    trainer.core.session.busy = "evaluation"
    for number in (1, 2):
        step(trainer, number, times=times_of(0.01))
    assert next_beat(trainer).earlier == ()
