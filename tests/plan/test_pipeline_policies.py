"""Policies for pipelines whose devices die or get slow, and the published figures that they reproduce."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from papers.pipeline_policies import (
    GroupedModel,
    Oobleck,
    PipelineJob,
    ReCycle,
    ResiHp,
    Unequal,
    Unmitigated,
    chosen_speeds,
    group_sizes,
    group_speeds,
    model_cut,
)
from papers.pipeline_runs import DeviceChange, DeviceFaults, run_pipelines
from papers.published_pipelines import TABLE, pipeline_figures, share_of_healthy

JOB = PipelineJob(model_cut(32, 32, 4096), transfer_s=0.0)
ALL = (Oobleck(), ReCycle(), ResiHp(), Unequal(), Unmitigated())


def devices(*speeds, job: PipelineJob = JOB):
    """Return healthy devices, except the given ones: ((replica, stage, rank), speed)."""
    state = job.healthy()
    for place, speed in speeds:
        state[place] = speed
    return state


def share(policy, *speeds, job: PipelineJob = JOB) -> float:
    """Return the throughput divided by the healthy job's under the same policy."""
    return policy.step_s(job, job.healthy()) / policy.step_s(job, devices(*speeds, job=job))


# --- policies ---------------------------------------------------------------------------------------------


def test_without_a_fault_all_but_recycle_step_alike_and_recycle_fills_bubbles():
    times = {policy.label: policy.step_s(JOB, JOB.healthy()) for policy in ALL}
    assert times["ReCycle"] < times["ResiHP"] == times["fabric"] == times["Oobleck"] == times["unmitigated"]


def test_a_dead_device_ends_or_halves_its_group():
    state = devices(((0, 1, 2), 0))
    assert group_speeds(state)[0].tolist() == [4, 0, 4, 4]
    assert chosen_speeds(JOB, state)[0].tolist() == [4, 2, 4, 4]


@pytest.mark.parametrize(
    ("policy", "least", "most"),
    [
        (Unmitigated(), 0.45, 0.55),  # half of the throughput: one replica of two is away
        (ReCycle(), 0.45, 0.6),  # about half of the throughput: one stage computes twice as much
        (Oobleck(), 0.8, 0.9),  # 7 of 8 nodes
        (ResiHp(), 0.85, 0.94),  # 7.5 of 8 groups
        (Unequal(), 0.85, 0.94),
    ],
    ids=lambda value: getattr(value, "label", ""),
)
def test_the_cost_of_one_dead_device_of_32(policy, least, most):
    assert least < share(policy, ((0, 1, 2), 0)) < most


def test_a_slow_device_holds_up_those_that_do_not_see_it():
    slow = ((0, 1, 2), 0.5)
    for policy in (Unmitigated(), ReCycle(), Oobleck()):
        assert share(policy, slow) < 0.6
    for policy in (ResiHp(), Unequal()):
        assert share(policy, slow) > 0.85


def test_each_replica_may_have_its_own_split_and_resihp_has_one_for_all():
    wide = PipelineJob(JOB.cut, replicas=8, micro_batches=32, transfer_s=0.0)
    dead = ((0, 1, 2), 0)
    assert share(Unequal(), dead, job=wide) > share(ResiHp(), dead, job=wide)


def test_a_stage_that_is_dead_in_all_replicas():
    dead = [((replica, 1, rank), 0) for replica in (0, 1) for rank in range(4)]
    assert Unmitigated().step_s(JOB, devices(*dead)) == math.inf
    # all replicas share one split, and no replica has this stage
    assert ResiHp().step_s(JOB, devices(*dead)) == math.inf
    for policy in (
        ReCycle(),
        Oobleck(),
        Unequal(),
    ):  # one pipeline of the six groups; three stages; three stages
        assert 0.4 < share(policy, *dead) < 0.85


def test_with_all_devices_dead_no_policy_completes_a_step():
    assert {policy.step_s(JOB, JOB.healthy() * 0) for policy in ALL} == {math.inf}


def test_resihp_without_one_of_its_parts_is_not_faster():
    faults = [((0, 1, 2), 0), ((1, 2, 0), 0.4)]
    full = share(ResiHp(), *faults)
    for part in ("excludes", "repartitions", "migrates"):
        assert share(ResiHp(**{part: False}), *faults) <= full + 1e-9


@pytest.mark.parametrize(
    "values", [{"replicas": 0}, {"micro_batches": 0}, {"layer_s": 0.0}, {"layer_s": math.nan}, {"stages": 33}]
)
def test_an_impossible_job_is_refused_by_every_policy(values):
    with pytest.raises(ValueError, match=r"^(a job of pipelines|a layer takes|32 layers)"):
        PipelineJob(JOB.cut, **values)


# --- runs -------------------------------------------------------------------------------------------------


def test_a_run_counts_the_stall_the_absence_and_the_rest():
    policy = Unequal(stall_s=10.0, away_s=90.0)
    change = DeviceChange(100.0, (0, 1, 2), 0.0)
    run = run_pipelines(JOB, policy, [change], until_s=1000.0)
    healthy, after = (policy.step_s(JOB, state) for state in (devices(), devices((change.device, 0))))
    away = policy.step_s(JOB, devices(((0,), 0)))
    assert run.stopped_s == 10.0
    assert run.micro_batches == pytest.approx(JOB.total * (100 / healthy + 90 / away + 800 / after))
    assert run_pipelines(JOB, policy, [change], 1000.0, 500.0).throughput == pytest.approx(JOB.total / after)


def test_a_change_after_the_end_changes_nothing():
    late = DeviceChange(100.0, (0, 0, 0), 0.0)
    until_s = 50.0
    assert run_pipelines(JOB, ResiHp(), [late], until_s) == run_pipelines(JOB, ResiHp(), [], until_s)
    with pytest.raises(ValueError, match="is empty"):
        run_pipelines(JOB, ResiHp(), [], 50.0, 50.0)


def test_the_order_of_ranks_and_replicas_does_not_matter():
    first = [DeviceChange(1.0, (0, 1, 2), 0.0)]
    other = [DeviceChange(1.0, (1, 1, 0), 0.0)]
    for policy in ALL:
        runs = {run_pipelines(JOB, policy, changes, 10_000.0, 5_000.0) for changes in (first, other)}
        assert len(runs) == 1


def test_faults_hit_healthy_devices_at_fixed_times_by_the_seed():
    faults = DeviceFaults(60.0, 40, slow_share=0.5)
    changes = faults.draw(JOB, 3)
    assert changes == faults.draw(JOB, 3) != faults.draw(JOB, 4)
    # in the end every device has a fault
    assert len({change.device for change in changes}) == len(changes) == 32
    assert [change.at_s for change in changes] == [60.0 * n for n in range(1, 33)]
    assert all(change.speed == 0 or 0.3 <= change.speed <= 0.8 for change in changes)
    assert {change.speed == 0 for change in changes} == {True, False}


def test_a_repaired_device_comes_back():
    changes = DeviceFaults(100.0, 3, repair_s=150.0).draw(JOB, 0)
    assert [(change.at_s, change.speed) for change in changes] == [
        (100, 0), (200, 0), (250, 1), (300, 0), (350, 1), (450, 1)
    ]  # fmt: skip
    assert share_of_healthy(JOB, ResiHp(), DeviceFaults(100.0, 3, repair_s=150.0), 1, 1e6) > 0.99


@pytest.mark.parametrize(
    "values", [{"interval_s": 0.0}, {"slow_share": 2.0}, {"slow_speeds": (0.0, 1.0)}, {"repair_s": 0.0}]
)
def test_impossible_faults_are_refused(values):
    with pytest.raises(ValueError, match=r"^(faults of devices|the share of slow)"):
        DeviceFaults(**({"interval_s": 1.0, "count": 1} | values))


# --- published figures ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def figures():
    return {figure.id: figure for figure in pipeline_figures(3)}


def test_the_table_s_shape_and_the_ablation_s_order_are_reproduced(figures):
    judged = [
        figure for figure in figures.values() if figure.published is not None and figure.bound != "shape"
    ]
    assert len(judged) == 6
    assert [figure.id for figure in judged if not figure.ok] == []
    assert figures["Table 6: mean deviation, points"].ours < 7


def test_every_published_cell_has_a_row_and_ours_stands_beside_it(figures):
    cells = [figure for figure in figures.values() if figure.bound == "shape"]
    published = [figure for figure in cells if figure.published is not None]
    assert len(published) == 14 and len(cells) == 20
    first = figures["L2-7B, a failure each 2 h: ResiHP, % of fault-free"]
    assert first.published == pytest.approx(100 * 7.55 / 8.22)
    assert first.deviation == pytest.approx(first.ours / first.published - 1)


def test_more_failures_never_help(figures):
    for row in TABLE:
        for policy in row.published:
            values = [
                figures[name].ours
                for interval in ("2 h", "1 h", "30 min")
                if (name := f"{row.model}, a failure each {interval}: {policy}, % of fault-free") in figures
            ]
            assert values == sorted(values, reverse=True)
            assert np.isfinite(values).all()


@pytest.mark.parametrize(
    ("ranks", "heads", "hidden", "least", "sizes"),
    [
        (4, 32, 4096, 1, (1, 2, 4)),
        (3, 32, 4096, 1, (1, 2)),
        (8, 12, 768, 2, (2, 4)),
        (3, 32, 4096, 4, ()),
        (0, 32, 4096, 1, ()),
    ],
)
def test_a_group_has_a_power_of_two_that_divides_the_model_and_holds_it(ranks, heads, hidden, least, sizes):
    assert group_sizes(ranks, heads, hidden, least) == sizes


# --- groups of ranks, and layers within the memory of a stage ---------------------------------------------


@given(st.lists(st.floats(0.05, 2.0), min_size=1, max_size=4), st.integers(4, 10), st.integers(3, 10))
def test_no_cut_within_the_memory_of_a_stage_has_a_faster_slowest_stage(values, layers, most):
    def slowest(cut):
        return max(count / value for count, value in zip(cut, values, strict=True))

    cuts = [cut for cut in product(range(1, min(layers, most) + 1), repeat=len(values)) if sum(cut) == layers]
    model = GroupedModel(layers, (1,), most)
    if not cuts:
        with pytest.raises(ValueError, match="cannot hold"):
            model.cut(values)
        return
    cut = model.cut(values)
    assert cut in cuts and slowest(cut) == min(slowest(other) for other in cuts)


@pytest.mark.parametrize(
    ("speeds", "ranks"),
    [([1, 1, 1, 0], (0, 1)), ([1, 0, 0.9, 1], (0, 3)), ([0, 0, 0, 0], ()), ([1.0] * 3, (0, 1, 2))],
)
def test_a_stage_with_dead_ranks_goes_on_with_the_best_group_of_the_others(speeds, ranks):
    assert GroupedModel(12, (2, 4)).group(speeds) == ranks
