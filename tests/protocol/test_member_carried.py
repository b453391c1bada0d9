"""Contributions that the ring carries, one move at a time."""

from protocol.makers import record_of
from protocol.test_member import Trainer, assign, contribution, resume_of, vote

from fabric.protocol.member.rounds import LATE_S
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m

FIRST = record_of("a b", epoch=1)
MINE, THEIRS = (0, 1), (2, 3)


def carried(step: int, *names: str) -> io.Exchanged:
    both = {"a": contribution(FIRST, step, MINE), "b": contribution(FIRST, step, THEIRS)}
    return io.Exchanged(1, step, f"g{step}", carried=tuple((name, both[name]) for name in names))


def second_round(*names: str, vote_of_b: bool = True) -> Trainer:
    """Return member a in step 1, before its gradient is made; the ring carried ``names`` in step 0."""
    trainer = Trainer("a")
    trainer.leader(m.Epoch(FIRST), resume_of(FIRST, 0, **assign(range(4), FIRST.roster)))
    trainer.do(io.Linked(1), io.Computed(0, MINE, 2.0))
    assert [x.message.micro_batches for x in trainer.found(io.Carry)] == [MINE]
    assert trainer.told_peers(m.Contribution), "in an epoch's first round the links have it too"
    trainer.peer("b", contribution(FIRST, 0, THEIRS))
    trainer.do(carried(0, *names))
    (said,) = trainer.told_peers(m.CommitVote)
    assert said.carried == (names == ("a", "b"))
    trainer.peer("b", m.CommitVote(FIRST.fence, 0, 1, "g0", "start", carried=vote_of_b))
    trainer.do(io.Ready(1, "d1"))
    return trainer


def test_the_ring_alone_carries_contributions_once_it_has_carried_all():
    trainer = second_round("a", "b")
    trainer.do(io.Computed(1, MINE, 2.0))
    assert trainer.found(io.Carry) and not trainer.told_peers(m.Contribution)
    trainer.do(carried(1, "a", "b"))
    (said,) = trainer.told_peers(m.CommitVote)
    assert said.carried and not trainer.told_peers(m.Contribution)
    trainer.peer("b", vote(FIRST, 1, gradient="g1", state="d1"))
    (apply,) = trainer.found(io.Apply)
    assert (apply.step, apply.prepared.weight) == (1, 4.0)


def test_links_have_the_contributions_where_the_ring_has_not_carried_all():
    for trainer in (
        second_round("a"),
        second_round("b"),
        second_round(),
        second_round("a", "b", vote_of_b=False),
    ):
        trainer.do(io.Computed(1, MINE, 2.0))
        assert trainer.told_peers(m.Contribution)


def test_a_late_contribution_goes_over_the_links_too_and_once():
    trainer = second_round("a", "b")
    trainer.do(io.Computed(1, MINE, 2.0))
    assert trainer.core.next_deadline() <= trainer.now + LATE_S
    trainer.now += LATE_S
    trainer.do(io.Tick())
    assert [x.micro_batches for x in trainer.told_peers(m.Contribution)] == [MINE]
    trainer.do(carried(1, "a", "b"))
    assert trainer.told_peers(m.CommitVote) and not trainer.told_peers(m.Contribution)


def test_a_contribution_that_the_ring_left_behind_goes_over_the_links_at_once():
    trainer = second_round("a", "b")
    trainer.do(io.Computed(1, MINE, 2.0), carried(1, "b"))
    assert trainer.told_peers(m.Contribution) and not trainer.told_peers(m.CommitVote)[0].carried
    trainer = second_round("a", "b")
    trainer.do(io.Streaming(1, 2.0), carried(1, "b"))
    assert not trainer.told_peers(m.Contribution)
    trainer.do(io.Computed(1, MINE, 2.0))
    assert trainer.told_peers(m.Contribution), "the exchange ended before"


def test_no_member_is_missing_while_the_ring_carries():
    trainer = second_round("a", "b")
    trainer.do(io.Computed(1, MINE, 2.0), io.RingWaitsFor("b"))
    assert trainer.core.rounds.missing() == ()
    trainer.do(io.ExchangeFailed(1, 1, "", "stalled", waited_for="b"))
    assert trainer.said(m.Aborted)[0].waiting_for == ("b",)
    trainer = second_round("a", "b")
    trainer.do(io.Computed(1, MINE, 2.0))
    trainer.now += LATE_S
    trainer.do(io.Tick())
    assert trainer.core.rounds.missing() == ("b",)


def test_both_ways_at_once_count_once_and_another_round_does_not_count():
    trainer = second_round("a", "b")
    trainer.do(io.Computed(1, MINE, 2.0))
    trainer.peer("b", contribution(FIRST, 1, THEIRS))
    other = contribution(FIRST, 1, (2, 3, 4))
    trainer.do(io.Exchanged(1, 1, "g1", carried=(("b", other),)))
    assert trainer.core.rounds.prepared.contributions == (("a", MINE), ("b", THEIRS))
    trainer = second_round("a", "b")
    trainer.do(io.Computed(1, MINE, 2.0))
    trainer.do(io.Exchanged(1, 1, "g1", carried=(("b", contribution(FIRST, 0, THEIRS)),)))
    assert trainer.core.rounds.prepared is None


def test_a_carried_contribution_of_another_layout_aborts_the_round():
    trainer = second_round("a", "b")
    trainer.do(io.Computed(1, MINE, 2.0))
    wrong = m.Contribution(FIRST.fence, 1, 2.0, THEIRS, layout="other")
    trainer.do(io.Exchanged(1, 1, "g1", carried=(("b", wrong),)))
    (aborted,) = trainer.said(m.Aborted)
    assert aborted.mismatch and aborted.about == "b" and not trainer.told_peers(m.CommitVote)
