"""The times of all ranks reach the replica's heartbeat."""

from protocol.test_rank_orders import Replica

from fabric.client.loop.start import stages_of
from fabric.model import RankTimes, StepTimes
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages.rank_messages import (
    MOST_TIMED_RANKS,
    FromHost,
    RankOutcome,
    decode_outcomes,
    encode_outcome,
    replica_times,
)
from fabric.protocol.messages.wire import encode_value


def times(seconds: float, waited_s: float = 0.0, **more) -> StepTimes:
    return StepTimes(compute_s=seconds, waited_s=waited_s, work={0: 5.0, 3: 2.0}, squares=9.0, **more)


def test_the_replica_reports_rank_zeros_times_and_an_entry_for_each_rank():
    combined = replica_times([times(2.0, 0.5, exchange_s=1.0), times(2.1, 2.0)])
    assert (combined.compute_s, combined.exchange_s) == (2.0, 1.0)
    assert combined.ranks == (RankTimes(1.5, 0.5, 7.0, 9.0), RankTimes(0.1, 2.0, 7.0, 9.0))


def test_the_ready_of_all_ranks_becomes_the_next_heartbeats_times_without_another_message():
    replica = Replica()
    before = len(replica.effects)
    replica.rank(0, io.Ready(0, "d", times(2.0)))
    assert replica.effects[before:] == []
    replica.rank(1, io.Ready(0, "d", times(2.0, 1.5)))
    (beat,) = [
        x.message
        for x in replica.effects
        if isinstance(x, io.SendLeader) and isinstance(x.message, m.Heartbeat) and x.message.times
    ]
    assert [x.compute_s for x in beat.times.ranks] == [2.0, 0.5]


def test_times_travel_between_ranks():
    outcome = RankOutcome(io.Ready(7, "d", times(2.0, 1.0)))
    assert decode_outcomes(encode_outcome(outcome), (0,)) == FromHost((0,), (outcome.event,))


def test_a_rank_without_times_leaves_the_replica_without_them():
    assert replica_times([times(1.0), None]) is None
    assert replica_times([]) is None


def test_more_waiting_than_computing_is_no_time_below_zero():
    assert replica_times([times(1.0, 1.5), times(1.0)]).ranks[0].compute_s == 0.0


def test_the_report_of_many_ranks_stays_small():
    most = replica_times([times(1.234567891, 0.123456789)] * MOST_TIMED_RANKS)
    assert len(most.ranks) == MOST_TIMED_RANKS and len(encode_value(most)) < 6_000
    assert replica_times([times(1.0)] * (MOST_TIMED_RANKS + 1)).ranks == ()


def test_ranks_with_equal_parameter_names_are_one_stage():
    first, second = "the digest of one list of names", "that of another one"
    assert stages_of([first, first]) == ()
    assert stages_of([second, first, second, first]) == (0, 1, 0, 1)
    combined = replica_times([times(1.0)] * 4, (0, 1, 0, 1))
    assert [x.stage for x in combined.ranks] == [0, 1, 0, 1]
