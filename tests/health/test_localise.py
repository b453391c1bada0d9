"""The place of a slowdown (rank, stage, link, replica or job), and the ranks that can confirm it."""

import math

import pytest

from fabric.health.localise import Scope, Unit, localise


def job(replicas=2, stages=2, ranks=2, **slow: float) -> dict[Unit, float]:
    """Ratios of all units; ``r0s1k0=1.5`` names a slow one, ``r0s1`` a stage, ``r0`` a replica."""
    units = [Unit(f"r{r}", s, k) for r in range(replicas) for s in range(stages) for k in range(ranks)]
    return {
        unit: next(
            (f for place, f in slow.items() if f"{unit.replica}s{unit.stage}k{unit.rank}".startswith(place)),
            1.0,
        )
        for unit in units
    }


def places(ratios) -> list[tuple[Scope, tuple[Unit, ...]]]:
    return [(x.scope, x.units) for x in localise(ratios)]


def test_without_a_slow_replica_none_is_accused():
    assert localise(job()) == []
    assert localise(job(r0s1k0=1.09)) == []
    assert localise({}) == []


def test_one_slow_rank_is_named():
    assert places(job(r0s1k0=1.5)) == [(Scope.RANK, (Unit("r0", 1, 0),))]


def test_one_slow_stage_is_named():
    assert places(job(r1s0=1.3)) == [(Scope.STAGE, (Unit("r1", 0, 0), Unit("r1", 0, 1)))]


def test_one_slow_stage_of_the_only_replica_is_named():
    assert places(job(1, 4, 1, r0s2=1.5)) == [(Scope.STAGE, (Unit("r0", 2, 0),))]


def test_a_replica_that_is_slow_in_all_stages_is_named():
    (slowdown,) = localise(job(3, r2=1.4))
    assert (slowdown.scope, slowdown.replica, len(slowdown.units)) == (Scope.REPLICA, "r2", 4)
    assert slowdown.factor == pytest.approx(1.4)
    assert "replica r2 takes 1.40 times as long as predicted" in slowdown.evidence


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (3, 2, 2), (16, 4, 8)])
def test_a_slowdown_of_all_replicas_accuses_none(shape):
    ratios = dict.fromkeys(job(*shape), 1.5)
    (slowdown,) = localise(ratios)
    assert (slowdown.scope, slowdown.units) == (Scope.JOB, ())


def test_the_slowest_of_a_slow_fleet_is_accused():
    ratios = dict.fromkeys(job(4, 1, 1), 1.5) | {Unit("r3"): 3.0}
    (slowdown,) = localise(ratios)
    assert (slowdown.replica, slowdown.factor) == ("r3", 2.0)


def test_several_slow_units_are_listed_with_the_slowest_first():
    assert [x.replica for x in localise(job(5, 1, 1, r1=1.3, r3=2.0))] == ["r3", "r1"]


def test_impossible_ratios_do_not_count():
    bad = {Unit("r7"): math.nan, Unit("r8"): -1.0, Unit("r9"): 0.0, Unit("ra"): math.inf}
    assert localise(bad) == []
    assert places(job(3, 1, 1, r0=1.5) | bad) == [(Scope.REPLICA, (Unit("r0"),))]


def test_a_replica_of_thousands_is_compared_with_a_few_equal_replicas():
    ratios = job(3000, 1, 1) | {Unit("r77"): 1.6}
    assert places(ratios) == [(Scope.REPLICA, (Unit("r77"),))]
