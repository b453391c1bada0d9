"""A member whose round does not end: when it aborts, and which awaited members it names."""

from protocol.makers import record_of
from protocol.test_member import FIRST, Trainer, contribution, outside, running

from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m


def everybody_in() -> Trainer:
    """Let a and b enter the exchange of step 0."""
    trainer = running()
    trainer.do(io.Computed(0, (0, 1), 2.0))
    trainer.peer("b", contribution(FIRST, 0, (2, 3)))
    return trainer


def later(trainer: Trainer, seconds: float) -> None:
    trainer.now += seconds
    trainer.do(io.Tick())


def test_a_round_is_given_up_when_its_bound_is_over():
    trainer = everybody_in()
    trainer.do(io.RingWaitsFor("b"))
    later(trainer, 59.0)
    assert not trainer.said(m.Aborted)
    later(trainer, 2.0)
    (aborted,) = trainer.said(m.Aborted)
    assert (aborted.about, aborted.waiting_for, aborted.stalled) == ("b", ("b",), True)


def test_a_member_that_hears_of_an_abort_names_the_member_that_it_waited_for():
    """Another member's bound ended first; without its own names this member would look idle."""
    trainer = everybody_in()
    trainer.do(io.ExchangeFailed(1, 0, "", "round 0 stalled", waited_for="b"))
    (aborted,) = trainer.said(m.Aborted)
    assert (aborted.waiting_for, aborted.stalled) == (("b",), False)
    assert trainer.core.rounds.ring_waits_for == "", "the next round has not begun to wait"


def newcomer() -> Trainer:
    """Return the joining member c in its first round, one step behind."""
    trainer = outside()
    joined = record_of("a b c", epoch=2, forced=1, c={"joining": True})
    trainer.leader(m.Epoch(joined))
    trainer.do(io.Linked(2))
    trainer.peer("a", contribution(joined, 6, (0, 1)))
    trainer.peer("b", contribution(joined, 6, (2, 3)))
    return trainer


def test_a_newcomers_first_exchange_has_the_whole_bound():
    trainer = newcomer()
    later(trainer, 59.0)
    assert not trainer.said(m.Aborted)
    later(trainer, 2.0)
    assert trainer.said(m.Aborted)


def test_a_newcomers_updates_have_the_time_of_user_code_on_top():
    trainer = newcomer()
    trainer.do(io.Exchanged(2, 6, "g6"))
    later(trainer, 60.0 + 1790.0)
    assert not trainer.said(m.Aborted)
    later(trainer, 20.0)
    assert trainer.said(m.Aborted)
