"""The two alarm rules: what each sees, and the blind spots that their docstring names."""

import random

import pytest

from fabric.health.alarm import CusumAlarm


def quiet(alarm: CusumAlarm, seed: int, noise: float = 0.01, samples: int = 300) -> int:
    """Feed undisturbed times; return how often the alarm was raised."""
    rng, raised = random.Random(seed), 0
    for _ in range(samples):
        was = alarm.is_raised
        raised += alarm.observe(rng.gauss(1, noise), 1.0) and not was
    return raised


@pytest.mark.parametrize("noise", [0.001, 0.01, 0.05])
def test_undisturbed_times_raise_no_alarm(noise):
    assert sum(quiet(CusumAlarm(), seed, noise, 500) for seed in range(40)) == 0


def test_a_slowdown_raises_the_alarm_at_once_and_a_small_one_after_some_samples():
    for factor, within in ((1.5, 1), (1.25, 1), (1.1, 3), (1.05, 8)):
        alarm = CusumAlarm()
        quiet(alarm, 1)
        needed = next(n for n in range(1, 100) if alarm.observe(factor, 1.0))
        assert needed <= within, factor


def test_cusum_misses_slowdowns_below_its_slack_and_from_the_first_step():
    alarm = CusumAlarm()
    quiet(alarm, 2, noise=0.002)
    assert not any(alarm.observe(1.015, 1.0) for _ in range(20)), "below its slack of 2 %"
    always = CusumAlarm()
    assert not any(always.observe(2.0, 1.0) for _ in range(300)), "there from the beginning"


def test_the_alarm_lasts_until_the_slowdown_ends_and_then_ends_within_some_steps():
    alarm, rng = CusumAlarm(), random.Random(3)
    quiet(alarm, 3)
    assert all(alarm.observe(1.5 * rng.gauss(1, 0.01), 1.0) for _ in range(500))
    needed = next(n for n in range(1, 100) if not alarm.observe(rng.gauss(1, 0.01), 1.0))
    assert needed <= 15
    assert quiet(alarm, 4) == 0


def test_times_during_an_alarm_are_not_learnt_as_usual():
    alarm = CusumAlarm()
    quiet(alarm, 5)
    for _ in range(1000):
        alarm.observe(1.3, 1.0)
    assert alarm.is_raised and alarm.statistic > 0


def test_a_constant_error_of_the_prediction_is_usual():
    alarm, rng = CusumAlarm(), random.Random(6)
    assert not any(alarm.observe(1.4 * rng.gauss(1, 0.01), 1.0) for _ in range(200))
