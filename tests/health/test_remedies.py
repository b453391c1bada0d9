"""The planner: which remedies it proposes, with which gain, cost and reason, and what it leaves alone."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fabric.health.planning import (
    LEAST_GAIN,
    ModelCut,
    Remedy,
    RemedyKind,
    ReplicaHealth,
    StageLayout,
    propose,
)
from fabric.model import Value

SHARES, REPARTITION, EXCLUSION, DRAIN = RemedyKind
ALONE = StageLayout(((0,),), (12,))
PIPELINE = StageLayout(((0,), (1,), (2,)), (4, 4, 4))
GROUP = StageLayout(((0, 1, 2, 3),), (12,))
PLAIN = ModelCut()


class Job(Value):
    """The arguments of ``propose``."""

    replicas: tuple[ReplicaHealth, ...]
    cut: ModelCut = PLAIN
    spares: tuple[ReplicaHealth, ...] = ()

    @property
    def total(self) -> int:
        return sum(replica.micro_batches for replica in self.replicas)

    def remedies(self) -> tuple[Remedy, ...]:
        return propose(self.total, self.replicas, self.cut, self.spares)


def single(name: str, speed: float, micro_batches: int = 4) -> ReplicaHealth:
    return ReplicaHealth(name, ALONE, (speed,), micro_batches)


def fleet_of(speeds, micro_batches: int = 4) -> Job:
    return Job(tuple(single(f"r{place}", speed, micro_batches) for place, speed in enumerate(speeds)))


def kinds(proposal) -> list[RemedyKind]:
    return [remedy.kind for remedy in proposal]


# --- shares -----------------------------------------------------------------------------------------------


def test_shares_of_the_design_notes_example_are_reproduced():
    (remedy,) = fleet_of((1, 1, 1, 0.5)).remedies()
    assert remedy.kind is SHARES
    assert list(remedy.shares.values()) == [5, 5, 4, 2]
    assert remedy.gain == pytest.approx(8 / 5 - 1)
    assert remedy.cost_s == 0
    assert remedy.reason == (
        "replica r3 computes at 0.50 of the median speed: with 2 and not 4 micro-batches"
        " a step takes 0.62 of its time"
    )


@given(st.floats(0.01, 100))
def test_a_fleet_that_is_slow_as_a_whole_moves_nothing(speed):
    assert fleet_of([speed] * 4).remedies() == ()
    pipelines = tuple(ReplicaHealth(f"r{i}", PIPELINE, (speed,) * 3, 4) for i in range(3))
    assert Job(pipelines, ModelCut(can_repartition=True)).remedies() == ()


@given(st.lists(st.floats(0.99, 1.01), min_size=2, max_size=6))
def test_noise_within_the_hysteresis_moves_nothing(speeds):
    assert fleet_of(speeds, 64).remedies() == ()


def test_a_remedy_that_gains_less_than_the_threshold_is_not_proposed():
    assert fleet_of((1, 1, 1, 0.955), 40).remedies() == ()
    assert kinds(fleet_of((1, 1, 1, 0.9), 40).remedies()) == [SHARES]


@pytest.mark.parametrize("counts", [(3, 4), (51, 51, 51, 47)])
def test_equal_replicas_keep_their_division(counts):
    assert Job(tuple(single(f"r{i}", 1, count) for i, count in enumerate(counts))).remedies() == ()


# --- properties -------------------------------------------------------------------------------------------

rank_speeds = st.one_of(st.just(1.0), st.floats(0.05, 1.2))
CUTS = {
    ALONE: PLAIN,
    PIPELINE: ModelCut(can_repartition=True),
    GROUP: ModelCut(sizes=(1, 2)),
}


@st.composite
def jobs(draw) -> Job:
    usual = draw(st.sampled_from(list(CUTS)))
    ranks = 1 + max(rank for group in usual.groups for rank in group)
    replicas = [
        ReplicaHealth(
            f"r{place}",
            usual,
            tuple(draw(st.lists(rank_speeds, min_size=ranks, max_size=ranks))),
            draw(st.integers(0, 12)),
        )
        for place in range(draw(st.integers(1, 4)))
    ]
    spares = (ReplicaHealth("s0", usual, (1.0,) * ranks, 0),) if draw(st.booleans()) else ()
    return Job(tuple(replicas), draw(st.sampled_from([CUTS[usual], PLAIN])), spares)


@settings(max_examples=60)
@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6), st.integers(1, 12))
def test_planning_again_from_the_outcome_proposes_no_shares(speeds, micro_batches):
    before = fleet_of(speeds, micro_batches)
    first = next((r for r in before.remedies() if r.kind is SHARES), None)
    if first is None:
        return
    after = tuple(replace(r, micro_batches=first.shares[r.replica]) for r in before.replicas)
    assert SHARES not in kinds(Job(after).remedies())


# --- layouts ----------------------------------------------------------------------------------------------


def slow_stage(speed: float = 0.4, replicas: int = 2, cut: ModelCut = CUTS[PIPELINE]) -> Job:
    healthy = tuple(ReplicaHealth(f"r{i}", PIPELINE, (1, 1, 1), 16) for i in range(replicas))
    return Job((healthy[0], replace(healthy[1], speeds=(1, speed, 1)), *healthy[2:]), cut)


def test_a_slow_stage_gets_shares_first_and_its_own_repartition_second():
    proposal = slow_stage().remedies()
    assert kinds(proposal) == [SHARES, REPARTITION]
    shares, repartition = proposal
    assert shares.cost_s == 0 < repartition.cost_s < 60
    assert repartition.replica == "r1" and repartition.layout.layers == (5, 2, 5)
    assert repartition.reason.startswith(
        "stage 1 of replica r1 computes at 0.40 of the fastest stage: with the layers 5+2+5 and not 4+4+4"
    )


def test_a_repartition_that_does_not_pay_back_its_rejoin_is_not_proposed(monkeypatch):
    monkeypatch.setattr("fabric.health.planning.HORIZON_S", 10.0)
    assert kinds(slow_stage().remedies()) == [SHARES]


def test_the_users_own_uneven_split_of_layers_stays():
    own = replace(PIPELINE, layers=(5, 4, 3))
    healthy = ReplicaHealth("r0", own, (1, 1, 1), 8)
    assert Job((healthy, replace(healthy, replica="r1")), CUTS[PIPELINE]).remedies() == ()


def test_a_replica_with_one_slow_rank_of_four_comes_back_with_two():
    healthy = ReplicaHealth("r0", GROUP, (1.0,) * 4, 16)
    slow = replace(healthy, replica="r1", speeds=(1, 1, 0.2, 1))
    (remedy,) = [r for r in Job((healthy, slow), CUTS[GROUP]).remedies() if r.kind is EXCLUSION]
    assert remedy.replica == "r1" and remedy.layout == StageLayout(((0, 1),), (12,))
    assert sum(remedy.shares.values()) == 32 and 0 < remedy.shares["r1"] < 16
    assert "with groups of 2 and not 4 ranks" in remedy.reason
    slightly = replace(slow, speeds=(1, 1, 0.9, 1))
    assert EXCLUSION not in kinds(Job((healthy, slightly), CUTS[GROUP]).remedies())


def test_a_script_that_cannot_build_other_layouts_gets_shares_alone():
    assert kinds(slow_stage(cut=PLAIN).remedies()) == [SHARES]


# --- drain ------------------------------------------------------------------------------------------------


def test_a_spare_takes_the_place_of_a_slow_replica_and_comes_last():
    slow = fleet_of((1, 1, 1, 0.4))
    proposal = replace(slow, spares=(single("s0", 1.0, 0),)).remedies()
    assert kinds(proposal) == [SHARES, DRAIN]
    drain = proposal[1]
    assert (drain.replica, drain.joins) == ("r3", "s0")
    assert list(drain.shares.values()) == [4, 4, 4, 4]
    assert drain.gain == pytest.approx(5 / 4 - 1)


def test_a_replica_so_slow_that_one_micro_batch_is_too_many_is_drained_without_a_spare():
    drain = next(remedy for remedy in fleet_of((1, 1, 1, 0.05)).remedies() if remedy.kind is DRAIN)
    assert (drain.replica, drain.joins) == ("r3", "")
    assert list(drain.shares.values()) == [6, 5, 5]


def test_the_last_replica_is_not_drained():
    assert fleet_of((0.1,)).remedies() == ()


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", [math.nan, math.inf, -1.0, 0.0])
def test_an_impossible_speed_stops_the_planning(speed):
    assert fleet_of((1, 1, 0.2, speed)).remedies() == ()


@pytest.mark.parametrize(
    "broken",
    [
        Job(()),
        fleet_of((1, 0.2), micro_batches=0),
        Job((ReplicaHealth("r0", PIPELINE, (1, 0.2), 4),)),
    ],
)
def test_a_job_that_cannot_be_planned_gets_no_remedy(broken):
    assert broken.remedies() == ()


@settings(max_examples=100, deadline=None)
@given(jobs())
def test_every_plan_is_whole_and_worth_its_cost(health):
    proposal = health.remedies()
    assert kinds(proposal) == sorted(kinds(proposal), key=list(RemedyKind).index)
    there = {r.replica: r for r in (*health.replicas, *health.spares)}
    for remedy in proposal:
        assert remedy.gain >= LEAST_GAIN
        assert remedy.reason and remedy.cost_s >= 0
        assert remedy.gain * 3600 >= remedy.cost_s
        if remedy.layout is not None:
            ranks = {rank for group in remedy.layout.groups for rank in group}
            assert ranks <= set(range(len(there[remedy.replica].speeds)))
            assert sum(remedy.layout.layers) == sum(there[remedy.replica].layout.layers)
        drained = {remedy.replica} if remedy.kind is DRAIN else set()
        joined = {remedy.joins} - {""}
        assert remedy.shares.keys() == {r.replica for r in health.replicas} - drained | joined
        assert joined <= {spare.replica for spare in health.spares}
        assert sum(remedy.shares.values()) == health.total
