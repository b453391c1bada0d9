"""Bytes that go ahead of their contribution, and gradients that are not retained, one move at a time."""

import pytest
from protocol.test_member import FIRST, Trainer, assign, contribution, resume_of, vote

from fabric.protocol.member.state import Mode
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m


def running(**config):
    trainer = Trainer("a", **config)
    trainer.leader(m.Epoch(FIRST), resume_of(FIRST, 0, **assign(range(4), FIRST.roster)))
    trainer.do(io.Linked(1))
    return trainer


def test_the_exchange_begins_with_the_last_backward_and_only_once():
    trainer = running()
    trainer.do(io.Streaming(0, 2.0))
    assert trainer.found(io.StartExchange) == [io.StartExchange(FIRST.fence, 0, 2.0, streaming=True)]
    assert not trainer.found(io.SendPeer), "what is still computed is not contributed"
    trainer.do(io.Computed(0, (0, 1), 2.0))
    assert not trainer.found(io.StartExchange)
    assert [c.micro_batches for c in trainer.told_peers(m.Contribution)] == [(0, 1)]


def test_no_round_is_prepared_before_the_own_contribution():
    trainer = running()
    trainer.do(io.Streaming(0, 2.0))
    trainer.peer("b", contribution(FIRST, 0, (2, 3)))
    trainer.do(io.Exchanged(1, 0, "g0"))
    assert not trainer.told_peers(m.CommitVote) and trainer.core.rounds.prepared is None
    trainer.do(io.Computed(0, (0, 1), 2.0))
    assert [b.gradient_digest for b in trainer.told_peers(m.CommitVote)] == ["g0"]


def test_streaming_without_links_waits_for_them():
    trainer = Trainer("a")
    trainer.leader(m.Epoch(FIRST), resume_of(FIRST, 0, **assign(range(4), FIRST.roster)))
    trainer.do(io.Streaming(0, 2.0))
    assert not trainer.found(io.StartExchange)
    trainer.do(io.Linked(1))
    assert [e.streaming for e in trainer.found(io.StartExchange)] == [True]


@pytest.mark.parametrize("step", [-1, 1])
def test_streaming_of_another_step_starts_nothing(step):
    trainer = running()
    assert not trainer.do(io.Streaming(step, 2.0))


def test_a_gradient_that_changed_on_its_way_aborts_the_round():
    trainer = running()
    trainer.do(io.Streaming(0, 2.0))
    trainer.do(io.Computed(0, (0, 1), 2.0, redo="it was changed"))
    assert trainer.core.epochs.mode is Mode.ABORTED
    assert [e.epoch for e in trainer.found(io.AbortExchange)] == [1]
    assert not trainer.told_peers(m.Contribution)
    assert trainer.core.memory.kept_gradient.have == {0, 1}, "the gradient as it is now is kept"


def test_a_gradient_that_did_not_go_out_may_change():
    trainer = running()
    trainer.do(io.Computed(0, (0, 1), 2.0, redo="it was changed"))
    assert trainer.core.epochs.mode is Mode.RUN and trainer.told_peers(m.Contribution)


@pytest.mark.parametrize(("retain", "have"), [(True, {0, 1}), (False, set())])
def test_a_gradient_that_is_not_retained_is_dropped_with_the_round(retain, have):
    trainer = running(retain=retain)
    trainer.do(io.Computed(0, (0, 1), 2.0))
    trainer.do(io.LinkLost("b", 1, "reset"))
    assert trainer.core.epochs.mode is Mode.ABORTED
    assert trainer.core.memory.kept_gradient.have == have
    assert bool(trainer.found(io.DropGradient)) is not retain


def test_a_prepared_round_outlives_the_gradient_it_was_made_from():
    trainer = running(retain=False)
    trainer.do(io.Computed(0, (0, 1), 2.0))
    trainer.peer("b", contribution(FIRST, 0, (2, 3)))
    trainer.do(io.Exchanged(1, 0, "g0"))
    trainer.do(io.LinkLost("b", 1, "reset"))
    assert trainer.core.rounds.prepared is not None and trainer.core.memory.kept_gradient.have == set()
    assert trainer.peer("b", vote(FIRST, 0)) == []


def test_an_unexchanged_gradient_is_kept_after_an_abort_without_retain():
    trainer = running(retain=False)
    trainer.do(io.LinkLost("b", 1, "reset"))
    assert trainer.core.memory.kept_gradient.have == {0, 1} and not trainer.core.memory.kept_gradient.stale
