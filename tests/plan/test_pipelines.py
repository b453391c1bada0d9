"""Steps of several pipelines: the check values of one pipeline, and the migration between several."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.pipeline_schedules import PipelineCosts, PipelineSchedule, makespan
from papers.pipelines import StepWork, at_home, migrated, rerouted, step_time


def step(times, counts, **values) -> StepWork:
    return StepWork(np.array(times, float), tuple(counts), **values)


# --- one pipeline -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "micro_batches", "transfer_s", "seconds"),
    [(4, 4, 0.0, 18), (2, 4, 0.0, 14), (4, 4, 0.1, 18.6), (2, 4, 0.1, 14.2), (1, 4, 0.0, 12)],
)
def test_a_pipeline_of_equal_stages_takes_as_long_as_published(stages, micro_batches, transfer_s, seconds):
    work = step([[1.0] * stages], [micro_batches], transfer_s=transfer_s)
    assert step_time(work, at_home(work)) == pytest.approx(seconds)


def test_a_slow_stage_takes_as_long_as_published():
    work = step([[1, 1.25, 1, 1]], [8])
    assert step_time(work, at_home(work)) == pytest.approx(33.25)


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.5, 3.0), min_size=1, max_size=5), st.integers(1, 10), st.sampled_from([0.0, 0.05])
)
def test_no_waiting_for_turns_is_at_most_a_little_slower_than_the_schedule(times, micro_batches, transfer_s):
    work = step([times], [micro_batches], transfer_s=transfer_s)
    costs = PipelineCosts.of_micro_batches([1.0] * micro_batches, len(times), factors=dict(enumerate(times)))
    by_schedule = makespan(PipelineSchedule.SPLIT_1F1B, costs, transfer_s)
    assert step_time(work, at_home(work)) <= 1.15 * by_schedule
    busiest = 3 * micro_batches * max(times)
    assert step_time(work, at_home(work)) >= busiest - 1e-9


def test_weights_that_wait_for_idle_time_shorten_the_step():
    eager, deferred = (step([[1.0] * 4], [8], defers_weights=later) for later in (False, True))
    assert step_time(deferred, at_home(deferred)) < step_time(eager, at_home(eager))


# --- several ----------------------------------------------------------------------------------------------


def test_two_pipelines_at_home_take_as_long_as_the_slower():
    work = step([[1, 1], [1, 2]], [4, 4])
    slow = step([[1, 2]], [4])
    assert step_time(work, at_home(work)) == step_time(slow, at_home(slow))


def test_migration_takes_work_from_the_slow_stage_alone():
    work = step([[1, 1], [1, 2]], [8, 8])
    owners = migrated(work)
    assert owners[0] == at_home(work)[0]
    # a replica of speed 1 computes 11, a replica of speed 1/2 computes 5
    assert Counter(owners[1][1]) == {1: 5, 0: 3}
    assert owners[1][0] == (0,) * 8
    assert step_time(work, owners) < 0.8 * step_time(work, at_home(work))


def test_the_other_stages_go_on_when_a_dead_stages_work_moves_to_other_replicas():
    work = step([[1, 1, 1], [1, math.inf, 1], [1, 1, 1]], [4, 4, 4])
    for owners in (migrated(work), rerouted(work)):
        assert Counter(owners[1][1]) == {0: 2, 2: 2}
        assert owners[0] == at_home(work)[0]
        assert math.isfinite(step_time(work, owners))
    assert step_time(work, at_home(work)) == math.inf


def test_rerouting_does_not_consider_the_speed_of_replicas():
    work = step([[1, 1], [1, math.inf], [1, 2]], [4, 4, 4])
    assert Counter(rerouted(work)[1][1]) == {0: 2, 2: 2}
    assert Counter(migrated(work)[1][1]) == {0: 4}


def test_a_stage_that_is_dead_everywhere_cannot_be_masked():
    work = step([[1, math.inf], [1, math.inf]], [4, 4])
    assert migrated(work) is None and rerouted(work) is None


def test_memory_bounds_what_a_replica_takes():
    work = step([[1, 1], [1, math.inf]], [8, 8])
    assert migrated(work, room=1.5) is None
    assert migrated(work, room=2.0) is not None


def test_a_difference_below_delta_moves_nothing():
    work = step([[1, 1], [1, 1.2]], [8, 8])
    assert migrated(work, delta=0.0) != at_home(work)
    assert migrated(work, delta=2.0) == at_home(work)


stage_times = st.one_of(st.just(math.inf), st.just(1.0), st.floats(0.5, 4.0))


@settings(max_examples=80)
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0]))
def test_every_micro_batch_runs_once_per_stage_at_a_living_replica_with_room(data, replicas, stages, delta):
    times = [[data.draw(stage_times) for _ in range(stages)] for _ in range(replicas)]
    work = step(times, [data.draw(st.integers(1, 6)) for _ in range(replicas)])
    owners = migrated(work, delta, room=3.0)
    if owners is None:
        return
    for stage in range(stages):
        assert tuple(len(row) for row in owners[stage]) == work.counts
        computed = Counter(owner for row in owners[stage] for owner in row)
        assert all(math.isfinite(times[owner][stage]) for owner in computed)
        taken = {r: computed[r] for r in computed if computed[r] > work.counts[r]}
        assert all(count <= 3 * max(work.counts) for count in taken.values())
        before = max(count * times[r][stage] for r, count in enumerate(work.counts))
        assert max(count * times[r][stage] for r, count in computed.items()) <= before
    assert math.isfinite(step_time(work, owners))


@pytest.mark.parametrize(
    ("times", "counts"),
    [
        ([[1.0]], [0]),
        ([[0.0]], [1]),
        ([[-1.0]], [1]),
        ([[math.nan]], [1]),
        ([[1.0]], [1, 1]),
        ([[1.0]], [-1]),
    ],
)
def test_an_impossible_pipeline_step_is_refused(times, counts):
    with pytest.raises(ValueError, match=r"^a (step|stage)"):
        step(times, counts)
