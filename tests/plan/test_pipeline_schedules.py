"""The makespan of a pipeline's schedule: published check values, closed forms, slow stages, bad input."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from papers.pipeline_schedules import (
    Kind,
    Operation,
    PipelineCosts,
    PipelineSchedule,
    makespan,
    pipeline_orders,
    pipeline_timeline,
    run_orders,
    stage_order,
)

from fabric.health.planning import StageLayout


def unit(stages: int, micro_batches: int, **factors: float) -> PipelineCosts:
    slow = {int(name[1:]): factor for name, factor in factors.items()}
    return PipelineCosts.of_micro_batches([1.0] * micro_batches, stages, factors=slow)


def no_transfer(_sender: int, _receiver: int) -> float:
    return 0.0


# --- check values -----------------------------------------------------------------------------------------


def test_1f1b_with_fused_backward_takes_3_times_m_plus_p_minus_1():
    assert makespan(PipelineSchedule.ONE_F_ONE_B, unit(4, 8)) == 33 == 3 * (8 + 4 - 1)


@pytest.mark.parametrize(("stages", "micro_batches", "expected"), [(4, 4, 18), (2, 4, 14)])
def test_split_1f1b_takes_3m_and_two_per_further_stage(stages, micro_batches, expected):
    assert makespan(PipelineSchedule.SPLIT_1F1B, unit(stages, micro_batches)) == expected
    assert expected == 3 * micro_batches + 2 * (stages - 1)


@pytest.mark.parametrize(("stages", "expected"), [(4, 18.6), (2, 14.2)])
def test_split_1f1b_with_transfers(stages, expected):
    assert makespan(PipelineSchedule.SPLIT_1F1B, unit(stages, 4), 0.1) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("stages", "expected"), [(4, 15), (2, 13)])
def test_zb_h1_takes_3m_and_one_per_further_stage(stages, expected):
    assert makespan(PipelineSchedule.ZB_H1, unit(stages, 4)) == expected == 3 * 4 + stages - 1


def test_split_1f1b_with_one_slow_stage():
    assert makespan(PipelineSchedule.SPLIT_1F1B, unit(4, 8, s1=1.25)) == 33.25


def test_split_1f1b_with_micro_batches_of_different_length():
    costs = PipelineCosts.of_micro_batches([1.0, 2.0, 1.0, 3.0], 2)
    assert makespan(PipelineSchedule.SPLIT_1F1B, costs) == 27


# --- closed forms on a grid -------------------------------------------------------------------------------

GRID = [(p, m) for p in range(1, 7) for m in range(p, 13)]


@pytest.mark.parametrize(("stages", "micro_batches"), GRID)
def test_the_closed_forms_hold_where_each_stage_has_enough_micro_batches(stages, micro_batches):
    costs = unit(stages, micro_batches)
    p, m = stages, micro_batches
    assert makespan(PipelineSchedule.GPIPE, costs) == 3 * (m + p - 1)
    assert makespan(PipelineSchedule.ONE_F_ONE_B, costs) == 3 * (m + p - 1)
    assert makespan(PipelineSchedule.SPLIT_1F1B, costs) == 3 * m + 2 * (p - 1)
    assert makespan(PipelineSchedule.ZB_H1, costs) == 3 * m + (p - 1)


@pytest.mark.parametrize("schedule", PipelineSchedule)
def test_one_stage_takes_the_sum_of_its_work(schedule):
    costs = PipelineCosts(((1.0, 2.0),), ((0.5, 1.0),), ((0.25, 0.5),))
    assert makespan(schedule, costs, transfer_s=9.0) == 5.25


@pytest.mark.parametrize(("micro_batches", "factor"), [(4, 1.72), (8, 1.45), (16, 1.34)])
def test_the_blind_spot_of_the_25_percent_rule_is_the_documented_one(micro_batches, factor):
    """With p = 4 the second stage must be this much slower before an iteration takes 25 % longer."""
    healthy = makespan(PipelineSchedule.SPLIT_1F1B, unit(4, micro_batches))
    assert makespan(PipelineSchedule.SPLIT_1F1B, unit(4, micro_batches, s1=factor)) < 1.25 * healthy
    assert makespan(PipelineSchedule.SPLIT_1F1B, unit(4, micro_batches, s1=factor + 0.005)) > 1.25 * healthy


# --- orders and timelines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", PipelineSchedule)
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (4, 2), (3, 7), (6, 1)])
def test_every_operation_stands_in_an_order_once(schedule, stages, micro_batches):
    orders = pipeline_orders(schedule, stages, micro_batches)
    operations = [operation for order in orders for operation in order]
    kinds = list(Kind) if schedule.splits else [Kind.FORWARD, Kind.BACKWARD]
    wanted = {Operation(k, s, m) for k in kinds for s in range(stages) for m in range(micro_batches)}
    assert len(operations) == len(wanted) and set(operations) == wanted
    assert makespan(schedule, unit(stages, micro_batches)) >= 3 * micro_batches


def test_1f1b_keeps_no_more_micro_batches_than_there_are_stages_ahead():
    for schedule in (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.SPLIT_1F1B, PipelineSchedule.ZB_H1):
        for stage in range(4):
            alive = most = 0
            for operation in stage_order(schedule, 4, 12, stage):
                alive += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(operation.kind, 0)
                most = max(most, alive)
            assert most == 4 - stage


def test_the_critical_path_goes_through_the_slow_stage():
    timeline = pipeline_timeline(PipelineSchedule.ONE_F_ONE_B, unit(4, 8, s2=2.0))
    share = sum(operation.stage == 2 for operation in timeline.critical) / len(timeline.critical)
    assert share > 0.5
    first, last = timeline.critical[0], timeline.critical[-1]
    assert timeline.starts[first] == 0 and timeline.ends[last] == timeline.makespan
    assert timeline.busy == (24, 24, 48, 24)


def test_a_worker_may_hold_operations_of_another_replica():
    """Two replicas of one stage: the second takes one of the first one's micro-batches."""
    orders = [
        [Operation(kind, 0, m) for m in (0, 1) for kind in (Kind.FORWARD, Kind.BACKWARD)],
        [Operation(kind, 0, m) for m in (100, 101, 2) for kind in (Kind.FORWARD, Kind.BACKWARD)],
    ]
    timeline = run_orders(orders, lambda worker, _operation: 1.0 + worker, no_transfer)
    assert timeline.busy == (4.0, 12.0) and timeline.makespan == 12.0


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("time", [-1.0, math.nan, math.inf])
def test_times_that_no_operation_takes_are_refused(time):
    with pytest.raises(ValueError, match=r"takes .* s: give zero or more"):
        PipelineCosts.of_micro_batches([1.0, time])
    with pytest.raises(ValueError, match=r"takes .* s: give zero or more"):
        makespan(PipelineSchedule.GPIPE, unit(2, 2), transfer_s=time)


def test_unequal_shapes_are_refused():
    row, short = (1.0, 1.0), (1.0,)
    for tables in (((row,), (row,), (short,)), ((row, short),) * 3, ((),) * 3, (((),),) * 3):
        with pytest.raises(ValueError, match="unequal shapes"):
            PipelineCosts(*tables)


def test_orders_that_wait_for_each_other_are_refused():
    crossed = [[Operation(Kind.BACKWARD, 0, 0), Operation(Kind.FORWARD, 0, 0)]]
    with pytest.raises(ValueError, match="wait for each other"):
        run_orders(crossed, lambda _worker, _operation: 1.0, no_transfer)


def test_an_operation_in_two_orders_is_refused():
    twice = [[Operation(Kind.FORWARD, 0, 0)], [Operation(Kind.FORWARD, 0, 0)]]
    with pytest.raises(ValueError, match="in two places"):
        run_orders(twice, lambda _worker, _operation: 1.0, no_transfer)
    with pytest.raises(ValueError, match="does not exist"):
        stage_order(PipelineSchedule.GPIPE, 2, 4, 2)


# --- the planner -------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([1.0, 1.0, 0.5, 0.8]), min_size=1, max_size=5), st.integers(1, 20))
def test_the_planners_step_time_bounds_the_makespan_of_1f1b_from_above(speeds, micro_batches):
    stages = len(speeds)
    layout = StageLayout(tuple((stage,) for stage in range(stages)), (2,) * stages)
    factors = {stage: 1 / speed for stage, speed in enumerate(speeds)}
    costs = PipelineCosts.of_micro_batches([2 / 3] * micro_batches, stages, factors=factors)
    exact = makespan(PipelineSchedule.ONE_F_ONE_B, costs)
    bound = layout.step_time(micro_batches, speeds)
    assert exact <= bound + 1e-9 and bound <= 1.35 * exact
    if len(set(speeds)) == 1:
        assert bound == pytest.approx(exact)
