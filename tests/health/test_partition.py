"""Shares, layers and groups by speed: the note's examples, and exactness against brute force."""

import math
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.health.planning.partition import cut_layers, micro_batch_shares, select_group

speeds = st.floats(min_value=0.01, max_value=4.0)


# --- micro-batches ----------------------------------------------------------------------------------------


def test_a_replica_at_half_speed_gets_half_the_micro_batches():
    shares = micro_batch_shares(16, (1, 1, 1, 1 / 2))
    assert shares == (5, 5, 4, 2)
    assert max(count * time for count, time in zip(shares, (1, 1, 1, 2), strict=True)) == 5


@given(st.lists(speeds, min_size=1, max_size=6), st.integers(6, 60))
def test_shares_sum_to_the_global_batch_and_lie_within_one_of_their_quota(values, total):
    shares = micro_batch_shares(total, values, least=0)
    quotas = [total * value / math.fsum(values) for value in values]
    assert sum(shares) == total
    assert all(abs(share - quota) < 1 + 1e-9 for share, quota in zip(shares, quotas, strict=True))


@given(st.lists(speeds, min_size=1, max_size=4), st.integers(4, 9))
def test_shares_are_at_most_one_micro_batch_slower_than_the_best_of_all_splits(values, total):
    best = min(
        max(count / value for count, value in zip(split, values, strict=True))
        for split in product(range(total + 1), repeat=len(values))
        if sum(split) == total
    )
    shares = micro_batch_shares(total, values, least=0)
    slowest = max(count / value for count, value in zip(shares, values, strict=True))
    assert slowest <= best + 1 / min(values) + 1e-9


@given(st.lists(st.floats(0, 4.0), min_size=1, max_size=6), st.integers(6, 60))
def test_a_living_replica_keeps_one_micro_batch_and_a_dead_one_gets_none(values, total):
    if not any(values):
        with pytest.raises(ValueError, match="all replicas have the speed 0"):
            micro_batch_shares(total, values)
        return
    shares = micro_batch_shares(total, values)
    assert sum(shares) == total
    assert all((share >= 1) == (value > 0) for share, value in zip(shares, values, strict=True))


def test_shares_do_not_depend_on_the_unit_of_speed():
    assert micro_batch_shares(32, (3, 2, 2)) == micro_batch_shares(32, (0.375, 0.25, 0.25))


def test_too_few_micro_batches_are_refused():
    with pytest.raises(ValueError, match="2 micro-batches are too few for 3 replicas"):
        micro_batch_shares(2, (1, 1, 1))


# --- layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "values", "cut"),
    [(12, (1, 0.4, 1), (5, 2, 5)), (32, (1, 1, 0.5, 1), (10, 9, 4, 9)), (12, (1, 1, 1), (4, 4, 4))],
)
def test_layers_follow_the_speeds_of_the_stages(layers, values, cut):
    assert cut_layers(layers, values) == cut


def test_the_slow_stage_of_the_example_takes_half_as_long_after_the_cut():
    assert max(4 / v for v in (1, 0.4, 1)) == 10
    assert max(n / v for n, v in zip(cut_layers(12, (1, 0.4, 1)), (1, 0.4, 1), strict=True)) == 5


@given(st.lists(speeds, min_size=1, max_size=4), st.integers(4, 11), st.integers(3, 11))
def test_no_cut_of_the_layers_has_a_faster_slowest_stage(values, layers, most):
    def slowest(cut):
        return max(count / value for count, value in zip(cut, values, strict=True))

    cuts = [cut for cut in product(range(1, min(layers, most) + 1), repeat=len(values)) if sum(cut) == layers]
    if not cuts:
        with pytest.raises(ValueError, match="cannot hold"):
            cut_layers(layers, values, most)
        return
    cut = cut_layers(layers, values, most)
    assert cut in cuts
    assert slowest(cut) == min(slowest(other) for other in cuts)


@pytest.mark.parametrize(
    ("layers", "values", "most", "sentence"),
    [
        (3, (1, 1, 1, 1), 0, "3 layers cannot be cut into 4 stages"),
        (12, (1, 1), 5, "2 stages of at most 5 layers cannot hold 12"),
        (12, (1, 0), 0, "a stage has the speed 0"),
        (12, (), 0, "a stage has the speed 0"),
    ],
)
def test_layers_that_cannot_be_cut_into_the_stages_are_refused(layers, values, most, sentence):
    with pytest.raises(ValueError, match=sentence):
        cut_layers(layers, values, most)


# --- groups -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "ranks", "speed"),
    [
        ((1, 1, 1, 0.4), (0, 1), 2.0),
        ((1, 1, 1, 0.6), (0, 1, 2, 3), 2.4),
        ((1, 1, 1, 0), (0, 1), 2.0),
        ((0.4, 1, 0.9, 1), (1, 3), 2.0),
    ],
)
def test_the_group_with_the_largest_throughput_works(values, ranks, speed):
    choice = select_group(dict(enumerate(values)), (1, 2, 4))
    assert (choice.ranks, choice.speed) == (ranks, pytest.approx(speed))


@given(st.lists(st.floats(0, 2.0), min_size=1, max_size=6), st.sets(st.integers(1, 7), min_size=1))
def test_no_allowed_group_is_faster_and_no_smaller_one_as_fast(values, sizes):
    living = [rank for rank, value in enumerate(values) if value > 0]
    groups = [group for k in sizes for group in combinations(living, k)]
    if not groups:
        with pytest.raises(ValueError, match="add a machine"):
            select_group(dict(enumerate(values)), sizes)
        return
    choice = select_group(dict(enumerate(values)), sizes)
    throughput = {group: len(group) * min(values[rank] for rank in group) for group in groups}
    best = max(throughput.values())
    assert throughput[choice.ranks] == choice.speed == best
    assert len(choice.ranks) == min(len(group) for group in groups if throughput[group] == best)
    assert set(choice.ranks) <= set(living)


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_shares_cuts_and_groups_refuse_an_impossible_speed(bad):
    for refused in (
        lambda: micro_batch_shares(8, (1, bad)),
        lambda: cut_layers(8, (1, bad)),
        lambda: select_group({0: 1.0, 1: bad}, (1, 2)),
    ):
        with pytest.raises(
            ValueError, match=r"^(replica|stage|rank) 1 has the speed (nan|inf|-1): measure it"
        ):
            refused()
