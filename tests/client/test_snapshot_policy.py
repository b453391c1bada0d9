"""Snapshot policies as pure functions of steps and times."""

import itertools

import pytest

from fabric.client import EverySteps, OverheadBudget
from fabric.client.state.snapshots import policy_of
from fabric.errors import ConfigError
from fabric.runtime.config import Settings


def play(policy, step_s, cost_s, steps, now=1000.0):
    """Play steps of ``step_s`` with background snapshots of ``cost_s``; return (time, step) of each
    snapshot.
    """
    found = []
    for step in range(steps):
        if policy.is_due(step, now):
            found.append((now, step))
            policy.taken(step, now, cost_s)
        now += step_s
    return found


def intervals(found):
    return [b - a for (a, _), (b, _) in itertools.pairwise(found)]


@pytest.mark.parametrize(("step_s", "cost_s"), [(0.1, 0.1), (1.0, 0.3), (7.0, 0.02), (0.01, 2.0)])
def test_snapshots_take_as_much_time_as_the_budget_allows_and_no_more(step_s, cost_s):
    found = play(OverheadBudget(0.02), step_s, cost_s, 20_000)
    assert found[0] == (1000.0 + step_s, 1), "the state before the first step is worth nothing"
    for interval in intervals(found):
        assert cost_s <= 0.02 * interval + 1e-6
        # The policy takes a snapshot at the first step boundary at which the budget allows one.
        assert interval <= max(cost_s / 0.02 + step_s, step_s) + 1e-6


@pytest.mark.parametrize(("share", "least_s"), [(0.02, 1.0), (1000.0, 0.0)])
def test_snapshots_of_a_small_state_leave_the_steps_in_peace(share, least_s):
    """A copy of 2 ms takes requests and changes of threads too, which would come every two steps of 50 ms."""
    found = intervals(play(OverheadBudget(share), 0.05, 0.002, 200))
    assert all(max(least_s, 0.05) - 1e-6 <= interval <= least_s + 0.05 + 1e-6 for interval in found)


@pytest.mark.parametrize(("step_s", "cost_s"), [(1.0, 100.0), (45.0, 30.0), (90.0, 0.5)])
@pytest.mark.parametrize("share", [0.0, 0.02])
def test_the_newest_snapshot_is_never_older_than_the_limit(step_s, cost_s, share):
    """Until the next copy is complete, only the previous snapshot could be recovered."""
    found = play(OverheadBudget(share, 600.0), step_s, cost_s, 2000)
    assert len(found) > 3
    assert all(interval + cost_s <= 600.0 + 1e-6 for interval in intervals(found))


def test_a_share_of_zero_waits_for_the_age():
    assert min(intervals(play(OverheadBudget(0.0, 600.0), 1.0, 0.0, 2000))) > 590


def test_a_snapshot_for_a_joining_replica_counts():
    policy = OverheadBudget(0.02)
    assert policy.is_due(1, 0.0)
    policy.taken(1, 0.0, 0.1)
    assert not policy.is_due(2, 4.0) and policy.is_due(3, 6.0)
    policy.taken(3, 6.0, 0.1)  # somebody asked
    assert not policy.is_due(4, 10.0)


def test_the_state_before_the_first_step_does_not_count():
    """The optimizer has no state yet, so this snapshot is too small to measure the cost of later ones."""
    policy = OverheadBudget(0.02)
    policy.taken(0, 0.0, 5.0)  # somebody asked
    assert not policy.is_due(0, 0.1)
    assert policy.is_due(1, 0.2)


def test_every_n_steps_are_the_same_steps_on_all_replicas():
    assert [step for _, step in play(EverySteps(7), 0.1, 5.0, 30)] == [0, 7, 14, 21, 28]
    late = EverySteps(7)
    assert [step for step in range(11, 30) if late.is_due(step, 0.0)] == [14, 21, 28]
    late.taken(28, 0.0, 0.0)
    assert not late.is_due(28, 0.0), "a boundary that is met again has its snapshot"


def test_settings_choose_the_snapshot_policy():
    assert policy_of(Settings()) == OverheadBudget(0.02, 600.0)
    assert policy_of(Settings(snapshot_every="50% 9s")) == OverheadBudget(0.5, 9.0)
    assert policy_of(Settings(snapshot_every="50%")) == OverheadBudget(0.5, 600.0)
    assert policy_of(Settings(snapshot_every="9s")) == OverheadBudget(0.02, 9.0)
    assert policy_of(Settings(snapshot_every=5)) == EverySteps(5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OverheadBudget(-0.1),
        lambda: OverheadBudget(float("nan")),
        lambda: OverheadBudget(0.02, 0.0),
        lambda: EverySteps(0),
        lambda: policy_of(Settings(snapshot_every="0s")),
    ],
)
def test_impossible_snapshot_settings_are_refused(make):
    with pytest.raises(ConfigError):
        make()
