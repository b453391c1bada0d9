"""Data dealt out in lanes: the committed step gives the position in each lane."""

from itertools import count, islice

import pytest

from fabric.integrations.training_data import DealtData, PositionStream


def make(lanes=3, per_step=2):
    begun = []

    def read(lane, begin):
        begun.append((lane, begin))
        return ((lane, number) for number in count(begin))

    return DealtData(read, lanes, per_step), begun


def test_a_step_takes_the_next_micro_batches_of_each_lane():
    data, begun = make()
    taken = [data.micro_batch([position]) for position in range(12)]
    assert taken == [(lane, 2 * step + part) for step in range(2) for lane in range(3) for part in range(2)]
    assert begun == [(0, 0), (1, 0), (2, 0)], "each lane is read once"


def test_a_lane_can_be_read_past_missed_steps():
    data, begun = make()
    data.read_past(1, 5)
    assert data.micro_batch([6 * 5 + 2]) == (1, 10)
    assert begun == [(1, 10)]


def test_a_micro_batch_of_the_step_can_be_taken_again():
    data, begun = make()
    assert [data.micro_batch([p]) for p in (6, 7, 6)] == [(0, 2), (0, 3), (0, 2)]
    assert begun == [(0, 2)]


@pytest.mark.parametrize("position", [0, 1])
def test_an_earlier_step_is_read_anew(position):
    data, begun = make()
    data.micro_batch([60])
    assert data.micro_batch([position]) == (0, position)
    assert begun == [(0, 20), (0, position)]


def test_a_lane_without_a_replica_is_not_read():
    data, begun = make()
    data.read_past(3, 7)
    assert begun == []


def test_positions_go_on_for_ever_from_any_position():
    assert list(islice(PositionStream().iterate_from(7), 3)) == [7, 8, 9]
    assert list(islice(PositionStream(), 2)) == [0, 1]
