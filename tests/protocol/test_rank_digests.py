"""Outcomes of ranks that cross: late digests of the state, and links that fail at only one rank."""

from protocol.makers import record_of
from protocol.test_rank_orders import M, Replica, addresses, computing

from fabric.model import SnapshotRef
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages.rank_messages import replica_digest
from fabric.protocol.ranks import ToSelf


def newcomer_of_two_ranks():
    """Return a newcomer of two ranks that waits for a state outside the first epoch."""
    replica = Replica()
    replica.both(io.Ready(0, "d"))
    replica.do(io.FromLeader(m.Epoch(record_of("b", epoch=1, b={"ranks": addresses("b")}))))
    return replica


def fetching(replica):
    """Feed the state sources; return the number of the command to fetch."""
    fence = replica.core.member.epochs.newest.fence
    replica.do(io.FromLeader(m.StateSources(fence, SnapshotRef(1, 50, "s50"), ("http://b",))))
    numbers = {e.command.number for e in replica.effects if isinstance(e, ToSelf)}
    assert len(replica.orders(io.FetchState)) == 2 and len(numbers) == 1
    return numbers.pop()


def telling():
    """Return a replica whose ranks take the digest of their state, before the exchange."""
    replica, order = computing()
    replica.both(io.Linked(1))
    replica.core.member.memory.state.later = True  # the state after Ready(later=True)
    replica.both(io.Computed(0, order.micro_batches, 2.0))
    assert len(replica.orders(io.TellDigest)) == 2
    return replica, order


def alone_after_a_death(replica, order):
    """Let the other replica die, so that this replica computes the rest of the step."""
    replica.do(io.LinkLost("b", 1, "it died"))
    second = record_of("a", epoch=2, a={"ranks": addresses("a")})
    replica.do(io.FromLeader(m.Epoch(second)))
    rest = tuple(i for i in range(M) if i not in order.micro_batches)
    replica.do(io.FromLeader(m.Resume(second.fence, 0, (m.Assignment("a", rest),))))
    assert len(replica.orders(io.Compute)) == 2
    return rest


def test_a_late_digest_of_one_rank_does_not_make_the_ranks_diverge():
    replica, order = telling()
    replica.rank(0, io.Digested(0, "zero"))
    rest = alone_after_a_death(replica, order)
    replica.rank(0, io.Computed(0, rest, 2.0))
    replica.rank(1, io.Digested(0, "one"))  # rank 1 answers in order: its digest, then its share
    assert not replica.orders(io.Stop)
    assert replica.core.member.memory.state.digest == replica_digest(["zero", "one"])
    replica.rank(1, io.Computed(0, rest, 2.0))
    assert not replica.orders(io.Stop) and replica.core.member.memory.waiting


def test_a_digest_that_comes_after_both_ranks_have_computed_is_not_lost():
    replica, order = telling()
    rest = alone_after_a_death(replica, order)
    replica.rank(1, io.Digested(0, "one"))
    replica.rank(1, io.Computed(0, rest, 2.0))
    replica.rank(0, io.Digested(0, "zero"))
    replica.rank(0, io.Computed(0, rest, 2.0))
    assert replica.core.member.memory.state.digest == replica_digest(["zero", "one"])


def test_ranks_that_tell_the_digests_of_different_steps_end_the_replica():
    replica, _ = telling()
    replica.rank(0, io.Digested(0, "zero"))
    replica.rank(1, io.Digested(1, "one"))
    (stop, _) = replica.orders(io.Stop)
    assert stop.code == 1 and "the ranks of a replica must run the same loop" in stop.reason


def test_a_rank_whose_links_failed_is_not_linked_when_the_other_rank_is():
    replica, _ = computing()
    replica.rank(0, io.Linked(1))
    replica.rank(0, io.LinkFailed(1, "b", "b does not answer"))
    replica.rank(1, io.Linked(1))
    assert 1 not in replica.core.member.epochs.links.up, "rank 0 has no link of it"
    replica.rank(0, io.Linked(1))
    assert 1 in replica.core.member.epochs.links.up, "now both have"


def test_a_fetch_ends_when_every_rank_has_ended_its_own_however_the_first_one_ended():
    """A rank that still writes into its memory must not get the next state to write."""
    replica = newcomer_of_two_ranks()
    number = fetching(replica)
    replica.rank(0, io.FetchFailed("no source delivered it"), number)
    assert replica.core.member.catch_up.fetch.doing == "state"
    replica.rank(1, io.StateFetched(50, "s50"), number)
    assert replica.core.member.catch_up.fetch.doing != "state"
