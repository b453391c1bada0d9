"""A replica of several ranks as one member: each effect goes to all ranks, and their outcomes become one
event.
"""

import pytest
from msgspec.structs import replace
from protocol.makers import record_of, session_of

from fabric.errors import IllegalTransition, ProtocolError
from fabric.model import Base, Fence, RankAddress, SnapshotRef
from fabric.protocol.member.core import MemberCore
from fabric.protocol.member.state import MemberConfig
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages import rank_messages as ro
from fabric.protocol.ranks import EndReplica, FollowerRank, Ranks, ToOthers, ToSelf
from fabric.protocol.rules.assignment import assign

M = 4


def addresses(name, ranks=2):
    return tuple(RankAddress(f"{name}:{k + 1}", f"http://{name}/{k}#{k}") for k in range(1, ranks))


FIRST = record_of("a b", epoch=1, base=Base(0, 0), a={"ranks": addresses("a")}, b={"ranks": addresses("b")})


class Replica:
    """Replica ``a`` of two ranks; ``do`` feeds events and keeps the commands of the last."""

    def __init__(self, groups=(0, 1)):
        identity = session_of("a", ranks=addresses("a"))
        self.core = Ranks(MemberCore(identity, MemberConfig(), 0.0), groups)
        self.effects = []
        self.do(io.LeaderConnected())

    def do(self, *events):
        for event in events:
            self.effects = self.core.handle(event, 1.0)
        return self.effects

    def rank(self, rank, event, number=0):
        return self.do(ro.FromHost((rank,), (event,), number))

    def both(self, event):
        self.rank(0, event)
        return self.rank(1, event)

    @property
    def told(self):
        """The commands in their order, as rank and effect; a follower knows the digest of its part."""
        for effect in self.effects:
            if isinstance(effect, ToSelf):
                yield 0, effect.command.effect
            for rank in reversed(range(1, self.core.size)) if isinstance(effect, ToOthers) else ():
                follower = FollowerRank(rank)
                for question, answers in self.core._answers.items():
                    if question[0] == "round" and rank in answers:
                        follower.tell(answers[rank])
                own = (effect.own[rank],) if effect.own else ()
                for command in effect.commands:
                    yield rank, follower.obey(ro.decode_command(ro.HostCommands(command).of(own)))

    def orders(self, kind, rank=None):
        return [effect for at, effect in self.told if isinstance(effect, kind) and rank in (None, at)]

    def said(self, kind):
        sends = (io.SendPeer, io.SendLeader)
        return [e.message for e in self.effects if isinstance(e, sends) and isinstance(e.message, kind)]


def computing(groups=(0, 1)):
    """Return a replica whose ranks both compute its half of the first step."""
    replica = Replica(groups)
    replica.both(io.Ready(0, "d"))
    replica.do(io.FromLeader(m.Epoch(FIRST)))
    table = tuple(m.Assignment(n, ids) for n, ids in assign(range(M), FIRST.roster).items())
    replica.do(io.FromLeader(m.Resume(FIRST.fence, 0, table)))
    orders = replica.orders(io.Compute)
    assert len(orders) == 2 and orders[0] == orders[1]
    return replica, orders[0]


def exchanging():
    replica, order = computing()
    replica.both(io.Linked(1))
    replica.both(io.Computed(0, order.micro_batches, 2.0))
    assert len(replica.orders(io.StartExchange)) == 2
    return replica


def test_the_exchange_begins_when_the_last_backward_has_begun_at_every_rank():
    replica, order = computing()
    replica.both(io.Linked(1))
    replica.rank(1, io.Streaming(0, 1.0))
    assert not replica.orders(io.StartExchange)
    replica.rank(0, io.Streaming(0, 3.0))
    wanted = io.StartExchange(FIRST.fence, 0, 2.0, streaming=True)  # the mean over the groups of samples
    assert replica.orders(io.StartExchange) == [wanted, wanted]
    replica.both(io.Exchanged(1, 0, "g"))
    assert not replica.said(m.CommitVote), "no vote before the own contribution"
    replica.both(io.Computed(0, order.micro_batches, 2.0))
    assert not replica.orders(io.StartExchange)


def test_a_rank_that_does_not_stream_lets_all_exchange_after_backward():
    replica, order = computing()
    replica.both(io.Linked(1))
    replica.rank(1, io.Streaming(0, 2.0))
    replica.both(io.Computed(0, order.micro_batches, 2.0))
    assert [x.streaming for x in replica.orders(io.StartExchange)] == [False, False]
    replica.rank(0, io.Streaming(0, 2.0))  # the word of the order before is forgotten
    assert not replica.orders(io.StartExchange) and not replica.core.over


def test_a_gradient_that_changed_at_one_rank_aborts_the_round_at_all():
    replica, order = computing()
    replica.both(io.Linked(1))
    replica.both(io.Streaming(0, 2.0))
    replica.rank(0, io.Computed(0, order.micro_batches, 2.0))
    replica.rank(1, io.Computed(0, order.micro_batches, 2.0, redo="it was changed"))
    assert [x.why for x in replica.orders(io.AbortExchange)] == ["it was changed"] * 2
    assert not replica.said(m.Contribution)


def test_ranks_that_disagree_on_a_streamed_weight_stop_the_replica():
    replica, _ = computing(groups=(0, 0))
    replica.rank(0, io.Streaming(0, 2.0))
    replica.rank(1, io.Streaming(0, 3.0))
    assert all("they must agree" in x.reason for x in replica.orders(io.Stop)) and replica.core.over


def test_digests_of_the_ranks_are_one_digest_in_rank_order():
    assert ro.replica_digest(["x"]) == "x"
    assert ro.replica_digest(["x", "y"]) != ro.replica_digest(["y", "x"])
    assert len(ro.replica_digest(["x", "y"])) == 32
    assert ro.replica_digest(["x", ""]) == ""


def test_ready_waits_for_every_rank_and_joins_their_digests():
    replica = Replica()
    replica.rank(1, io.Ready(0, "one"))
    assert not replica.core.member.memory.waiting
    replica.rank(0, io.Ready(0, "zero"))
    assert replica.core.member.memory.waiting
    assert replica.core.member.memory.state.digest == ro.replica_digest(["zero", "one"])


def test_every_rank_links_to_the_same_rank_of_the_others():
    replica = Replica()
    replica.do(io.FromLeader(m.Epoch(FIRST)))
    (mine,), (theirs,) = replica.orders(io.LinkUp, 0), replica.orders(io.LinkUp, 1)
    assert mine.record == FIRST
    assert [(x.link, x.ckpt) for x in theirs.record.roster] == [("a:2", "http://a/1"), ("b:2", "http://b/1")]
    assert theirs.record.fence == FIRST.fence


def test_a_replica_is_linked_when_all_ranks_are_and_again_after_a_lost_link():
    replica = Replica()
    replica.do(io.FromLeader(m.Epoch(FIRST)))
    replica.rank(1, io.Linked(1))
    assert 1 not in replica.core.member.epochs.links.up
    replica.rank(0, io.Linked(1))
    assert 1 in replica.core.member.epochs.links.up
    replica.do(io.LinkLost("b", 1, "reset"))
    replica.rank(1, io.Linked(1))
    assert 1 not in replica.core.member.epochs.links.up
    replica.rank(0, io.Linked(1))
    assert 1 in replica.core.member.epochs.links.up


def test_a_lost_link_to_a_stranger_takes_nothing_from_an_epoch():
    """Found by the simulator: a link to an evicted process ended, and its epoch was never linked again."""
    replica = Replica()
    replica.do(io.FromLeader(m.Epoch(FIRST)))
    replica.rank(0, io.Linked(1))
    replica.do(io.LinkLost("c", 1, "evicted"))
    replica.rank(1, io.Linked(1))
    assert 1 in replica.core.member.epochs.links.up


def test_a_link_that_one_rank_cannot_make_fails_the_epoch_once():
    replica, _ = computing()
    replica.rank(0, io.Linked(1))
    replica.rank(1, io.LinkFailed(1, "b", "nobody answers"))
    assert len(replica.orders(io.AbortExchange)) == 2
    (aborted,) = replica.said(m.Aborted)
    assert aborted.why == "rank 1: nobody answers" and aborted.about == "b"


def test_the_weight_of_ranks_is_their_mean_and_their_metrics_are_summed():
    replica, order = computing()
    replica.both(io.Linked(1))
    replica.rank(0, io.Computed(0, order.micro_batches, 2.0, (("loss", 1.0),)))
    assert not replica.said(m.Contribution)
    replica.rank(1, io.Computed(0, order.micro_batches, 4.0, (("loss", 2.0),)))
    (contribution,) = replica.said(m.Contribution)
    assert (contribution.weight, contribution.metrics) == (3.0, (("loss", 3.0),))


def test_ranks_of_one_group_count_once_whichever_of_them_speaks():
    """Of pipeline stages only the last stage has a loss and a weight."""
    replica, order = computing(groups=(0, 0))
    replica.both(io.Linked(1))
    replica.rank(0, io.Computed(0, order.micro_batches, 0.0))
    replica.rank(1, io.Computed(0, order.micro_batches, 4.0, (("loss", 2.0),)))
    (contribution,) = replica.said(m.Contribution)
    assert (contribution.weight, contribution.metrics) == (4.0, (("loss", 2.0),))
    # The two ranks are tensor parallel, so both report the same samples.
    replica, order = computing(groups=(0, 0))
    replica.both(io.Linked(1))
    replica.both(io.Computed(0, order.micro_batches, 4.0, (("loss", 2.0),)))
    (contribution,) = replica.said(m.Contribution)
    assert (contribution.weight, contribution.metrics) == (4.0, (("loss", 2.0),))


def test_ranks_of_one_group_that_weigh_differently_are_an_error():
    replica, order = computing(groups=(0, 0))
    replica.rank(0, io.Computed(0, order.micro_batches, 3.0))
    replica.rank(1, io.Computed(0, order.micro_batches, 4.0))
    assert {(s.code, "3 and 4" in s.reason) for s in replica.orders(io.Stop)} == {(1, True)}


def test_a_round_is_prepared_when_every_rank_has_reduced_it():
    replica = exchanging()
    fence = FIRST.fence
    other = assign(range(M), FIRST.roster)["b"]
    replica.do(io.FromPeer("b", 1, m.Contribution(fence, 0, 2.0, other)))
    replica.rank(0, io.Exchanged(1, 0, "g0"))
    assert not replica.said(m.CommitVote), "one lane is not the round"
    replica.rank(1, io.Exchanged(1, 0, "g1"))
    (vote,) = replica.said(m.CommitVote)
    assert vote.gradient_digest == ro.replica_digest(["g0", "g1"])
    replica.do(io.FromPeer("b", 1, replace(vote)))
    for rank in (0, 1):
        (publish,), (apply,) = replica.orders(io.Publish, rank), replica.orders(io.Apply, rank)
        assert publish.prepared.gradient_digest == apply.prepared.gradient_digest == f"g{rank}"
    assert replica.core.member.memory.state.step == 1


def test_a_tensor_that_is_not_finite_at_one_rank_is_not_finite():
    replica = exchanging()
    replica.rank(0, io.Exchanged(1, 0, "g0"))
    replica.rank(1, io.Exchanged(1, 0, "g1", "w", "w"))
    assert (
        replica.core.member.rounds.round.nonfinite == replica.core.member.rounds.round.nonfinite_input == "w"
    )


def test_a_loop_that_raises_at_one_rank_is_the_replicas():
    replica = exchanging()
    replica.rank(1, io.LoopRaised("ValueError"))
    (failed,) = replica.said(m.LoopFailed)
    assert failed.why == "rank 1: ValueError"


def test_an_exchange_that_fails_at_one_rank_aborts_at_all():
    replica = exchanging()
    replica.rank(0, io.Exchanged(1, 0, "g0"))
    replica.rank(1, io.ExchangeFailed(1, 0, "b", "the link was reset"))
    assert len(replica.orders(io.AbortExchange)) == 2
    replica.rank(0, io.Exchanged(1, 0, "g0"))
    assert not replica.said(m.CommitVote)


def test_commands_that_follow_each_other_are_one_message():
    replica = exchanging()
    other = assign(range(M), FIRST.roster)["b"]
    replica.do(io.FromPeer("b", 1, m.Contribution(FIRST.fence, 0, 2.0, other)))
    replica.both(io.Exchanged(1, 0, "g"))
    (vote,) = replica.said(m.CommitVote)
    replica.do(io.FromPeer("b", 1, vote))
    (told,) = [x for x in replica.effects if isinstance(x, ToOthers)]
    assert [type(x.effect) for x in told.commands] == [io.Publish, io.Apply]
    own = [x.command for x in replica.effects if isinstance(x, ToSelf)]
    assert [x.number for x in own] == [x.number for x in told.commands]
    assert replica.effects.index(told) < min(map(replica.effects.index, map(ToSelf, own)))


def test_a_lost_rank_ends_the_replica_and_rank_0_last():
    replica = exchanging()
    replica.rank(1, ro.RankLost(1, "end of file"))
    assert [rank for rank, _ in replica.told] == [1, 0]
    assert {stop.code for _, stop in replica.told} == {75}
    assert "rank 1 of this replica is lost" in replica.orders(io.Stop)[0].reason
    assert replica.core.lost and replica.core.over and replica.core.next_deadline() is None
    assert replica.both(io.Exchanged(1, 0, "g")) == []
    assert replica.rank(0, ro.RankLost(0, "too")) == []


def test_a_rank_that_goes_after_the_end_is_not_lost():
    replica = exchanging()
    replica.do(io.FromLeader(m.Complete(FIRST.fence, 0)))
    assert len(replica.orders(io.Finish)) == 2
    assert replica.rank(1, ro.RankLost(1, "closed")) == [] and not replica.core.lost


def test_a_lighthouse_that_refuses_the_replica_stops_every_rank():
    replica = Replica()
    replica.do(EndReplica(1, "wrong token"))
    assert [s.reason for s in replica.orders(io.Stop)] == ["wrong token"] * 2


def test_rank_0_alone_keeps_the_incarnation_to_pass():
    replica = Replica()
    effects = replica.do(io.FromLeader(m.Rejected("the clock", above=9)))
    assert [x for x in effects if isinstance(x, io.ClaimAbove)] == [io.ClaimAbove(9)]
    assert [s.code for s in replica.orders(io.Stop)] == [75, 75]


def test_ranks_with_different_loops_are_an_error():
    replica = Replica()
    replica.rank(0, io.Ready(0, ""))
    replica.rank(1, io.Closing())
    (stop, _) = replica.orders(io.Stop)
    assert stop.code == 1 and "rank 1 at the end of its loop" in stop.reason


# --- catching up -----------------------------------------------------------------------------------------


def behind():
    """Return a replica outside the roster whose ranks must both fetch a state."""
    replica = Replica()
    record = record_of("b", epoch=3, generation=2, b={"ranks": addresses("b")})
    replica.do(io.FromLeader(m.Epoch(record)))
    replica.both(io.Ready(0, "d"))
    urls = ("http://b", "http://b/1#1")
    replica.do(io.FromLeader(m.StateSources(Fence("s", 2, 3), SnapshotRef(2, 7, "whole"), urls)))
    return replica


def number(replica):
    return next(e.command.number for e in replica.effects if isinstance(e, ToSelf))


def test_each_rank_fetches_its_part_from_servers_of_that_rank():
    replica = behind()
    (zero,), (one,) = replica.orders(io.FetchState, 0), replica.orders(io.FetchState, 1)
    assert (zero.urls, one.urls) == (("http://b",), ("http://b/1",))
    assert zero.state == one.state == SnapshotRef(2, 7, "whole")
    order = number(replica)
    replica.rank(1, io.StateFetched(7, "p1"), order)
    assert not replica.orders(io.Install)
    replica.rank(0, io.StateFetched(7, "p0"), order)
    assert [i.digest for i in replica.orders(io.Install)] == ["whole", "whole"]
    replica.rank(0, io.Installed(7, "p0"))
    replica.rank(1, io.Installed(7, "p1"))
    assert replica.core.member.memory.state.digest == ro.replica_digest(["p0", "p1"])


def test_a_fetch_that_fails_at_one_rank_fails_when_all_have_ended():
    replica = behind()
    order = number(replica)
    replica.rank(0, io.FetchFailed("gone"), order)
    assert replica.core.member.catch_up.fetch.doing == "state"
    replica.rank(1, io.StateFetched(7, "p1"), order)
    assert replica.core.member.catch_up.fetch.doing != "state"
    assert replica.rank(1, io.FetchFailed("late"), order) == []


def test_another_models_state_ends_all_ranks_whatever_the_others_found():
    replica = behind()
    order = number(replica)
    replica.rank(0, io.FetchFailed("rank 1's server is away"), order)
    replica.rank(1, io.FetchFailed("model.0.bias has shape (3,)", misfit=True), order)
    assert [(s.code, s.reason) for s in replica.orders(io.Stop)] == [
        (1, "rank 1: model.0.bias has shape (3,)")
    ] * 2


def test_storage_that_stays_away_asks_for_a_restart_of_all_ranks():
    replica = behind()
    order = number(replica)
    replica.rank(0, io.StateFetched(7, "p0"), order)
    replica.rank(1, io.FetchFailed("/checkpoints is away, for 60 s", restart=True), order)
    assert [(s.code, s.reason) for s in replica.orders(io.Stop)] == [
        (75, "rank 1: /checkpoints is away, for 60 s")
    ] * 2


def test_every_rank_hears_where_all_parts_of_a_state_are():
    zero, one = (behind().orders(io.FetchState, rank)[0] for rank in (0, 1))
    assert zero.lanes == one.lanes == ("http://b", "http://b/1#1")


def test_the_replica_has_finished_when_its_last_snapshot_is_kept_by_all_ranks():
    replica, _ = computing()
    replica.rank(0, ro.SnapshotDue(0, durable=True))
    replica.both(io.Closing())
    assert not replica.said(m.Finished)
    for rank in (0, 1):
        replica.rank(rank, io.Snapshotted(0, f"p{rank}", 1))
    names = replica.orders(ro.NameSnapshot)
    assert [n.durable for n in names] == [True, True] and not replica.said(m.Finished)
    replica.rank(1, ro.SnapshotNamed(0, 1, True))
    assert not replica.said(m.Finished)
    replica.rank(0, ro.SnapshotNamed(0, 1, False))  # rank 0 could not keep its part, but the job has ended
    assert [f.step for f in replica.said(m.Finished)] == [0]


def replaying():
    replica = behind()
    order = number(replica)
    for rank in (0, 1):
        replica.rank(rank, io.StateFetched(7, f"p{rank}"), order)
    for rank in (0, 1):
        replica.rank(rank, io.Installed(7, f"p{rank}"))
    (zero,), (one,) = replica.orders(io.FetchGradient, 0), replica.orders(io.FetchGradient, 1)
    assert (zero.step, zero.urls, one.urls) == (7, ("http://b",), ("http://b/1",))
    return replica


def test_a_published_gradient_is_applied_when_every_rank_has_its_part():
    replica = replaying()
    order = number(replica)
    replica.rank(0, io.GradientFetched(7, "g0"), order)
    assert not replica.orders(io.Apply)
    replica.rank(1, io.GradientFetched(7, "g1"), order)
    assert [a.prepared for a in replica.orders(io.Apply)] == [None, None]
    assert replica.core.member.memory.state.committed_digest == ro.replica_digest(["g0", "g1"])


def test_a_gradient_that_one_rank_cannot_get_is_wanted_by_none():
    replica = replaying()
    order = number(replica)
    replica.rank(0, io.GradientGone(7, gone=False, why="not yet"), order)
    assert replica.orders(io.CancelFetch)
    assert replica.orders(io.FetchGradient), "the core asks again"
    again = replica.orders(io.FetchGradient)
    assert len(again) == 2
    # An outcome of the cancelled fetch must not count for the new fetch.
    replica.rank(1, io.GradientFetched(7, "old"), order)
    replica.rank(0, io.GradientFetched(7, "g0"), order + 2)
    assert not replica.orders(io.Apply)
    replica.rank(0, io.GradientFetched(7, "old"), order)
    assert not replica.orders(io.Apply)


# --- snapshots --------------------------------------------------------------------------------------------


def test_a_snapshot_is_served_when_every_rank_has_its_part():
    replica = Replica()
    replica.both(io.Ready(0, "d"))
    replica.rank(0, ro.SnapshotDue(0))
    assert replica.orders(io.TakeSnapshot) == [io.TakeSnapshot(0, 0)] * 2
    assert replica.rank(0, ro.SnapshotDue(0)) == [], "one of a step at a time"
    replica.rank(1, io.Snapshotted(0, "s1", 0))
    replica.rank(0, io.Snapshotted(0, "s0", 0))
    assert replica.orders(ro.NameSnapshot) == [ro.NameSnapshot(0, 0, ("s0", "s1"))] * 2
    replica.rank(0, ro.SnapshotNamed(0, 0, True))
    assert not replica.core.member.serving.snapshots
    replica.rank(1, ro.SnapshotNamed(0, 0, True))
    assert replica.core.member.serving.snapshots == (SnapshotRef(0, 0, ro.replica_digest(["s0", "s1"])),)


def test_a_state_to_save_is_saved_although_its_snapshot_was_about_to_be_served():
    """Found in review: the order was lost, so a replica with notice waited for its state until its end."""
    replica, order = computing()
    replica.rank(0, ro.SnapshotDue(0))
    for rank in (0, 1):
        replica.rank(rank, io.Snapshotted(0, f"s{rank}", 1))
    assert [x.durable for x in replica.orders(ro.NameSnapshot)] == [False, False]
    replica.do(io.Noticed(), io.FromLeader(m.HeartbeatAck(1, save=True)))
    replica.both(io.Linked(1))
    replica.both(io.Computed(0, order.micro_batches, 2.0))
    replica.do(io.LinkLost("b", 1, "it ended"))
    assert replica.core.member.serving.saving == 0
    replica.rank(0, ro.SnapshotNamed(0, 1, True))
    replica.rank(1, ro.SnapshotNamed(0, 1, True))
    assert replica.orders(io.TakeSnapshot) == [io.TakeSnapshot(0, 1)] * 2
    for rank in (0, 1):
        replica.rank(rank, io.Snapshotted(0, f"s{rank}", 1))
    assert [x.durable for x in replica.orders(ro.NameSnapshot)] == [True, True]


def test_a_snapshot_that_one_rank_could_not_take_is_forgotten_by_all():
    replica = Replica()
    replica.both(io.Ready(0, "d"))
    replica.rank(0, ro.SnapshotDue(0))
    replica.rank(0, io.Snapshotted(0, "s0", 0))
    replica.rank(1, io.Snapshotted(0, "", 0))
    assert replica.orders(ro.NameSnapshot) == [ro.NameSnapshot(0, 0, ())] * 2
    replica.rank(0, ro.SnapshotNamed(0, 0, False))
    replica.rank(1, ro.SnapshotNamed(0, 0, False))
    assert not replica.core.member.serving.snapshots


# --- followers, and what travels ---------------------------------------------------------------------------


def test_a_follower_obeys_until_the_end():
    follower = FollowerRank(1)
    order = ro.RankCommand(1, 5, io.Switch(FIRST))
    assert follower.obey(order) == order.effect
    assert (follower.generation, follower.current) == (5, FIRST)
    follower.obey(ro.RankCommand(2, 5, io.LinkUp(FIRST)))
    assert follower.newest == FIRST
    assert follower.lost("reset") == io.Stop(
        75, "rank 0 of this replica is lost (reset): all ranks start again"
    )
    assert follower.obey(order) is None and follower.lost("again") is None


def test_a_follower_that_was_told_to_finish_does_not_miss_rank_0():
    follower = FollowerRank(1)
    follower.obey(ro.RankCommand(1, 1, io.Finish(9)))
    assert follower.lost("closed") is None
    with pytest.raises(IllegalTransition, match="rank 0 follows no other rank"):
        FollowerRank(0)


HELD = io.PreparedRound(3, 7, "d", 4.0, (("a", (0, 1)), ("b", ())), (("loss", 1.5),))
EFFECTS = [
    io.LinkUp(FIRST),
    io.Switch(FIRST),
    io.StartExchange(FIRST.fence, 3, 2.0),
    io.AbortExchange(1, "why"),
    io.Compute(3, (1, 2)),
    io.DropGradient(),
    io.Apply(1, 7, HELD, True, False),
    io.Apply(1, 7, None, False, True),
    io.Publish(1, HELD),
    io.Install(7, "d"),
    io.TellDigest(7),
    io.TakeSnapshot(7, 2),
    io.Finish(9),
    io.Stop(75, "why"),
    io.FetchState(SnapshotRef(1, 2, "d"), ("http://a",)),
    io.FetchGradient(1, 2, ("http://a",)),
    io.CancelFetch(),
    io.RetainGradients(True),
    ro.NameSnapshot(1, 2, ("a", "b")),
]
EVENTS = [
    io.Ready(1, "d"),
    io.Ready(1, later=True),
    io.Digested(1, "d"),
    io.Streaming(1, 3.0),
    io.Computed(1, (1, 2), 3.0, (("loss", 1.0),)),
    io.Installed(1, "d", True),
    io.InstallFailed("why"),
    io.Busy("evaluation", 60.0),
    io.Closing(),
    io.Busy("evaluation", 5.0),
    io.Noticed(),
    io.Saved(1, "the disk is full"),
    io.LoopRaised("why"),
    io.Busy("evaluation", 600.0),
    io.Linked(1),
    io.LinkFailed(1, "b", "why"),
    io.Exchanged(1, 2, "d"),
    io.ExchangeFailed(1, 2, "b", "why"),
    io.StateFetched(1, "d"),
    io.FetchFailed("why"),
    io.GradientFetched(1, "d"),
    io.GradientGone(1, True, "why"),
    io.Snapshotted(1, "d", 2),
    ro.SnapshotNamed(1, 2, True),
    ro.SnapshotDue(1),
    ro.RankLost(5, "why"),
]


def test_these_tests_cover_every_rank_command_and_outcome():
    assert {type(e) for e in EFFECTS} == set(ro.RankEffect.__args__)
    assert {type(e) for e in EVENTS} == set(ro.RankEvent.__args__)


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda e: type(e).__name__)
def test_rank_commands_are_decoded_as_they_were_sent(effect):
    order = ro.RankCommand(3, 2, effect)
    assert ro.decode_command(ro.HostCommands(order).of()) == order


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_outcomes_are_decoded_as_they_were_sent(event):
    outcome = ro.RankOutcome(event, 5)
    assert ro.decode_outcomes(ro.encode_outcome(outcome), (3,)) == ro.FromHost((3,), (event,), 5)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"kind":"Ready","number":0,"value":{}}',
        b'{"kind":"Compute","number":0,"value":{"step":1,"micro_batches":[]}}',
        b'{"kind":"Linked","number":-1,"value":{"epoch":1}}',
        b'{"kind":"Linked","value":{"epoch":1}}',
        b'{"kind":["Linked"],"number":0,"value":{"epoch":1}}',
        b'{"kind":"Linked","number":0,"value":{"epoch":"1"}}',
    ],
)
def test_malformed_rank_outcomes_are_refused(data):
    with pytest.raises(ProtocolError):
        ro.decode_outcomes(data, (0,))


def test_the_rank_of_a_server_is_in_its_url():
    urls = ("http://a:1", "http://b:1#1", "http://c:1#1", "http://b:1#1", "http://d#x")
    assert ro.urls_of_rank(urls, 0) == ("http://a:1",)
    assert ro.urls_of_rank(urls, 1) == ("http://b:1", "http://c:1")


def test_a_replica_with_fewer_ranks_is_named():
    with pytest.raises(ProtocolError, match="b has 1 ranks and no rank 1"):
        ro.addresses_by_rank(record_of("a b", epoch=1, a={"ranks": addresses("a")}), 2)


# --- replicas of unequal layouts ---------------------------------------------------------------------------


class Unequal(Replica):
    """Replica ``a`` of two ranks in a job whose replicas may have other layouts."""

    def __init__(self, groups=(0, 1)):
        super().__init__(groups)
        identity = session_of("a", ranks=addresses("a"), cuts="x")
        member = MemberCore(identity, MemberConfig(), 0.0)
        self.core = Ranks(member, groups, unequal=True)
        self.do(io.LeaderConnected())


def content(half):
    return "d" * 16 + f"{half:016x}"


def test_of_unequal_layouts_every_rank_gets_the_whole_record():
    replica = Unequal()
    replica.do(io.FromLeader(m.Epoch(FIRST)))
    assert [x.record for x in replica.orders(io.LinkUp)] == [FIRST, FIRST]


def test_of_unequal_layouts_weights_and_digests_are_sums():
    replica = Unequal()
    replica.rank(0, io.Ready(0, content(1)))
    replica.rank(1, io.Ready(0, content(2**64 - 1)))
    assert replica.core.member.memory.state.digest == content(0)
    replica.do(io.FromLeader(m.Epoch(FIRST)))
    share = assign(range(M), FIRST.roster)
    table = tuple(m.Assignment(name, ids) for name, ids in share.items())
    replica.do(io.FromLeader(m.Resume(FIRST.fence, 0, table)))
    replica.both(io.Linked(1))
    replica.both(io.Computed(0, share["a"], 3.0, ()))
    assert [x.weight for x in replica.said(m.Contribution)] == [6.0], "both slices of its samples"
    replica.do(io.FromPeer("b", 1, m.Contribution(FIRST.fence, 0, 6.0, share["b"])))
    replica.rank(0, io.Exchanged(1, 0, content(5)))
    replica.rank(1, io.Exchanged(1, 0, content(6)))
    assert [x.gradient_digest for x in replica.said(m.CommitVote)] == [content(11)]
    replica.do(io.FromPeer("b", 1, m.CommitVote(FIRST.fence, 0, 1, content(11))))
    published = [x.prepared.gradient_digest for x in replica.orders(io.Publish)]
    assert published == [content(11)] * 2, "the round's digest, which readers of any layout compare"


def test_of_unequal_layouts_every_rank_looks_for_its_part_at_all_members():
    replica = Unequal()
    replica.do(io.FromLeader(m.Epoch(FIRST)))
    state = io.FetchState(SnapshotRef(1, 4, content(1)), ("http://b", "http://b/1#1"))
    assert replica.core._of_any_layout(state) == replace(state, lanes=state.urls)
    gradient = io.FetchGradient(1, 4, ("http://b",))
    assert replica.core._of_any_layout(gradient) == replace(gradient, members=(FIRST.member("b"),))
    order = ro.RankCommand(7, 1, replica.core._of_any_layout(gradient))
    assert ro.decode_command(ro.HostCommands(order).of()) == order
