"""A member sends heartbeats for steps at most every quarter of a second, and at once if the leader needs the
step.
"""

from protocol.test_member import FIRST, contribution, running, vote

from fabric.protocol.member.rounds import STEP_BEAT_S
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m


def step(trainer, number, digest=""):
    """Commit step ``number``; return the steps in the heartbeats of that moment."""
    trainer.do(io.Computed(number, (0, 1), 2.0))
    trainer.peer("b", contribution(FIRST, number, (2, 3)))
    trainer.do(io.Exchanged(1, number, "g"))
    trainer.peer("b", vote(FIRST, number, gradient="g", state=trainer.core.view.digest))
    assert trainer.core.view.step == number + 1
    trainer.do(io.Ready(number + 1, digest))
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
    assert trainer.said(m.SnapshotMissed) == [m.SnapshotMissed(FIRST.fence, "c", 1)]
    assert [beat.step for beat in trainer.said(m.Heartbeat)] == [2]
    assert step(trainer, 2) == [3]


def test_a_new_epoch_is_confirmed_at_once():
    trainer = running()
    assert step(trainer, 0) == [1]
    assert step(trainer, 1) == []
