"""The work that the user's loop declares, and the times in the heartbeat."""

import math
import time

import pytest
import torch

from fabric.client.loop.step import StepWeight
from fabric.client.process.step_clock import StepClock
from fabric.errors import FabricError
from fabric.health.work import WorkAmount


def step(samples: int = 4) -> StepWeight:
    """Make the weight of a step whose loop has just got a micro-batch."""
    begun = StepWeight()
    begun.begin(samples)
    return begun


@pytest.mark.parametrize("lengths", [[3, 4], (3.0, 4.0), torch.tensor([3, 4]), (x for x in (3, 4))])
def test_the_lengths_of_packed_documents(lengths):
    begun = step()
    assert begun.add(2.0, lengths) == 2.0
    assert begun.take_work(4) == WorkAmount(7.0, 25.0, 4.0)


@pytest.mark.parametrize("number", [512, 512.0, torch.tensor(512)])
def test_one_declared_number_is_the_work_of_the_step(number):
    begun = step()
    begun.add(None, number)
    assert begun.take_work(4) == WorkAmount(512.0, 0.0, 4.0)


def test_undeclared_work_is_the_number_of_samples():
    begun = step()
    begun.add(None, None)
    assert begun.take_work(4) == WorkAmount(4.0, 0.0, 4.0)
    begun.add(None, 9)
    begun.begin(4)  # the next micro-batch has its own declared work
    assert begun.take_work(4) == WorkAmount(4.0, 0.0, 4.0)


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, [9, -4], [math.nan], [math.inf]])
def test_impossible_work_is_refused(bad):
    with pytest.raises(FabricError, match="the work of a micro-batch is negative or no number: give"):
        step().add(None, bad)


def test_a_micro_batch_that_is_computed_twice_counts_twice():
    clock = StepClock(mark=100.0)
    clock.compute_s = 0.5
    for _ in range(2):
        clock.count(3, WorkAmount(7.0, 25.0, 4.0))
    clock.count(5, WorkAmount(1.0, 1.0, 4.0))
    times = clock.times(0.1, {})
    assert times.work == {3: 14.0, 5: 1.0}
    assert (times.micro_batches, times.samples, times.squares) == (3, 12.0, 51.0)
    empty = clock.times(0.0, {})
    assert (empty.compute_s, empty.micro_batches, empty.samples, empty.squares, empty.work) == (
        0,
        0,
        0,
        0,
        {},
    )


def test_time_that_does_not_count_is_left_out_of_the_lap(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = StepClock(mark=100.0)
    now[0] = 110.0
    clock.leave_out(4.0)
    assert clock.lap() == 6.0
    now[0] = 112.0
    clock.leave_out(50.0)  # a part of this time was counted before
    assert clock.lap() == 0.0
