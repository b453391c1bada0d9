"""The detector of a job on synthetic streams."""

import math
import random

import pytest

from fabric.health.detector import JobDetector
from fabric.health.localise import Scope
from fabric.health.work import WorkAmount
from fabric.model import Member

BEFORE, NOISE = 120, 0.01


class Fleet:
    """Replicas of one process whose times follow their work."""

    def __init__(self, names=("r0", "r1", "r2"), seed=0, **settings):
        self.detector = JobDetector(**settings)
        self.names, self.rng, self.step = list(names), random.Random(seed), 0

    def run(self, steps: int, incarnation=1, **factors: float) -> list[list]:
        """Feed ``steps``; return the slowdowns after each step."""
        after = []
        for _ in range(steps):
            self.step += 1
            for name in self.names:
                lengths = [self.rng.randrange(100, 2000) for _ in range(8)]
                work = WorkAmount.of_documents(lengths, samples=8.0)
                seconds = (1e-5 * work.tokens + 1e-9 * work.squares) * factors.get(name, 1.0)
                seconds *= self.rng.gauss(1, NOISE)
                self.detector.observe(name, incarnation, self.step, work, seconds)
                after.append(self.detector.slowdowns())
        return after


# --- replicas ---------------------------------------------------------------------------------------------


def test_an_undisturbed_job_accuses_no_replica():
    assert not any(Fleet(seed=1).run(500))


def test_a_slow_replica_is_named_within_five_steps_and_cleared_within_twenty():
    fleet = Fleet(seed=2)
    assert not any(fleet.run(BEFORE))
    slow = fleet.run(60, r1=2.0)
    assert any(slow[: 5 * 3]) and all(slow[5 * 3 :])
    assert {x.replica for after in slow for x in after} == {"r1"}
    (slowdown,) = slow[-1]
    assert slowdown.scope is Scope.REPLICA and slowdown.factor == pytest.approx(2.0, rel=0.05)
    speeds = {x.replica: x.speed for x in fleet.detector.speeds()}
    assert speeds == pytest.approx({"r0": 1.0, "r1": 0.5, "r2": 1.0}, rel=0.05)
    assert not any(fleet.run(40)[20 * 3 :])


def test_a_replica_that_was_slow_from_its_first_step_is_named_too():
    for names in (("r0", "r1"), ("r0", "r1", "r2")):
        fleet = Fleet(names, seed=3)
        fleet.run(BEFORE, r0=1.6)
        (slowdown,) = fleet.detector.slowdowns()
        assert (slowdown.replica, slowdown.factor) == ("r0", pytest.approx(1.6, rel=0.05))


@pytest.mark.parametrize("names", [("r0", "r1"), ("r0", "r1", "r2"), tuple(f"r{n}" for n in range(8))])
def test_a_slowdown_of_the_whole_fleet_accuses_no_replica_at_any_moment(names):
    fleet = Fleet(names, seed=4)
    fleet.run(BEFORE)
    seen = [x for after in fleet.run(60, **dict.fromkeys(names, 1.5)) for x in after]
    assert seen and {x.scope for x in seen} == {Scope.JOB}
    assert fleet.detector.slowdowns()[0].units == ()


def test_one_replica_alone_can_only_say_that_the_job_is_slow():
    fleet = Fleet(("r0",), seed=5)
    fleet.run(BEFORE)
    fleet.run(10, r0=1.5)
    (slowdown,) = fleet.detector.slowdowns()
    assert slowdown.scope is Scope.JOB and "nothing to compare it with" in slowdown.evidence


def test_a_failed_replica_is_not_accused_of_being_slow():
    fleet = Fleet(seed=6)
    fleet.run(BEFORE)
    fleet.run(10, r2=3.0)
    assert fleet.detector.slowdowns(failed={"r2"}) == []
    assert [x.replica for x in fleet.detector.slowdowns()] == ["r2"]
    fleet.detector.keep([Member(name, 1, "", "") for name in ("r0", "r1")])
    assert fleet.detector.slowdowns() == []


def test_a_hiccup_of_two_steps_accuses_no_replica():
    fleet = Fleet(seed=7)
    fleet.run(BEFORE)
    assert not any(fleet.run(2, r0=5.0))
    assert not any(fleet.run(60))


def test_more_work_is_not_slowness():
    """A replica that computes a dead replica's part takes longer, as predicted."""
    fleet = Fleet(seed=8)
    fleet.run(BEFORE)
    for step in range(1000, 1030):
        for name in fleet.names:
            parts = [
                WorkAmount.of_documents([fleet.rng.randrange(100, 2000)] * 8)
                for _ in range(1 + (name == "r0"))
            ]
            work = WorkAmount.total(parts)
            fleet.detector.observe(name, 1, step, work, 1e-5 * work.tokens + 1e-9 * work.squares)
        assert fleet.detector.slowdowns() == []


def test_a_slowdown_below_the_floor_is_not_announced():
    fleet = Fleet(seed=9, floor_s=0.2)
    fleet.run(BEFORE)
    assert not any(fleet.run(30, r0=2.0))  # a step takes some 0.1 s


def test_a_new_process_is_learnt_again_and_compared_with_the_others_until_then():
    fleet = Fleet(seed=10)
    fleet.run(BEFORE)
    fleet.run(40, incarnation=2, r0=2.0)
    assert [x.replica for x in fleet.detector.slowdowns()] == []
    fleet = Fleet(seed=11)
    fleet.run(BEFORE)
    for _ in range(60):
        fleet.step += 1
        for name in fleet.names:
            work = WorkAmount(8000.0, 0.0, 8.0)
            is_new = name == "r0"
            fleet.detector.observe(name, 2 if is_new else 1, fleet.step, work, 0.08 * (2 if is_new else 1))
    assert [x.replica for x in fleet.detector.slowdowns()] == ["r0"]


@pytest.mark.parametrize("bad", [-1.0, 0.0, math.nan, math.inf])
def test_impossible_reports_change_nothing(bad):
    fleet = Fleet(seed=13)
    fleet.run(BEFORE)
    before = fleet.detector.speeds()
    for step in range(1000, 1100):
        fleet.detector.observe("r0", 1, step, WorkAmount(8000.0, 0.0, 8.0), bad)
        fleet.detector.observe(
            "r0", 1, step, WorkAmount(-1.0 if bad == 0 else bad, 0.0, 8.0), 1.0
        ) if not bad > 0 else None
    assert fleet.detector.speeds() == before and fleet.detector.slowdowns() == []


def test_steps_may_go_back_after_a_cold_start_and_a_report_counts_once():
    fleet = Fleet(seed=14)
    fleet.run(BEFORE)
    fleet.step = 10
    fleet.run(5)
    assert any(fleet.run(5, r1=2.0))
    work = WorkAmount(8000.0, 0.0, 8.0)
    speeds = fleet.detector.speeds()
    for _ in range(50):
        fleet.detector.observe("r1", 1, fleet.step, work, 9.0)
    assert fleet.detector.speeds() == speeds
