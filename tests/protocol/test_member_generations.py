"""A member at a cold start: fetches and loads of the last generation, and late messages."""

from protocol.makers import record_of
from protocol.test_member import Trainer, holding, resume_of

from fabric.model import Base, SnapshotRef
from fabric.protocol.member.state import Mode
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m


def outside_fetching(name="d"):
    """Return a newcomer of generation 1 that fetches the state (generation 1, step 50)."""
    trainer = Trainer(name)
    first = record_of("a b", epoch=1)
    trainer.leader(m.Epoch(first))
    assert trainer.said(m.RequestState)
    trainer.leader(m.StateSources(first.fence, SnapshotRef(1, 50, "s50"), ("http://a",)))
    assert trainer.found(io.FetchState)
    return trainer


def second(names):
    """Begin generation 2 from step 40, after the death of all members."""
    return record_of(names, epoch=2, generation=2, cold=2, base=Base(1, 40, "s40", ("http://a",)))


def test_a_state_fetched_in_a_generation_that_is_over_is_not_the_new_ones_while_outside():
    trainer = outside_fetching()
    trainer.leader(m.Epoch(second("a b")))
    trainer.do(io.StateFetched(50, "s50"))
    assert not trainer.found(io.Install)
    assert trainer.core.memory.state.generation != 2
    assert trainer.said(m.RequestState), "it asks in the new generation"


def test_a_state_loaded_in_a_generation_that_is_over_is_not_the_new_ones_while_outside():
    trainer = outside_fetching()
    trainer.do(io.StateFetched(50, "s50"))
    trainer.leader(m.Epoch(second("a b")))
    trainer.do(io.Installed(50, "s50"))
    assert trainer.core.memory.state.generation != 2 and trainer.said(m.RequestState)


def test_a_fetch_under_way_is_void_when_the_base_is_the_state_in_memory():
    trainer = Trainer("d")
    trainer.core.memory.state.step, trainer.core.memory.state.digest = 40, "s40"
    first = record_of("a b", epoch=1)
    trainer.leader(m.Epoch(first))
    trainer.leader(m.StateSources(first.fence, SnapshotRef(1, 50, "s50"), ("http://a",)))
    assert trainer.found(io.FetchState)
    cold = second("a b d")
    trainer.leader(m.Epoch(cold), resume_of(cold, 40, a=(0, 1), b=(2,), d=(3,)))
    assert trainer.core.epochs.mode is Mode.RUN and trainer.core.memory.state.generation == 2
    trainer.do(io.StateFetched(50, "s50"))
    trainer.do(io.Linked(2), io.Computed(40, (3,), 1.0))
    # A round is lost. The other members hold the round, so this member must replay it.
    third = record_of("a b d", epoch=3, generation=2, cold=2, base=cold.base)
    trainer.leader(m.Epoch(third))
    trainer.leader(m.Resume(third.fence, 41, (), "g40"))
    assert not trainer.found(io.Install), "the state of step 50 of generation 1 is loaded"


def test_a_member_that_loaded_the_end_of_an_old_generation_starts_again():
    """The member's main thread has left the loop, so the others would wait for it without end."""
    trainer = outside_fetching()
    trainer.do(io.StateFetched(50, "s50"))
    assert trainer.found(io.Install)
    cold = second("a b d")
    trainer.leader(m.Epoch(cold), resume_of(cold, 40, a=(0, 1), b=(2,), d=(3,)))
    trainer.do(io.Installed(50, "s50", last=True))
    assert [stop.code for stop in trainer.found(io.Stop)] == [75]
    assert not trainer.said(m.Finished)


def test_a_member_that_loads_the_end_of_its_own_generation_has_finished():
    trainer = outside_fetching()
    trainer.do(io.StateFetched(50, "s50"))
    trainer.do(io.Installed(50, "s50", last=True))
    assert trainer.said(m.Finished)


def test_sources_of_a_generation_that_is_over_are_not_heeded():
    trainer = outside_fetching()
    first = trainer.core.epochs.newest.fence
    trainer.do(io.FetchFailed("nobody has it"))
    trainer.leader(m.Epoch(second("a b")))
    assert trainer.said(m.RequestState)
    trainer.leader(m.StateSources(first, SnapshotRef(1, 50, "s50"), ("http://a",)))
    assert not trainer.found(io.FetchState)
    trainer.leader(m.StateSources(second("a b").fence, SnapshotRef(2, 41, "s41"), ("http://a",)))
    assert trainer.found(io.FetchState)


def late_decision():
    """Feed a decision that lay unread for longer than the autonomy, as in a stopped process."""
    trainer = holding()
    trainer.do(io.LinkLost("b", 1, "it died"))
    record = record_of("a", epoch=2)
    trainer.leader(m.Epoch(record))
    assert trainer.said(m.Report)[0].prepared
    trainer.now += trainer.core.context.config.autonomy_s + 61.0
    trainer.leader(m.Resume(record.fence, 1, (m.Assignment("a", (0, 1, 2, 3)),), "g0"))
    return trainer


def test_a_decision_that_is_heard_after_the_autonomy_commits_nothing():
    trainer = late_decision()
    assert not trainer.found(io.Apply) and not trainer.found(io.Publish)
    assert trainer.said(m.Heartbeat), "an answer tells whether it still holds"


def test_a_member_past_its_autonomy_commits_once_a_lighthouse_has_answered():
    trainer = late_decision()
    (beat,) = trainer.said(m.Heartbeat)
    trainer.leader(m.HeartbeatAck(beat.number))
    assert trainer.found(io.Apply)


def test_an_answer_to_an_old_heartbeat_does_not_let_a_member_commit():
    trainer = late_decision()
    trainer.leader(m.HeartbeatAck(0))
    assert not trainer.found(io.Apply)
