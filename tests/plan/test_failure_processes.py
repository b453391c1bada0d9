"""Failure processes: their rates, what a renewal does, and what they refuse."""

import math

import numpy as np
import pytest

from fabric.plan.failures import (
    Fixed,
    Lemons,
    Racks,
    Repair,
    Trace,
    WeibullRenewal,
    weibull,
)

DAY = 86400.0


def rng(seed=0):
    return np.random.default_rng(seed)


def count_failures(model, units, span_s, seed=0):
    """Count the failures until ``span_s`` of units that come back at once."""
    clocks, count = model.clocks(units, rng(seed)), 0
    while True:
        unit = int(clocks.next_s.argmin())
        at_s = float(clocks.next_s[unit])
        if at_s > span_s:
            return count
        count += 1
        clocks.renew(np.array([unit]), np.array([at_s]))


@pytest.mark.parametrize(
    "model",
    [
        WeibullRenewal(10 * DAY, 1.0),
        Lemons(10 * DAY),
        Racks(10 * DAY, 4, 0.3),
        weibull(DAY / 10, 100),
        Fixed(DAY / 10),
    ],
    ids=lambda model: type(model).__name__,
)
def test_failures_of_a_process_occur_at_its_rate(model):
    """100 units with a mean of 10 days each: 10 failures a day."""
    assert count_failures(model, 100, 60 * DAY) == pytest.approx(600, rel=0.15)


def test_fixed_arrivals_come_on_time_and_in_turn():
    clocks = Fixed(100.0).clocks(3, rng())
    assert clocks.next_s.tolist() == [100, 200, 300]
    clocks.renew(np.array([0]), np.array([150.0]))
    assert clocks.next_s.tolist() == [400, 200, 300]
    clocks.renew(np.array([1]), np.array([1000.0]))  # the unit was away at its failure times 500 and 800
    assert clocks.next_s.tolist() == [400, 1100, 300]


def test_a_rack_takes_all_its_units_at_one_instant():
    clocks = Racks(10 * DAY, per_rack=4, correlated=0.999).clocks(8, rng(2))
    for rack in (clocks.next_s[:4], clocks.next_s[4:]):
        assert len(set(rack.tolist())) == 1


def test_lemons_fail_more_often_than_the_others():
    clocks = Lemons(10 * DAY, share=0.1, factor=50).clocks(1000, rng(1))
    first = np.sort(clocks.next_s)
    assert first[:50].mean() * 20 < first[500:].mean()


def test_a_trace_repeats_after_its_span():
    clocks = Trace(((10.0, 0), (30.0, 5)), 100.0).clocks(2, rng())
    assert clocks.next_s.tolist() == [10, 30]  # unit 5 of the trace stands for unit 1 of a job of two units
    clocks.renew(np.array([0, 1]), np.array([10.0, 120.0]))
    assert clocks.next_s.tolist() == [110, 130]


def test_a_unit_without_failures_in_the_trace_never_fails():
    assert Trace(((10.0, 0),), 100.0).clocks(2, rng()).next_s[1] == math.inf


def test_repairs_take_the_least_time_and_more():
    assert Repair(60.0).draw(3, rng()).tolist() == [60, 60, 60]
    drawn = Repair(60.0, 600.0, 1.0).draw(2000, rng())
    assert drawn.min() > 60
    assert np.median(drawn) == pytest.approx(660, rel=0.1)
