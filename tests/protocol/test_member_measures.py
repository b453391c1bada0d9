"""A member that is asked for a micro-benchmark runs it once, before its next share of a step."""

from protocol.test_rank_orders import FIRST, M, Replica

from fabric.model import SpeedMeasurement, StepTimes
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages.rank_messages import replica_times
from fabric.protocol.rules.assignment import assign


def computing(replica: Replica) -> list[io.Compute]:
    """The orders of both ranks to compute the replica's half of the first step."""
    replica.both(io.Ready(0, "d"))
    replica.do(io.FromLeader(m.Epoch(FIRST)))
    table = tuple(m.Assignment(n, ids) for n, ids in assign(range(M), FIRST.roster).items())
    replica.do(io.FromLeader(m.Resume(FIRST.fence, 0, table)))
    return replica.orders(io.Compute)


def ask(replica: Replica, number: int, echo: str = "") -> None:
    replica.do(io.FromLeader(m.HeartbeatAck(1, measure=number, echo=echo)))


def test_a_request_is_taken_once_however_often_it_is_repeated():
    replica = Replica()
    ask(replica, 7)
    assert replica.core.member.session.take_measure() == 7
    assert replica.core.member.session.take_measure() == 0
    ask(replica, 7)
    assert replica.core.member.session.take_measure() == 0, "the request is repeated until it is answered"
    ask(replica, 0)
    ask(replica, 9)
    assert replica.core.member.session.take_measure() == 9


def test_both_ranks_run_it_before_their_share_and_no_other_step_repeats_it():
    replica = Replica()
    ask(replica, 7)
    assert [(x.measure, x.echo) for x in computing(replica)] == [(7, ""), (7, "")]
    assert replica.core.member.session.take_measure() == 0


def test_an_echo_goes_to_the_member_that_its_own_request_names():
    replica = Replica()
    ask(replica, 7, "r5")
    ask(replica, 9, "r2")
    ask(replica, 7, "r5")
    assert [(x.measure, x.echo) for x in computing(replica)] == [(9, "r2"), (9, "r2")]


def test_a_step_without_a_request_echoes_nobody_although_an_earlier_step_did():
    replica = Replica()
    ask(replica, 7, "r2")
    assert replica.core.member.session.take_measure() == 7
    assert [(x.measure, x.echo) for x in computing(replica)] == [(0, ""), (0, "")]


def test_a_member_that_was_not_asked_measures_nothing():
    assert [x.measure for x in computing(Replica())] == [0, 0]


def test_the_answers_of_all_ranks_are_in_one_heartbeat():
    times = [StepTimes(compute_s=1.0, measured=(SpeedMeasurement(7, rank, 0.01),)) for rank in range(3)]
    assert [x.rank for x in replica_times(times).measured] == [0, 1, 2]
