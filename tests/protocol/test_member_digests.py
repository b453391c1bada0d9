"""A member takes the digest of its state while user code goes on, and asks for it when it is needed."""

from protocol.makers import record_of
from protocol.test_member import FIRST, Trainer, assign, contribution, resume_of, vote
from protocol.test_rank_orders import computing as ranks_computing

from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages import rank_messages as ro


def at_step_1(later=True, shares=None):
    """Return a member at step 1 whose state's digest is still being taken."""
    trainer = Trainer("a")
    trainer.leader(m.Epoch(FIRST), resume_of(FIRST, 0, **assign(range(4), FIRST.roster)))
    trainer.do(io.Linked(1), io.Computed(0, (0, 1), 2.0))
    trainer.peer("b", contribution(FIRST, 0, (2, 3)))
    trainer.do(io.Exchanged(1, 0, "g0"))
    trainer.peer("b", vote(FIRST, 0))
    assert trainer.found(io.Apply)
    trainer.do(io.Ready(1, later=later))
    return trainer


def test_the_state_digest_is_requested_once_and_before_the_contribution():
    trainer = at_step_1()
    assert trainer.found(io.Compute) and not trainer.found(io.TellDigest), "nobody needs it yet"
    trainer.do(io.Computed(1, (0, 1), 2.0))
    assert trainer.found(io.TellDigest) == [io.TellDigest(1)]
    assert not trainer.told_peers(m.Contribution), "others count a round's time from the last contribution"
    trainer.peer("b", contribution(FIRST, 1, (2, 3)))
    assert not trainer.found(io.TellDigest) and not trainer.told_peers(m.Contribution)
    trainer.do(io.Digested(1, "d1"))
    assert [c.micro_batches for c in trainer.told_peers(m.Contribution)] == [(0, 1)]
    trainer.do(io.Exchanged(1, 1, "g1"))
    assert [b.state_digest for b in trainer.told_peers(m.CommitVote)] == ["d1"]


def test_another_digest_than_the_others_aborts_the_round():
    trainer = at_step_1()
    trainer.do(io.Computed(1, (0, 1), 2.0), io.Digested(1, "flipped"))
    trainer.peer("b", contribution(FIRST, 1, (2, 3)))
    trainer.do(io.Exchanged(1, 1, "g1"))
    trainer.peer("b", vote(FIRST, 1, gradient="g1", state="d1"))
    assert not trainer.found(io.Apply)
    (aborted,) = trainer.said(m.Aborted)
    assert aborted.why.startswith("digests of the state at step 1 differ")


def test_a_report_says_whether_the_state_has_agreed_with_a_member_since_admission():
    """A member alone in a roster, or with members without digests, agrees with no member."""
    trainer = at_step_1()
    trainer.leader(m.Epoch(record_of("a b", epoch=2, a={"since": 1})))
    (report,) = trainer.said(m.Report)
    assert not report.unconfirmed, "the votes of step 0 named the digest of the initial state"
    trainer = at_step_1()
    trainer.leader(m.Epoch(record_of("a b", epoch=2, a={"since": 2})))
    assert trainer.said(m.Report)[0].unconfirmed, "it was let in again since"
    trainer = Trainer("a")
    alone = record_of("a", epoch=1, a={"since": 1})
    trainer.leader(m.Epoch(alone), resume_of(alone, 0, a=range(4)))
    trainer.do(io.Linked(1), io.Computed(0, (0, 1, 2, 3), 4.0), io.Exchanged(1, 0, "g0"), io.Ready(1, "d1"))
    trainer.leader(m.Epoch(record_of("a b", epoch=2, a={"since": 1})))
    assert trainer.said(m.Report)[0].unconfirmed


def test_the_leader_gets_the_state_digest_at_once():
    trainer = at_step_1()
    trainer.do(io.Computed(1, (0, 1), 2.0), io.Digested(1, "d1"))
    assert [beat.digest for beat in trainer.said(m.Heartbeat)] == ["d1"]


def test_a_member_without_micro_batches_computes_the_state_digest_too():
    record = record_of("a b", epoch=2)
    trainer = at_step_1()
    trainer.leader(m.Epoch(record))
    # this member keeps micro-batches 0 and 1, and others compute the rest
    trainer.do(io.Computed(1, (0, 1), 2.0))
    trainer.leader(resume_of(record, 1, b=(2, 3)))
    trainer.do(io.Linked(2))
    assert not trainer.found(io.Compute) and trainer.found(io.TellDigest) == [io.TellDigest(1)]


def test_a_digest_of_a_state_that_is_gone_does_not_count():
    trainer = at_step_1()
    trainer.do(io.Digested(0, "d0"))
    assert trainer.core.memory.state.digest == "" and trainer.core.memory.state.later


def test_all_ranks_compute_a_digest_and_the_replica_sends_their_combination():
    replica, _ = ranks_computing()
    replica.core.member.memory.state.later = True
    replica.both(io.Linked(1))
    replica.both(io.Computed(0, (0, 1), 2.0))
    assert replica.orders(io.TellDigest) == [io.TellDigest(0)] * 2
    replica.rank(1, io.Digested(0, "one"))
    assert not replica.said(m.Contribution)
    replica.rank(0, io.Digested(0, "zero"))
    assert replica.said(m.Contribution)
    assert replica.core.member.memory.state.digest == ro.replica_digest(["zero", "one"])


def test_a_late_digest_of_one_rank_delays_the_replicas_digest():
    replica, _ = ranks_computing()
    replica.both(io.Computed(0, (0, 1), 2.0))
    replica.rank(0, io.Ready(0, "zero"))
    replica.rank(1, io.Ready(0, later=True))
    assert (replica.core.member.memory.state.digest, replica.core.member.memory.state.later) == ("", True)
