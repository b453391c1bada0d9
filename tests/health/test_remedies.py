"""The planner: which remedies it proposes, with which gain, cost and reason, and what it leaves alone."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.health.planning.layout import ModelCut, ReplicaHealth, StageLayout, exclude
from fabric.health.planning.remedies import ActionRules, JobHealth, RemedyKind, propose

SHARES, REPARTITION, EXCLUSION, DRAIN = RemedyKind
ALONE = StageLayout(((0,),), (12,))
PIPELINE = StageLayout(((0,), (1,), (2,)), (4, 4, 4))
GROUPS = StageLayout(((0, 1, 2, 3), (4, 5, 6, 7)), (6, 6))
CUT = ModelCut(12, sizes=(1, 2, 4))


def single(name: str, speed: float, micro_batches: int = 4) -> ReplicaHealth:
    return ReplicaHealth(name, 1, ALONE, (speed,), micro_batches)


def job(*replicas: ReplicaHealth, cut: ModelCut = CUT, **values) -> JobHealth:
    return JobHealth(sum(replica.micro_batches for replica in replicas), replicas, cut, **values)


def fleet_of(speeds, micro_batches: int = 4) -> JobHealth:
    return job(*(single(f"r{place}", speed, micro_batches) for place, speed in enumerate(speeds)))


def kinds(proposal) -> list[RemedyKind]:
    return [remedy.kind for remedy in proposal]


# --- shares -----------------------------------------------------------------------------------------------


def test_shares_of_the_design_notes_example_are_reproduced():
    (remedy,) = propose(fleet_of((1, 1, 1, 0.5)), ActionRules())
    assert remedy.kind is SHARES
    assert [entry.micro_batches for entry in remedy.plan.replicas] == [5, 5, 4, 2]
    assert remedy.gain == pytest.approx(8 / 5 - 1)
    assert remedy.cost_s == 0
    assert remedy.reason == (
        "replica r3 computes at 0.50 of the median speed: with 2 and not 4 micro-batches"
        " a step takes 0.62 of its time"
    )


@given(st.floats(0.01, 100))
def test_a_fleet_that_is_slow_as_a_whole_moves_nothing(speed):
    assert propose(fleet_of([speed] * 4), ActionRules()) == ()
    pipelines = job(*(ReplicaHealth(f"r{i}", 1, PIPELINE, (speed,) * 3, 4) for i in range(3)))
    assert propose(pipelines, ActionRules()) == ()


@given(st.lists(st.floats(0.99, 1.01), min_size=2, max_size=6))
def test_noise_within_the_hysteresis_moves_nothing(speeds):
    assert propose(fleet_of(speeds, 64), ActionRules()) == ()


def test_a_remedy_that_gains_less_than_the_threshold_is_not_proposed():
    slightly_slow = fleet_of((1, 1, 1, 0.9), 40)
    assert propose(slightly_slow, ActionRules(least_gain=0.2)) == ()
    assert kinds(propose(slightly_slow, ActionRules(least_gain=0.05))) == [SHARES]


def test_shares_are_equal_again_when_the_cause_is_gone_although_the_gain_is_small():
    shares = (51, 51, 51, 47)
    back = job(*(single(f"r{i}", 1.0, count) for i, count in enumerate(shares)))
    (remedy,) = propose(back, ActionRules(least_gain=0.5))
    assert remedy.undoes
    assert [entry.micro_batches for entry in remedy.plan.replicas] == [50, 50, 50, 50]


def test_equal_replicas_keep_a_division_with_a_remainder():
    assert propose(job(single("r0", 1, 3), single("r1", 1, 4)), ActionRules()) == ()


@pytest.mark.parametrize(
    ("groups", "layers"),
    [((), ()), (((0,), ()), (1, 1)), (((0,), (0,)), (1, 1)), (((0,), (1,)), (2,)), (((0,), (1,)), (2, 0))],
)
def test_a_layout_with_holes_cannot_be_made(groups, layers):
    with pytest.raises(ValueError, match="give each"):
        StageLayout(groups, layers)


@pytest.mark.parametrize("bad", [{"least_gain": -1.0}, {"horizon_s": float("nan")}, {"rejoin_s": -1}])
def test_negative_or_nonfinite_rules_of_adaptation_are_refused(bad):
    with pytest.raises(ValueError, match="a rule of adaptation is negative or no number"):
        ActionRules(**bad)


# --- properties -------------------------------------------------------------------------------------------

rank_speeds = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.05, 1.2))


@st.composite
def jobs(draw) -> JobHealth:
    usual = draw(st.sampled_from([ALONE, PIPELINE, GROUPS]))
    ranks = 1 + max(rank for group in usual.groups for rank in group)
    replicas = [
        ReplicaHealth(
            f"r{place}",
            draw(st.sampled_from([0, 1, 1, 1])),
            usual,
            tuple(draw(st.lists(rank_speeds, min_size=ranks, max_size=ranks))),
            draw(st.integers(0, 12)),
        )
        for place in range(draw(st.integers(1, 4)))
    ]
    spares = (ReplicaHealth("s0", 1, usual, (1.0,) * ranks, 0),) if draw(st.booleans()) else ()
    cut = replace(CUT, can_repartition=draw(st.booleans()), can_resize=draw(st.booleans()))
    return JobHealth(draw(st.integers(1, 40)), tuple(replicas), cut, spares)


@settings(max_examples=60)
@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6), st.integers(1, 12))
def test_planning_again_from_the_outcome_proposes_no_shares(speeds, micro_batches):
    before = fleet_of(speeds, micro_batches)
    first = next((r for r in propose(before, ActionRules()) if r.kind is SHARES), None)
    if first is None:
        return
    counts = {entry.replica: entry.micro_batches for entry in first.plan.replicas}
    after = replace(
        before, replicas=tuple(replace(r, micro_batches=counts[r.replica]) for r in before.replicas)
    )
    assert SHARES not in kinds(propose(after, ActionRules()))


# --- layouts ----------------------------------------------------------------------------------------------


def slow_stage(speed: float = 0.4) -> JobHealth:
    healthy = ReplicaHealth("r0", 1, PIPELINE, (1, 1, 1), 16)
    return job(healthy, replace(healthy, replica="r1", speeds=(1, speed, 1)))


def test_a_slow_stage_gets_shares_first_and_its_own_repartition_second():
    proposal = propose(slow_stage(), ActionRules())
    assert kinds(proposal) == [SHARES, REPARTITION]
    shares, repartition = proposal
    assert shares.cost_s == 0 < repartition.cost_s < 60
    entry = repartition.plan.of("r1")
    assert entry.layout.layers == (5, 2, 5)
    assert repartition.reason.startswith(
        "stage 1 of replica r1 computes at 0.40 of the fastest stage: with the layers 5+2+5 and not 4+4+4"
    )


def test_a_repartition_that_does_not_pay_back_its_rejoin_is_not_proposed():
    assert kinds(propose(slow_stage(), ActionRules(horizon_s=10.0))) == [SHARES]


def test_the_users_own_uneven_split_of_layers_stays():
    own = replace(PIPELINE, layers=(5, 4, 3))
    healthy = ReplicaHealth("r0", 1, own, (1, 1, 1), 8)
    assert propose(job(healthy, replace(healthy, replica="r1")), ActionRules()) == ()


def test_a_replica_that_lost_one_rank_of_four_comes_back_with_two():
    healthy = ReplicaHealth("r0", 1, GROUPS, (1.0,) * 8, 8)
    lost = ReplicaHealth("r1", 0, GROUPS, (1, 1, 1, 0, 1, 1, 1, 1), 0)
    proposal = propose(job(replace(healthy, micro_batches=16), lost), ActionRules())
    (remedy,) = [r for r in proposal if r.kind is EXCLUSION]
    entry = remedy.plan.of("r1")
    assert entry.layout.groups == ((0, 1), (4, 5, 6, 7))
    assert entry.layout.layers == (4, 8)  # the stage of two ranks gets half as many layers
    assert remedy.cost_s == 0  # the change costs nothing, because the replica is away already
    assert sum(x.micro_batches for x in remedy.plan.replicas) == 16 and 0 < entry.micro_batches < 8
    assert "groups of 2+4 and not 4+4 ranks" in remedy.reason


def test_exclusion_replaces_a_repartition_where_it_gains_enough_more():
    healthy = ReplicaHealth("r0", 1, GROUPS, (1.0,) * 8, 16)
    slow = replace(healthy, replica="r1", speeds=(1, 1, 1, 0.2, 1, 1, 1, 1))
    layouts = [r for r in propose(job(healthy, slow), ActionRules()) if r.kind is not SHARES]
    assert [remedy.kind for remedy in layouts] == [EXCLUSION]
    slightly = replace(slow, speeds=(1, 1, 1, 0.7, 1, 1, 1, 1))
    layouts = [r for r in propose(job(healthy, slightly), ActionRules()) if r.kind is not SHARES]
    assert [remedy.kind for remedy in layouts] == [REPARTITION]


def test_a_stage_without_a_living_group_leaves_its_layers_to_the_others():
    healthy = ReplicaHealth("r0", 1, GROUPS, (1.0,) * 8, 16)
    lost = ReplicaHealth("r1", 0, GROUPS, (0, 0, 0, 0, 1, 1, 1, 1), 0)
    (remedy,) = propose(job(healthy, lost), ActionRules())
    assert remedy.plan.of("r1").layout == StageLayout(((4, 5, 6, 7),), (12,))


@pytest.mark.parametrize(
    ("cut", "sentence"),
    [
        (replace(CUT, most_layers=6), "1 stages of at most 6 layers"),
        (replace(CUT, can_repartition=False), "the script cannot move its layers"),
    ],
)
def test_a_layout_that_the_model_cannot_be_cut_into_is_refused_in_one_sentence(cut, sentence):
    healthy = ReplicaHealth("r0", 1, GROUPS, (1.0,) * 8, 16)
    lost = ReplicaHealth("r1", 0, GROUPS, (0, 0, 0, 0, 1, 1, 1, 1), 0)
    assert propose(job(healthy, lost, cut=cut), ActionRules()) == ()
    with pytest.raises(ValueError, match=sentence):
        exclude(lost.layout, lost.speeds, cut)


def test_a_script_that_cannot_build_other_layouts_gets_shares_alone():
    cut = replace(CUT, can_repartition=False, can_resize=False)
    assert kinds(propose(replace(slow_stage(), cut=cut), ActionRules())) == [SHARES]


# --- drain ------------------------------------------------------------------------------------------------


def test_a_spare_takes_the_place_of_a_slow_replica_and_comes_last():
    slow = fleet_of((1, 1, 1, 0.4))
    spare = single("s0", 1.0, 0)
    proposal = propose(replace(slow, spares=(spare,)), ActionRules())
    assert kinds(proposal) == [SHARES, DRAIN]
    drain = proposal[1]
    assert (drain.replica, drain.plan.joins) == ("r3", "s0")
    assert [entry.micro_batches for entry in drain.plan.replicas] == [4, 4, 4, 4]
    assert drain.gain == pytest.approx(5 / 4 - 1)


def test_a_replica_so_slow_that_one_micro_batch_is_too_many_is_drained_without_a_spare():
    proposal = propose(fleet_of((1, 1, 1, 0.05)), ActionRules())
    drain = next(remedy for remedy in proposal if remedy.kind is DRAIN)
    assert (drain.replica, drain.plan.joins) == ("r3", "")
    assert [entry.micro_batches for entry in drain.plan.replicas] == [6, 5, 5]


def test_the_last_replica_is_not_drained():
    assert propose(fleet_of((0.1,)), ActionRules()) == ()


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", [math.nan, math.inf, -1.0])
def test_an_impossible_speed_stops_the_planning_with_one_sentence(speed):
    fleet = fleet_of((1, 1, speed))
    assert propose(fleet, ActionRules()) == ()
    with pytest.raises(ValueError, match=r"^replica r2: rank 0 has the speed .*measure it again"):
        fleet.replicas[2].check(CUT.layers)


def test_a_dead_replica_of_one_rank_is_left_to_the_failure_detector():
    proposal = propose(fleet_of((1, 1, 0.0)), ActionRules())
    assert DRAIN not in kinds(proposal)


@pytest.mark.parametrize(
    "broken",
    [
        JobHealth(8, (), CUT),
        fleet_of((0.0, 0.0)),
        JobHealth(1, fleet_of((1, 1)).replicas, CUT),
    ],
)
def test_a_job_that_cannot_be_planned_gets_no_remedy(broken):
    assert propose(broken, ActionRules()) == ()


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (replace(fleet_of((1, 1)), cut=ModelCut(13)), "replica r0 has 12 layers and the model 13"),
        (job(ReplicaHealth("r0", 1, PIPELINE, (1, 1), 4)), "replica r0 has 2 speeds for rank 2"),
    ],
)
def test_a_replica_that_does_not_fit_its_job_is_named(broken, sentence):
    assert propose(broken, ActionRules()) == ()
    with pytest.raises(ValueError, match=sentence):
        broken.replicas[0].check(broken.cut.layers)


@settings(max_examples=100, deadline=None)
@given(jobs())
def test_every_plan_is_whole_and_worth_its_cost(health):
    proposal = propose(health, ActionRules())
    assert kinds(proposal) == sorted(kinds(proposal), key=list(RemedyKind).index)
    present = {r.replica for r in health.replicas if r.present}
    spares = {spare.replica for spare in health.spares}
    for remedy in proposal:
        assert remedy.gain >= (0 if remedy.undoes else ActionRules().least_gain)
        assert remedy.reason and remedy.cost_s >= 0
        assert remedy.gain * 3600 >= remedy.cost_s
        alive = {r.replica: r for r in (*health.replicas, *health.spares)}
        for entry in remedy.plan.replicas:
            speeds = alive[entry.replica].speeds
            working = [rank for group in entry.layout.groups for rank in group]
            assert all(speeds[rank] > 0 for rank in working)
            assert sum(entry.layout.layers) == health.cut.layers
        named = [entry.replica for entry in remedy.plan.replicas]
        drained = {remedy.replica} if remedy.kind is DRAIN else set()
        assert len(set(named)) == len(named) and present - drained <= set(named) <= alive.keys()
        assert drained <= present and remedy.plan.joins in {"", *spares}
        assert sum(entry.micro_batches for entry in remedy.plan.replicas) == health.micro_batches
