"""Ranks whose digests of the state arrive late: the core does not wait for them, and may go on meanwhile."""

from protocol.makers import record_of
from protocol.test_rank_orders import M, addresses, computing

from fabric.protocol import member_io as io
from fabric.protocol import messages as m
from fabric.protocol.rank_orders import replica_digest


def telling():
    """Both ranks were asked for the digest of their state; the round has not begun to be exchanged."""
    replica, order = computing()
    replica.both(io.Linked(1))
    replica.core.member.state.later = True  # as Ready(later=True) has it
    replica.both(io.Computed(0, order.micro_batches, 2.0))
    assert len(replica.orders(io.TellDigest)) == 2
    return replica, order


def alone_after_a_death(replica, order):
    """The other replica dies, and this one is to compute the rest of the step."""
    replica.do(io.LinkLost("b", 1, "it died"))
    second = record_of("a", epoch=2, a={"ranks": addresses("a")})
    replica.do(io.FromLeader(m.Epoch(second)))
    rest = tuple(i for i in range(M) if i not in order.micro_batches)
    replica.do(io.FromLeader(m.Resume(second.fence, 0, (m.Assignment("a", rest),))))
    assert len(replica.orders(io.Compute)) == 2
    return rest


def test_a_digest_that_one_rank_tells_late_is_no_disagreement_of_the_ranks():
    replica, order = telling()
    replica.rank(0, io.Digested(0, "zero"))
    rest = alone_after_a_death(replica, order)
    replica.rank(0, io.Computed(0, rest, 2.0))
    replica.rank(1, io.Digested(0, "one"))  # rank 1 obeys in order: its digest, then its share
    assert not replica.orders(io.Stop)
    assert replica.core.member.state.digest == replica_digest(["zero", "one"])
    replica.rank(1, io.Computed(0, rest, 2.0))
    assert not replica.orders(io.Stop) and replica.core.member.waiting


def test_a_digest_is_not_lost_where_both_ranks_have_computed_before_the_slower_one_tells_it():
    replica, order = telling()
    rest = alone_after_a_death(replica, order)
    replica.rank(1, io.Digested(0, "one"))
    replica.rank(1, io.Computed(0, rest, 2.0))
    replica.rank(0, io.Digested(0, "zero"))
    replica.rank(0, io.Computed(0, rest, 2.0))
    assert replica.core.member.state.digest == replica_digest(["zero", "one"])


def test_ranks_that_tell_the_digests_of_different_steps_end_the_replica():
    replica, _ = telling()
    replica.rank(0, io.Digested(0, "zero"))
    replica.rank(1, io.Digested(1, "one"))
    (stop, _) = replica.orders(io.Stop)
    assert stop.code == 1 and "the ranks of a replica must run the same loop" in stop.reason
