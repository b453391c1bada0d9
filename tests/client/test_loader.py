"""The data order is a pure function, and reading ahead does not change it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loaders import loader_of

from fabric.client.data.sample_plan import SamplePlan, sample_indices
from fabric.errors import ConfigError


@given(st.integers(1, 50), st.integers(0, 5), st.integers(0, 200), st.integers(0, 120))
def test_positions_are_the_concatenated_permutations(size, seed, start, count):
    whole = sample_indices(size, seed, 0, start + count)
    assert sample_indices(size, seed, start, count) == whole[start:]


@given(st.integers(1, 40), st.integers(0, 3), st.integers(0, 3))
def test_every_pass_has_every_sample_once(size, seed, number):
    assert sorted(sample_indices(size, seed, number * size, size)) == list(range(size))


def test_passes_and_seeds_differ():
    assert sample_indices(100, 0, 0, 100) != sample_indices(100, 0, 100, 100)
    assert sample_indices(100, 0, 0, 100) != sample_indices(100, 1, 0, 100)


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 5), st.integers(0, 9))
def test_micro_batches_cut_a_step_without_gap_or_overlap(size, micro, times, step):
    plan = SamplePlan(size, micro * times, micro, seed=1)
    parts = [plan.samples(step, i) for i in range(plan.micro_batches)]
    assert [i for part in parts for i in part] == sample_indices(size, 1, step * micro * times, micro * times)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 8, 2, 0), "empty"),
        ((10, 8, 3, 0), "multiple"),
        ((10, 8, 0, 0), "multiple"),
        ((10, 0, 2, 0), "at least 1"),
        ((10, 8, 2, -1), "negative"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_a_sentence(arguments, words):
    with pytest.raises(ConfigError, match=words):
        SamplePlan(*arguments)


@pytest.mark.parametrize(("workers", "kind"), [(0, ""), (2, "threads"), (2, "processes")])
def test_read_ahead_gives_the_same_batches(workers, kind):
    plan = SamplePlan(20, 8, 2, seed=4)
    loader = loader_of(list(range(20)), plan, list, workers, kind)
    loader.read_ahead(3, range(4))
    assert [loader.fetch(3, i) for i in (2, 0, 1, 3)] == [plan.samples(3, i) for i in (2, 0, 1, 3)]
    loader.read_ahead(4, [0, 1])
    loader.read_ahead(5, [1])
    assert loader.fetch(4, 0) == plan.samples(4, 0), "a batch that was discarded is read again"
    loader.close()


def test_plans_with_another_order_are_described_otherwise():
    plans = [(10, 4, 2, 0), (11, 4, 2, 0), (10, 8, 2, 0), (10, 4, 1, 0), (10, 4, 2, 1), (10, 4, 2, 0, 2)]
    assert len({str(SamplePlan(*p).describe()) for p in plans}) == len(plans)


def test_a_collate_function_draws_the_same_numbers_on_every_replica():
    """As a collator that masks tokens: whatever this process drew before."""
    plan = SamplePlan(20, 8, 2, seed=4)
    drawn = []
    for before in (1, 5):
        loader = loader_of(list(range(20)), plan, lambda samples: torch.rand(3).tolist())
        torch.rand(before)
        drawn.append([loader.fetch(3, 1), loader.fetch(3, 2)])
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]


def test_a_data_set_of_another_size_is_refused_when_a_pass_begins():
    data = list(range(8))
    loader = loader_of(data, SamplePlan(8, 4, 2, seed=0))
    loader.begin_step(0)
    data.append(8)
    loader.begin_step(1)
    with pytest.raises(ConfigError, match="the list has 9 samples and had 8 when the training began"):
        loader.begin_step(2)


class Popping:
    """A data set that uses its list of indices up."""

    def __getitems__(self, indices):
        return [indices.pop() for _ in range(len(indices))]


def test_a_data_set_that_changes_its_list_of_indices_changes_no_other_list():
    plan = SamplePlan(20, 8, 2, seed=4)
    loader = loader_of(Popping(), plan, list)
    for step, micro_batch in ((3, 2), (3, 2), (3, 0), (4, 0)):
        samples = plan.samples(step, micro_batch)
        assert loader.samples(step, micro_batch) == samples
        assert loader.fetch(step, micro_batch) == samples[::-1]
        assert loader.samples(step, micro_batch) == samples
        assert loader.count(step, micro_batch) == len(samples)
