"""The member core, one move at a time. Some tests replay a bug that the simulator found."""

import pytest
from protocol.makers import record_of, session_of

from fabric.errors import IllegalTransition
from fabric.model import Base, SnapshotRef
from fabric.protocol.member.core import MemberCore
from fabric.protocol.member.state import TRANSITIONS, MemberConfig, Mode
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.assignment import assign

M = 4


class Trainer:
    """Drives one member core: ``do`` feeds events and keeps the effects of the last event."""

    def __init__(self, name="a", storage_unread=False, **config):
        self.name = name
        self.now = 100.0
        settings = MemberConfig(storage_failed=storage_unread, **config)
        self.core = MemberCore(session_of(name), settings, self.now)
        self.effects = []
        self.do(io.LeaderConnected(), io.Ready(0, "start"))

    def do(self, *events):
        for event in events:
            self.effects = self.core.handle(event, self.now)
        return self.effects

    def leader(self, *messages):
        return self.do(*(io.FromLeader(message) for message in messages))

    def peer(self, name, message):
        return self.do(io.FromPeer(name, 1, message))

    def found(self, kind):
        return [e for e in self.effects if isinstance(e, kind)]

    def said(self, kind):
        return [e.message for e in self.found(io.SendLeader) if isinstance(e.message, kind)]

    def told_peers(self, kind):
        return [e.message for e in self.found(io.SendPeer) if isinstance(e.message, kind)]


def resume_of(record, step, commit="", drop=(), **shares):
    table = tuple(m.Assignment(n, tuple(shares.get(n, ())), n in drop) for n in record.names)
    return m.Resume(record.fence, step, table, commit)


FIRST = record_of("a b", epoch=1)


def running(name="a", linked=True):
    """Return a member in step 0 of the first epoch that computes its half."""
    trainer = Trainer(name)
    shares = assign(range(M), FIRST.roster)
    trainer.leader(m.Epoch(FIRST), resume_of(FIRST, 0, **shares))
    if linked:
        trainer.do(io.Linked(1))
    return trainer


def contribution(record, step, ids):
    return m.Contribution(record.fence, step, float(len(ids)), tuple(ids))


def holding():
    """Return a member that has prepared step 0 and waits for the votes."""
    trainer = running()
    trainer.do(io.Computed(0, (0, 1), 2.0))
    trainer.peer("b", contribution(FIRST, 0, (2, 3)))
    trainer.do(io.Exchanged(1, 0, "g0"))
    return trainer


def vote(record, step, ready=None, gradient="g0", state="start"):
    return m.CommitVote(record.fence, step, ready or record.epoch, gradient, state)


# --- a step ----------------------------------------------------------------------------------------------


def test_a_step_from_the_share_to_the_update():
    trainer = running()
    assert trainer.core.epochs.mode is Mode.RUN
    trainer.do(io.Computed(0, (0, 1), 2.0, (("loss", 3.0),)))
    assert trainer.found(io.StartExchange) == [io.StartExchange(FIRST.fence, 0, 2.0)]
    assert [c.micro_batches for c in trainer.told_peers(m.Contribution)] == [(0, 1)]
    trainer.peer("b", contribution(FIRST, 0, (2, 3)))
    trainer.do(io.Exchanged(1, 0, "g0"))
    assert [b.gradient_digest for b in trainer.told_peers(m.CommitVote)] == ["g0"]
    assert not trainer.found(io.Apply), "nothing is committed before everybody holds"
    assert not trainer.found(io.Publish)
    trainer.peer("b", vote(FIRST, 0))
    (apply,) = trainer.found(io.Apply)
    assert (apply.step, apply.contributed, apply.prepared.weight) == (0, True, 4.0)
    assert trainer.found(io.Publish), "published when committed"
    assert trainer.core.memory.state.step == 1
    trainer.do(io.Ready(1, "d1"))
    assert trainer.found(io.Compute) == [io.Compute(1, (0, 1))]


def test_no_message_goes_to_a_member_without_a_link():
    """A contribution sent before the links are up would be lost, and its round would never end."""
    trainer = running(linked=False)
    trainer.do(io.Computed(0, (0, 1), 2.0))
    assert not trainer.told_peers(m.Contribution)
    trainer.do(io.Linked(1))
    assert trainer.told_peers(m.Contribution) and trainer.found(io.StartExchange)


def test_digests_that_differ_abort():
    trainer = holding()
    trainer.peer("b", vote(FIRST, 0, gradient="other"))
    assert trainer.core.epochs.mode is Mode.ABORTED and not trainer.found(io.Apply)
    assert "differ" in trainer.said(m.Aborted)[0].why


def test_a_member_that_heard_of_another_result_reports_a_dispute():
    """Found in simulation: the others died, and a member committed the result that they had outvoted."""
    trainer = holding()
    trainer.peer("b", vote(FIRST, 0, gradient="other"))
    trainer.leader(m.Epoch(record_of("a", epoch=2)))
    (report,) = trainer.said(m.Report)
    assert (report.prepared, report.gradient_digest, report.disputed) == (True, "g0", True)


@pytest.mark.parametrize(
    ("states", "is_outvoted"), [("xx", True), ("x", False), ("xy", False), (("start", "x"), False)]
)
def test_an_outvoted_member_says_so_in_every_report_until_it_has_another_state(states, is_outvoted):
    """Found in simulation: both others died, and the member went on with the state that they had called
    wrong.
    """
    three = record_of("a b c", epoch=1)
    trainer = Trainer("a")
    trainer.leader(m.Epoch(three), resume_of(three, 0, **assign(range(M), three.roster)))
    trainer.do(io.Linked(1), io.Computed(0, (0, 1), 2.0), io.Exchanged(1, 0, "g0"))
    for name, ids in (("b", (2,)), ("c", (3,))):
        trainer.peer(name, contribution(three, 0, ids))
    for name, state in zip("bc", states, strict=False):
        trainer.peer(name, vote(three, 0, state=state))
    trainer.do(io.LinkLost("b", 1, "killed"))
    for epoch in (2, 3):
        trainer.leader(m.Epoch(record_of("a", epoch=epoch)))
        assert trainer.said(m.Report)[0].outvoted is is_outvoted
    trainer.leader(m.Epoch(record_of("d", epoch=4)))
    assert trainer.core.epochs.mode is Mode.OUTSIDE
    assert (trainer.core.memory.state.generation == 0) is (is_outvoted or len(states) == 2)


def test_a_round_that_ended_without_another_result_is_not_disputed():
    trainer = holding()
    trainer.do(io.LinkLost("b", 1, "reset"))
    trainer.leader(m.Epoch(record_of("a", epoch=2)))
    (report,) = trainer.said(m.Report)
    assert (report.prepared, report.disputed) == (True, False)


def test_messages_that_come_early_are_kept_for_their_round():
    trainer = running()
    trainer.peer("b", contribution(FIRST, 0, (2, 3)))
    trainer.peer("b", vote(FIRST, 0))
    trainer.do(io.Computed(0, (0, 1), 2.0), io.Exchanged(1, 0, "g0"))
    assert trainer.found(io.Apply)
    trainer.peer("b", contribution(FIRST, 1, (2, 3)))
    trainer.do(io.Ready(1, "d1"), io.Computed(1, (0, 1), 2.0))
    trainer.do(io.Exchanged(1, 1, "g1"))
    trainer.peer("b", vote(FIRST, 1, gradient="g1", state="d1"))
    assert trainer.found(io.Apply), "the early contribution counted"


def test_the_messages_that_peers_can_make_a_member_keep_are_bounded():
    trainer = running()
    for epoch in range(2, 200):
        trainer.peer("b", contribution(record_of("a b", epoch=epoch), epoch, (2, 3)))
    assert len(trainer.core.epochs.links.early) <= 8


def test_a_process_that_the_roster_does_not_list_is_not_heard():
    trainer = running()
    trainer.do(io.Computed(0, (0, 1), 2.0))
    trainer.do(io.FromPeer("b", 7, contribution(FIRST, 0, (2, 3))), io.Exchanged(1, 0, "g0"))
    assert not trainer.told_peers(m.CommitVote)


# --- aborts, reports, decisions --------------------------------------------------------------------------

SECOND = record_of("a", epoch=2)


def test_a_lost_link_aborts_once_and_keeps_prepared_round_and_gradient():
    trainer = holding()
    trainer.do(io.LinkLost("b", 1, "reset"))
    assert [x.about for x in trainer.said(m.Aborted)] == ["b"]
    assert trainer.found(io.AbortExchange)
    trainer.do(io.ExchangeFailed(1, 0, "b", "reset"), io.Exchanged(1, 0, "late"))
    assert not trainer.said(m.Aborted)
    trainer.leader(m.Epoch(SECOND))
    (report,) = trainer.said(m.Report)
    assert (report.prepared, report.gradient_digest, report.have) == (True, "g0", (0, 1))
    assert (report.round_epoch, report.round_step, report.round_lacked) == (1, 0, ())


def test_the_report_promises_to_stay_out_and_is_repeated_unchanged():
    trainer = holding()
    trainer.leader(m.Epoch(SECOND))
    (report,) = trainer.said(m.Report)
    trainer.peer("b", vote(FIRST, 0))
    assert not trainer.found(io.Apply), "the barrier of the old epoch is void"
    trainer.do(io.LeaderLost(), io.LeaderConnected())
    trainer.leader(m.Epoch(SECOND))
    assert trainer.said(m.Report) == [report]


def test_resume_past_the_prepared_round_commits_it_only_once():
    trainer = holding()
    trainer.leader(m.Epoch(SECOND), resume_of(SECOND, 1, "g0", a=(0, 1, 2, 3)))
    (apply,) = trainer.found(io.Apply)
    assert apply.prepared.contributions == (("a", (0, 1)), ("b", (2, 3)))
    trainer.leader(resume_of(SECOND, 1, "g0", a=(0, 1, 2, 3)))
    assert not trainer.effects, "a decision is adopted once"
    trainer.do(io.Ready(1, "d1"))
    assert trainer.found(io.Compute) == [io.Compute(1, (0, 1, 2, 3))]


def test_a_prepared_round_with_other_content_is_fetched_instead_of_committed():
    trainer = holding()
    trainer.leader(m.Epoch(SECOND), resume_of(SECOND, 1, "another"))
    assert not trainer.found(io.Apply)
    assert trainer.core.epochs.mode is Mode.CATCH_UP
    assert [f.step for f in trainer.found(io.FetchGradient)] == [0]


def test_a_redone_round_adds_the_missing_micro_batches_to_the_kept_gradient():
    trainer = holding()
    trainer.leader(m.Epoch(SECOND), resume_of(SECOND, 0, a=(2, 3)))
    assert trainer.found(io.Compute) == [io.Compute(0, (2, 3))]
    trainer.do(io.Linked(2), io.Computed(0, (2, 3), 2.0))
    (start,) = trainer.found(io.StartExchange)
    assert start.weight == 4.0
    assert not trainer.found(io.DropGradient)


def test_the_report_promises_micro_batches_under_way():
    trainer = running()
    trainer.leader(m.Epoch(SECOND))
    assert trainer.said(m.Report)[0].have == (0, 1)
    trainer.leader(resume_of(SECOND, 0, a=(2, 3)))
    assert not trainer.found(io.Compute), "the main thread is not asked twice at once"
    trainer.do(io.Linked(2), io.Computed(0, (0, 1), 2.0))
    assert trainer.found(io.Compute) == [io.Compute(0, (2, 3))]
    trainer.do(io.Computed(0, (2, 3), 2.0))
    assert trainer.found(io.StartExchange)[0].weight == 4.0


def test_a_decision_to_drop_forgets_the_gradient_even_while_it_grows():
    trainer = running()
    trainer.leader(m.Epoch(SECOND), resume_of(SECOND, 0, drop="a", a=(2, 3)))
    trainer.do(io.Computed(0, (0, 1), 2.0))
    kinds = [type(e) for e in trainer.effects]
    assert kinds.index(io.DropGradient) < kinds.index(io.Compute)
    assert trainer.found(io.Compute) == [io.Compute(0, (2, 3))]


def test_resuming_before_the_own_state_is_a_bug_and_says_so():
    trainer = holding()
    trainer.peer("b", vote(FIRST, 0))
    trainer.do(io.Ready(1, "d1"))
    with pytest.raises(IllegalTransition, match="told to resume at 0 with the state at 1"):
        trainer.leader(m.Epoch(SECOND), resume_of(SECOND, 0))


@pytest.mark.parametrize(
    ("mode", "to"),
    [(mode, to) for mode in Mode for to in Mode if to not in TRANSITIONS[mode]],
)
def test_mode_changes_that_the_table_does_not_allow_raise(mode, to):
    trainer = Trainer()
    trainer.core.epochs.mode = mode
    with pytest.raises(IllegalTransition, match=f"a cannot go from {mode.value} to {to.value} at step 0"):
        trainer.core.epochs.enter_mode(to)


def test_a_planned_epoch_does_not_disturb_the_round_under_way():
    trainer = holding()
    joined = record_of("a b c", epoch=2, forced=1, c={"joining": True})
    trainer.leader(m.Epoch(joined))
    assert trainer.core.epochs.mode is Mode.RUN and trainer.found(io.LinkUp)
    trainer.peer("b", vote(FIRST, 0))
    assert trainer.core.epochs.current == FIRST, "not everybody was ready for it"


def test_the_members_switch_when_all_are_ready_and_the_newcomer_computes_nothing_yet():
    trainer = running()
    joined = record_of("a b c", epoch=2, forced=1, c={"joining": True})
    trainer.leader(m.Epoch(joined))
    trainer.do(io.Linked(2), io.Computed(0, (0, 1), 2.0))
    trainer.peer("b", contribution(FIRST, 0, (2, 3)))
    trainer.do(io.Exchanged(1, 0, "g0"))
    assert [b.ready for b in trainer.told_peers(m.CommitVote)] == [2]
    trainer.peer("b", vote(FIRST, 0, ready=2))
    assert trainer.core.epochs.current == joined and trainer.found(io.Switch)
    trainer.do(io.Ready(1, "d1"))
    assert trainer.found(io.Compute) == [io.Compute(1, (0, 1))]


def test_a_planned_epoch_after_an_unknown_forced_epoch_aborts_the_round():
    trainer = running()
    trainer.leader(m.Epoch(record_of("a b c", epoch=3, forced=2)))
    assert trainer.core.epochs.mode is Mode.ABORTED and trainer.said(m.Aborted)


# --- links -----------------------------------------------------------------------------------------------


def test_a_link_lost_while_the_next_epoch_is_decided_is_made_again():
    """Found in simulation: the link of the old epoch was made again, but not the new epoch's link."""
    trainer = running()
    forced = record_of("a b", epoch=2)
    trainer.leader(m.Epoch(forced))
    trainer.do(io.Linked(2))
    trainer.do(io.LinkLost("b", 1, "reset"))
    assert [e.record.epoch for e in trainer.found(io.LinkUp)] == [2]
    assert 2 not in trainer.core.epochs.links.up


def test_an_abort_without_a_session_is_sent_when_the_session_is_back():
    """Otherwise the others' waiting time for this member would go on in the redone round."""
    trainer = holding()
    trainer.do(io.LeaderLost(), io.LinkLost("b", 1, "reset"))
    trainer.do(io.LeaderConnected())
    assert [type(e.message) for e in trainer.found(io.SendLeader)][:2] == [m.OpenSession, m.Aborted]
    assert trainer.said(m.Aborted)[0].waiting_for == ("b",)
    trainer.do(io.LeaderLost(), io.LeaderConnected())
    assert not trainer.said(m.Aborted), "once"


def test_links_that_cannot_be_made_are_reported():
    trainer = running(linked=False)
    trainer.do(io.LinkFailed(1, "b", "no link to b"))
    assert trainer.core.epochs.mode is Mode.ABORTED
    assert trainer.said(m.Aborted)[0].about == "b"


def test_a_new_leader_makes_the_member_try_failed_links_again():
    trainer = running()
    trainer.leader(m.Epoch(record_of("a b c", epoch=2, forced=1, c={"joining": True})))
    trainer.do(io.LinkFailed(2, "c", "no link to c"))
    assert trainer.said(m.Aborted)[0].fence.epoch == 2
    trainer.leader(m.Epoch(record_of("a b c", epoch=2, forced=1, c={"joining": True})))
    assert trainer.found(io.LinkUp)


def test_a_new_leader_hears_between_rounds_that_the_member_runs():
    """Found in simulation: between two rounds the member did not answer a new leader, and no replica could
    join.
    """
    trainer = holding()
    trainer.peer("b", vote(FIRST, 0))
    assert trainer.core.rounds.round is None
    trainer.do(io.LeaderLost(), io.LeaderConnected())
    trainer.leader(m.Epoch(FIRST))
    assert trainer.said(m.Running) == [m.Running(FIRST.fence, 0)]


# --- outside: catching up, joining, falling behind -------------------------------------------------------


def outside(step=5, digest="d5"):
    """Return a newcomer that has loaded a snapshot of step 5."""
    trainer = Trainer("c")
    trainer.leader(m.Epoch(FIRST))
    assert trainer.said(m.RequestState)
    trainer.leader(m.StateSources(FIRST.fence, SnapshotRef(1, step, digest), ("http://a",)))
    assert trainer.found(io.FetchState)
    trainer.do(io.StateFetched(step, digest))
    assert trainer.found(io.Install) == [io.Install(step, digest)]
    assert not trainer.said(m.RequestState), "what is being loaded is not asked for again"
    trainer.do(io.Installed(step, digest))
    return trainer


def test_a_newcomer_replays_published_steps():
    trainer = outside()
    (fetch,) = trainer.found(io.FetchGradient)
    assert (fetch.step, fetch.urls) == (5, ("http://a", "http://b"))
    trainer.do(io.GradientFetched(5, "g5"))
    (apply,) = trainer.found(io.Apply)
    assert (apply.step, apply.prepared, apply.contributed) == (5, None, False)
    assert not trainer.found(io.FetchGradient), "the buffer is still read by the main thread"
    trainer.do(io.Ready(6, "d6"))
    assert [f.step for f in trainer.found(io.FetchGradient)] == [6]


def test_a_newcomer_learns_the_step_from_the_first_contribution():
    trainer = outside()
    joined = record_of("a b c", epoch=2, forced=1, c={"joining": True})
    trainer.leader(m.Epoch(joined))
    trainer.do(io.Linked(2))
    assert trainer.core.epochs.mode is Mode.JOINED
    trainer.peer("a", contribution(joined, 6, (0, 1)))
    assert trainer.core.epochs.mode is Mode.RUN
    assert [c.weight for c in trainer.told_peers(m.Contribution)] == [0.0, 0.0]
    assert trainer.said(m.Running) == [m.Running(joined.fence, 6)]
    trainer.do(io.Exchanged(2, 6, "g6"), io.FromPeer("b", 1, contribution(joined, 6, (2, 3))))
    assert not trainer.told_peers(m.CommitVote), "it holds only when its own state is there"
    trainer.do(io.GradientFetched(5, "g5"), io.Ready(6, "d6"))
    assert [b.state_digest for b in trainer.told_peers(m.CommitVote)] == ["d6", "d6"]


def test_an_installed_state_belongs_to_the_generation_it_was_fetched_for():
    trainer = Trainer("c")
    trainer.leader(m.Epoch(FIRST), m.StateSources(FIRST.fence, SnapshotRef(1, 5, "d5"), ("http://a",)))
    trainer.do(io.StateFetched(5, "d5"))
    later = record_of("a b", epoch=4, cold=4, generation=2)
    trainer.leader(m.Epoch(later))
    trainer.do(io.Installed(5, "d5"))
    assert trainer.core.memory.state.generation == 1
    assert trainer.said(m.RequestState), "a step of an older generation counts as nothing"


def test_the_same_state_of_another_generation_need_not_be_fetched():
    trainer = outside()
    later = record_of("a b", epoch=4, cold=4, generation=2)
    trainer.leader(m.Epoch(later))
    assert trainer.said(m.RequestState) and trainer.found(io.CancelFetch)
    trainer.leader(m.StateSources(later.fence, SnapshotRef(2, 5, "d5"), ("http://b",)))
    assert trainer.core.memory.state.generation == 2
    assert not trainer.found(io.FetchState) and trainer.found(io.FetchGradient)


def test_a_gradient_that_is_gone_means_to_begin_again():
    trainer = outside()
    trainer.do(io.GradientGone(5, gone=True, why="too old"))
    assert trainer.said(m.RequestState) and trainer.core.memory.state.generation == 0


def test_a_member_asks_for_new_sources_when_a_gradient_stays_unpublished():
    trainer = outside()
    for _ in range(3):
        trainer.do(io.GradientGone(5, gone=False, why="not published"))
    assert "no server delivers the gradient of step 5" in trainer.said(m.RequestState)[0].why
    trainer.leader(m.StateSources(FIRST.fence, SnapshotRef(1, 5, "d5"), ("http://elsewhere",)))
    (fetch,) = trainer.found(io.FetchGradient)
    assert "http://elsewhere" in fetch.urls and fetch.step == 5


def test_a_member_admitted_for_a_state_that_it_lost_says_so_until_it_is_heard():
    trainer = outside()
    trainer.do(io.GradientGone(5, gone=True, why="too old"))
    joined = record_of("a b c", epoch=2, forced=1, c={"joining": True})
    trainer.leader(m.Epoch(joined))
    (fallen,) = trainer.said(m.CannotContinue)
    assert fallen.fence == joined.fence
    trainer.do(io.LeaderLost(), io.LeaderConnected())
    trainer.leader(m.Epoch(joined))
    assert trainer.said(m.CannotContinue) == [fallen]


def test_an_evicted_member_drops_its_gradient_and_goes_on_by_replay():
    trainer = holding()
    trainer.leader(m.Epoch(record_of("b", epoch=2)))
    assert trainer.core.epochs.mode is Mode.OUTSIDE and trainer.core.rounds.prepared is None
    assert trainer.found(io.DropGradient) and trainer.found(io.FetchGradient)


def test_a_member_that_leaves_stays_in_its_round_until_all_are_ready():
    trainer = Trainer()
    leaving = record_of("a b", epoch=1, a={"leaving": True})
    trainer.leader(m.Epoch(leaving), resume_of(leaving, 0, **assign(range(M), leaving.roster)))
    trainer.do(io.Linked(1))
    without = record_of("b", epoch=2, forced=1)
    trainer.leader(m.Epoch(without))
    assert trainer.core.epochs.mode is Mode.RUN
    trainer.do(io.Linked(2), io.Computed(0, (0, 1), 2.0))
    trainer.peer("b", contribution(leaving, 0, (2, 3)))
    trainer.do(io.Exchanged(1, 0, "g0"))
    trainer.peer("b", vote(leaving, 0, ready=2))
    assert [s.code for s in trainer.found(io.Stop)] == [0]


def test_a_member_whose_clock_is_behind_starts_again_with_a_higher_incarnation():
    trainer = Trainer()
    trainer.leader(m.Rejected("the clock", above=9))
    assert trainer.effects[-2:] == [io.ClaimAbove(9), io.Stop(75, "the clock")]


# --- cold start, parking, autonomy, the end --------------------------------------------------------------


def test_a_cold_start_from_another_state_fetches_it():
    trainer = Trainer()
    cold = record_of("a b", epoch=1, base=Base(0, 3, "base", ("http://b",)))
    trainer.leader(m.Epoch(cold), resume_of(cold, 3, a=(0, 1)))
    assert trainer.found(io.FetchState) == [io.FetchState(SnapshotRef(0, 3, "base"), ("http://b",))]
    trainer.do(io.StateFetched(3, "base"), io.Installed(3, "base"))
    assert trainer.core.memory.state.generation == 1
    assert trainer.found(io.Compute) == [io.Compute(3, (0, 1))]


def test_a_replica_that_has_not_read_storage_does_not_begin_the_job_from_nothing():
    """The replica joined because others held the state; these are gone, and no replica has read storage."""
    trainer = Trainer("a", storage_unread=True)
    cold = record_of("a b", epoch=1, base=Base(0, 0, "start", ("http://b",)))
    trainer.leader(m.Epoch(cold), resume_of(cold, 0, a=(0, 1)))
    (stop,) = trainer.found(io.Stop)
    assert stop.code == 75 and "durable storage has not been read here" in stop.reason


def test_a_replica_that_has_not_read_storage_begins_with_the_others_state():
    trainer = Trainer("a", storage_unread=True)
    cold = record_of("a b", epoch=3, cold=3, generation=2, base=Base(1, 3, "base", ("http://b",)))
    trainer.leader(m.Epoch(cold), resume_of(cold, 3, a=(0, 1)))
    assert trainer.found(io.FetchState) and not trainer.found(io.Stop)


@pytest.mark.parametrize("step", [3, 5])
def test_a_state_of_the_last_generation_on_its_way_into_memory_is_not_the_new_ones(step):
    """Found in simulation: the member kept a state of the last generation, its report was void, and committed
    steps were redone. If this state was ahead of the base, the member waited for ever.
    """
    trainer = Trainer()
    trainer.leader(m.Epoch(record_of("b", epoch=1)))
    trainer.leader(m.StateSources(FIRST.fence, SnapshotRef(1, step, "last"), ("http://b",)))
    trainer.do(io.StateFetched(step, "last"))
    assert trainer.found(io.Install)
    cold = record_of("a b", epoch=2, cold=2, generation=2, base=Base(1, 3, "base", ("http://c",)))
    trainer.leader(m.Epoch(cold), resume_of(cold, 3, a=(0, 1)))
    trainer.do(io.Installed(step, "last"))
    assert trainer.core.epochs.mode is Mode.CATCH_UP and not trainer.said(m.Running)
    (fetch,) = trainer.found(io.FetchState)
    assert (fetch.state, fetch.urls) == (SnapshotRef(1, 3, "base"), ("http://c",))
    trainer.do(io.StateFetched(3, "base"), io.Installed(3, "base"))
    assert trainer.core.epochs.mode is Mode.RUN and trainer.core.memory.state.generation == 2
    assert trainer.found(io.Compute) == [io.Compute(3, (0, 1))]


def test_a_member_that_missed_the_cold_start_begins_it_with_the_next_forced_epoch():
    """Found in simulation: after a superseded first decision no member ever fetched the base."""
    trainer = Trainer()
    base = Base(0, 3, "base", ("http://b",))
    trainer.leader(m.Epoch(record_of("a b c", epoch=1, base=base)))
    second = record_of("a b", epoch=2, cold=1, base=base)
    trainer.leader(m.Epoch(second), resume_of(second, 3, a=(0, 1)))
    assert trainer.found(io.FetchState)


def test_a_failed_fetch_of_the_base_goes_to_the_leader():
    trainer = Trainer()
    cold = record_of("a b", epoch=1, base=Base(0, 3, "base", ("http://b",)))
    trainer.leader(m.Epoch(cold), resume_of(cold, 3))
    trainer.do(io.FetchFailed("no source delivered it"))
    assert [x.why for x in trainer.said(m.CannotContinue)] == ["no source delivered it"]


def test_a_failed_fetch_of_the_last_generations_base_does_not_matter_in_the_new_one():
    """Met on a loaded machine: the next base counted as unloadable, although no member had tried it."""
    trainer = Trainer()
    first = record_of("a b", epoch=1, base=Base(0, 20, "damaged", ("http://b",)))
    trainer.leader(m.Epoch(first), resume_of(first, 20))
    second = record_of("a b", epoch=2, cold=2, generation=2, base=Base(0, 10, "base", ("http://c",)))
    trainer.leader(m.Epoch(second))
    trainer.do(io.FetchFailed("it is damaged", unusable=True))
    assert not trainer.said(m.CannotContinue)
    trainer.leader(resume_of(second, 10, a=(0, 1)))
    assert trainer.found(io.FetchState) == [io.FetchState(SnapshotRef(0, 10, "base"), ("http://c",))]
    trainer.do(io.StateFetched(10, "base"), io.Installed(10, "base"))
    assert trainer.core.epochs.mode is Mode.RUN and trainer.core.memory.state.generation == 2


def test_below_the_minimum_a_member_parks_and_keeps_its_gradient():
    trainer = Trainer(min_replicas=2)
    alone = record_of("a", epoch=1)
    trainer.leader(m.Epoch(alone), resume_of(alone, 0, a=(0, 1, 2, 3)))
    assert trainer.core.epochs.mode is Mode.RUN and not trainer.found(io.Compute)


def test_without_a_lighthouse_a_member_goes_on_until_its_autonomy_ends():
    trainer = holding()
    trainer.do(io.LeaderLost())
    trainer.now += 1799
    trainer.peer("b", vote(FIRST, 0))
    trainer.do(io.Ready(1, "d1"))
    assert trainer.found(io.Compute)
    trainer.do(io.Computed(1, (0, 1), 2.0), io.Exchanged(1, 1, "g1"))
    trainer.peer("b", contribution(FIRST, 1, (2, 3)))
    trainer.peer("b", vote(FIRST, 1, gradient="g1", state="d1"))
    assert trainer.found(io.Apply)
    trainer.now += 10
    trainer.do(io.Ready(2, "d2"))
    assert [s.code for s in trainer.found(io.Stop)] == [75]
    assert trainer.do(io.Tick()) == [], "a stopped core does nothing any more"


def test_a_round_that_outlasts_the_autonomy_is_not_committed():
    """A process that was stopped at the barrier must not commit in a generation that may be over."""
    trainer = holding()
    trainer.do(io.LeaderLost())
    trainer.now += 1801
    trainer.peer("b", vote(FIRST, 0))
    assert [s.code for s in trainer.found(io.Stop)] == [75]
    assert not trainer.found(io.Apply) and not trainer.found(io.Publish)


def test_contact_counts_from_when_the_answered_heartbeat_was_sent():
    trainer = running()
    (beat,) = [e.message for e in Trainer().effects if isinstance(e, io.SendLeader)][-1:]
    sent = trainer.now
    trainer.now += 50
    trainer.leader(m.HeartbeatAck(beat.number))
    assert trainer.core.session.contact.last == sent


def test_finished_is_sent_again_with_every_session():
    trainer = holding()
    trainer.peer("b", vote(FIRST, 0))
    trainer.do(io.Closing())
    assert trainer.said(m.Finished) == [m.Finished(FIRST.fence, 1)]
    trainer.do(io.LeaderLost(), io.LeaderConnected())
    assert [s.finished for s in trainer.said(m.OpenSession)] == [True]
    trainer.leader(m.Complete(FIRST.fence, 1))
    assert trainer.found(io.Finish) == [io.Finish(1)]


def test_a_member_that_fetches_the_last_state_computes_nothing_more():
    trainer = Trainer()
    cold = record_of("a b", epoch=1, base=Base(0, 3, "base", ("http://b",)))
    trainer.leader(m.Epoch(cold), resume_of(cold, 3, a=(0, 1)))
    trainer.do(io.StateFetched(3, "base"), io.Installed(3, "base", last=True))
    assert trainer.said(m.Finished) and not trainer.found(io.Compute)


# --- serving newcomers -----------------------------------------------------------------------------------


def test_a_promised_snapshot_is_taken_at_its_step():
    trainer = holding()
    trainer.leader(m.TakeSnapshotFor(FIRST.fence, "c", 1))
    assert trainer.found(io.RetainGradients) == [io.RetainGradients(True)] and not trainer.found(
        io.TakeSnapshot
    )
    trainer.peer("b", vote(FIRST, 0))
    trainer.do(io.Ready(1, "d1"))
    kinds = [type(e) for e in trainer.effects]
    assert kinds.index(io.TakeSnapshot) < kinds.index(io.Compute)
    trainer.do(io.Snapshotted(1, "d1"))
    assert trainer.said(m.SnapshotTaken) == [m.SnapshotTaken(FIRST.fence, "c", 1, "d1")]
    trainer.leader(m.StopServing(FIRST.fence, "c"))
    assert trainer.found(io.RetainGradients) == [io.RetainGradients(False)]


def test_a_snapshot_of_a_step_that_has_passed_is_reported_as_missed():
    trainer = holding()
    trainer.peer("b", vote(FIRST, 0))
    trainer.do(io.Ready(1, "d1"))
    trainer.leader(m.TakeSnapshotFor(FIRST.fence, "c", 0))
    assert trainer.said(m.SnapshotTaken) == [m.SnapshotTaken(FIRST.fence, "c", 0, "")]


def test_a_snapshot_that_failed_can_be_asked_for_again():
    """Found in simulation with a parked job: a failed snapshot of the same step must not count as taken."""
    trainer = Trainer(min_replicas=2)
    alone = record_of("a", epoch=1)
    trainer.leader(m.Epoch(alone), resume_of(alone, 0), m.TakeSnapshotFor(alone.fence, "c", 0))
    assert trainer.found(io.TakeSnapshot)
    trainer.do(io.Snapshotted(0, ""))
    assert trainer.said(m.SnapshotTaken)
    trainer.leader(m.TakeSnapshotFor(alone.fence, "c", 0))
    assert trainer.found(io.TakeSnapshot)
