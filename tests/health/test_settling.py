"""The estimate of a changed speed is acted upon only when it has settled."""

import random
from collections.abc import Iterable

import pytest

from fabric.health.detector import AGREES, MOST_WAITED, SETTLED, JobDetector, Settling
from fabric.health.work import WorkAmount

BEFORE = 80  # number of steps: the warm-up and some more


def settled_after(estimates: Iterable[float]) -> int | None:
    """The number of estimates after which the speed first counts as settled."""
    settling = Settling()
    for count, estimate in enumerate(estimates, 1):
        settling.observe(estimate)
        if settling.is_settled:
            return count
    return None


def test_equal_estimates_settle_at_once():
    assert settled_after([2.0] * 10) == SETTLED


def test_an_estimate_that_still_moves_waits():
    assert settled_after([1.2, 1.5, 1.8, 2.0, 2.01, 2.02, 2.0, 2.01]) == 8


def test_a_speed_that_never_agrees_counts_as_settled_after_a_bounded_wait():
    assert settled_after([1.5, 2.0] * MOST_WAITED) == MOST_WAITED


def test_a_settled_estimate_that_moves_again_waits_again():
    settling = Settling()
    for estimate in [2.0] * SETTLED + [2.0 * AGREES * 1.01]:
        settling.observe(estimate)
    assert not settling.is_settled


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("first", [1.15, 1.5, 2.5])
def test_the_first_step_of_a_slowdown_does_not_decide_the_speed_that_is_acted_upon(seed, first):
    """A slowdown begins within a step, so its first steps are slow by another factor."""
    rng, detector = random.Random(seed), JobDetector()
    acted_at = None
    for step in range(BEFORE + 40):
        slow = 1.0 if step < BEFORE else first if step < BEFORE + 3 else 4.0
        for name, factor in (("r0", 1.0), ("r1", slow), ("r2", 1.0)):
            tokens = float(rng.randrange(1000, 20000))
            seconds = 1e-5 * tokens * factor * rng.gauss(1, 0.01)
            detector.observe(name, 1, step, WorkAmount(tokens, 0.0, 4.0, 4), seconds)
        if step < BEFORE:
            continue
        (speed,) = [x for x in detector.speeds() if x.replica == "r1"]
        if speed.is_slow and speed.is_settled and acted_at is None:
            acted_at = step
            assert speed.speed == pytest.approx(0.25, rel=0.1)
    assert acted_at is not None and acted_at <= BEFORE + 12
