"""Shares, layers and groups by speed: the note's examples, and exactness against brute force."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.health.planning import cut_layers, micro_batch_shares, select_group

speeds = st.floats(min_value=0.01, max_value=4.0)


# --- micro-batches ----------------------------------------------------------------------------------------


def test_a_replica_at_half_speed_gets_half_the_micro_batches():
    shares = micro_batch_shares(16, (1, 1, 1, 1 / 2))
    assert shares == (5, 5, 4, 2)
    assert max(count * time for count, time in zip(shares, (1, 1, 1, 2), strict=True)) == 5


@given(st.lists(speeds, min_size=1, max_size=4), st.integers(4, 9))
def test_shares_are_at_most_one_micro_batch_slower_than_the_best_of_all_splits(values, total):
    best = min(
        max(count / value for count, value in zip(split, values, strict=True))
        for split in product(range(1, total + 1), repeat=len(values))
        if sum(split) == total
    )
    shares = micro_batch_shares(total, values)
    slowest = max(count / value for count, value in zip(shares, values, strict=True))
    assert slowest <= best + 1 / min(values) + 1e-9


@given(st.lists(speeds, min_size=1, max_size=6), st.integers(6, 60))
def test_each_replica_keeps_one_micro_batch_and_all_are_given_out(values, total):
    shares = micro_batch_shares(total, values)
    assert sum(shares) == total and min(shares) >= 1


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


@given(st.lists(speeds, min_size=1, max_size=4), st.integers(4, 11))
def test_no_cut_of_the_layers_has_a_faster_slowest_stage(values, layers):
    def slowest(cut):
        return max(count / value for count, value in zip(cut, values, strict=True))

    cuts = [cut for cut in product(range(1, layers + 1), repeat=len(values)) if sum(cut) == layers]
    cut = cut_layers(layers, values)
    assert cut in cuts
    assert slowest(cut) == min(slowest(other) for other in cuts)


def test_layers_that_cannot_be_cut_into_the_stages_are_refused():
    with pytest.raises(ValueError, match="3 layers cannot be cut into 4 stages"):
        cut_layers(3, (1, 1, 1, 1))


# --- groups -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "ranks"),
    [((1, 1, 1, 0.4), (0, 1)), ((1, 1, 1, 0.6), (0, 1, 2, 3)), ((0.4, 1, 0.9, 1), (1, 3))],
)
def test_the_group_with_the_largest_throughput_works(values, ranks):
    assert select_group(values, (1, 2, 4)) == ranks


@given(st.lists(speeds, min_size=1, max_size=6), st.data())
def test_no_allowed_group_is_faster_and_no_smaller_one_as_fast(values, data):
    sizes = data.draw(st.sets(st.integers(1, len(values)), min_size=1))
    chosen = select_group(values, sizes)
    groups = [group for k in sizes for group in combinations(range(len(values)), k)]
    throughput = {group: len(group) * min(values[rank] for rank in group) for group in groups}
    best = max(throughput.values())
    assert throughput[chosen] == best
    assert len(chosen) == min(len(group) for group in groups if throughput[group] == best)
