"""A member with notice: when it saves the state without a leader, and when it takes further steps."""

from msgspec.structs import replace
from protocol.makers import record_of
from protocol.test_member import Trainer, contribution, resume_of, vote

from fabric.protocol.member.serving import AGAIN_S, ALONE_S
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m

STORING = {"a": {"stores": True}, "b": {"stores": True}}
FIRST = record_of("a b", epoch=1, **STORING)


def told():
    """Return a member with notice, in step 0, whose leader answered a heartbeat after the notice."""
    trainer = Trainer("a")
    trainer.leader(m.Epoch(FIRST), resume_of(FIRST, 0, a=(0, 1), b=(2, 3)))
    trainer.do(io.Linked(1), io.Computed(0, (0, 1), 2.0))
    trainer.do(io.Noticed())
    trainer.now += 1.0
    trainer.do(io.Tick())
    (beat,) = trainer.said(m.Heartbeat)
    assert beat.noticed
    trainer.leader(m.HeartbeatAck(beat.number))
    return trainer


def alone():
    """Return such a member after it has lost the leader and the other member, when it saves the state."""
    trainer = told()
    trainer.do(io.LeaderLost(), io.LinkLost("b", 1, "it ended"))
    trainer.now = trainer.core.next_deadline()
    trainer.do(io.Tick())
    assert trainer.found(io.TakeSnapshot) == [io.TakeSnapshot(0, durable=True)]
    return trainer


def test_a_member_that_waits_saves_the_state_when_a_leader_that_answered_is_gone():
    """Found in review: no tick came after the answer, so the member never decided, and nothing was saved."""
    answered_at = told().now
    assert alone().now == answered_at + ALONE_S


def test_a_member_without_a_leader_tries_again_to_save_the_state():
    trainer = alone()
    trainer.do(io.Saved(0, "the disk is full"))
    assert trainer.core.next_deadline() == trainer.now + AGAIN_S
    trainer.now += AGAIN_S
    trainer.do(io.Tick())
    assert trainer.found(io.TakeSnapshot) == [io.TakeSnapshot(0, durable=True)]


def test_a_member_that_saves_a_later_state_does_not_say_that_it_is_saved():
    trainer = alone()
    trainer.do(io.Saved(0))
    assert trainer.core.serving.saved
    trainer.core.memory.state = replace(trainer.core.memory.state, step=1)
    trainer.core.serving.save()
    assert not trainer.core.serving.saved


def test_a_member_that_saves_alone_says_so_and_takes_further_steps_when_another_stays():
    """Found in review: the others waited for its part in the next step until its host was killed."""
    trainer = told()
    trainer.peer("b", contribution(FIRST, 0, (2, 3)))
    trainer.do(io.Exchanged(1, 0, "g0"))
    trainer.peer("b", vote(FIRST, 0))
    trainer.do(io.LeaderLost())
    trainer.now = trainer.core.next_deadline()
    trainer.do(io.Ready(1, "d1"))
    assert trainer.found(io.TakeSnapshot) == [io.TakeSnapshot(1, durable=True)]
    trainer.do(io.Saved(1))
    trainer.do(io.LeaderConnected())
    (beat,) = trainer.said(m.Heartbeat)
    assert (beat.step, beat.saves, beat.saved) == (1, True, True)
    trainer.leader(m.Epoch(FIRST), m.HeartbeatAck(beat.number))
    assert not trainer.found(io.Compute), "perhaps every member has notice"
    takes_the_order_back(trainer, beat.number, 1)


def takes_the_order_back(trainer, number, step):
    trainer.leader(m.HeartbeatAck(number, goes_on=True))
    assert trainer.found(io.Compute) == [io.Compute(step, (0, 1))]
    (beat,) = trainer.said(m.Heartbeat)
    assert not beat.saves and not beat.saved, "the next step is not saved"
    assert not beat.busy, "the others wait no hour for it"


def test_a_member_that_was_told_to_save_says_so_at_once_and_takes_further_steps_when_another_stays():
    """Seed 91046 of notice worlds: a later member without notice waited for the saver's part."""
    trainer = told()
    trainer.leader(m.HeartbeatAck(100, save=True))
    (beat,) = trainer.said(m.Heartbeat)
    assert beat.saves and not beat.saved, "it is still in its round"
    trainer.peer("b", contribution(FIRST, 0, (2, 3)))
    trainer.do(io.Exchanged(1, 0, "g0"))
    trainer.peer("b", vote(FIRST, 0))
    trainer.do(io.Ready(1, "d1"))
    assert trainer.found(io.TakeSnapshot) == [io.TakeSnapshot(1, durable=True)]
    takes_the_order_back(trainer, 101, 1)
