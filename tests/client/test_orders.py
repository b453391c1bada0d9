"""Any sampler gives the order, the same on every replica; a pass deals out each of its positions once."""

import itertools
import random
import secrets
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fabric.audit.audit import DataOrder
from fabric.client.data import sample_plan
from fabric.client.data.loader import make_loader, parse_options
from fabric.client.data.sample_plan import SamplePlan, SamplerOrder
from fabric.errors import ConfigError, FabricError
from fabric.protocol.rules.assignment import cut
from fabric.protocol.rules.compatibility import unequal_settings
from fabric.runtime.config import Settings

DATA = list(range(100, 130))


def seeded(number):
    return torch.Generator().manual_seed(number)


class Counted(torch.utils.data.Sampler):
    """Its pass depends on how often it was iterated, and it shuffles its own list."""

    def __init__(self, size):
        self.indices, self.passes = list(range(size)), 0

    def __len__(self):
        return len(self.indices)

    def __iter__(self):
        self.passes += 1
        random.shuffle(self.indices)
        return iter(self.indices if self.passes % 2 else self.indices[::-1])


class Epochs(Counted):
    def __iter__(self):
        return iter([(i + self.epoch) % len(self.indices) for i in self.indices])

    def set_epoch(self, epoch):
        self.epoch = epoch


class ByLength(torch.utils.data.Sampler):
    """Batches of neighbours, in random order."""

    def __len__(self):
        return 10

    def __iter__(self):
        batches = [list(range(i, i + 3)) for i in range(0, 30, 3)]
        np.random.shuffle(batches)
        return iter(batches)


class Unseeded(Counted):
    def __iter__(self):
        return iter(sorted(self.indices, key=lambda _: secrets.randbits(32)))


class Growing(Counted):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        self.size += 1
        return iter(range(self.size - 1))


SAMPLERS = {
    "subset": lambda: SubsetRandomSampler(range(0, 30, 2)),
    "weighted": lambda: WeightedRandomSampler([1.0] * 29 + [50.0], 20),
    "replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=40),
    "own generator": lambda: RandomSampler(DATA, generator=seeded(5)),
    "subset with a generator": lambda: SubsetRandomSampler(range(9), generator=seeded(6)),
    "sequential": lambda: SequentialSampler(DATA),
    "distributed": lambda: DistributedSampler(DATA, num_replicas=1, rank=0),
    "list": lambda: [3, 1, 4, 1, 5],
    "counted": lambda: Counted(12),
    "epochs": lambda: Epochs(7),
    "batches": lambda: BatchSampler(SubsetRandomSampler(range(11)), 3, drop_last=False),
    "by length": ByLength,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_gives_every_replica_the_same_passes_whenever_it_joins(name):
    first = SamplerOrder(SAMPLERS[name](), 7)
    passes = [first.items(range(k * first.size, (k + 1) * first.size)) for k in range(5)]
    torch.rand(3), random.random(), np.random.rand()
    for number in (4, 2, 3, 0, 1):
        newcomer = SamplerOrder(SAMPLERS[name](), 7)
        positions = range(number * first.size, (number + 1) * first.size)
        assert newcomer.items(positions) == passes[number]
        assert newcomer.items(range(first.size)) == passes[0], "a job that goes back to an earlier state"
        assert newcomer.digest == first.digest
    varies = name not in ("sequential", "list")
    assert (passes[0] != passes[1]) == varies


@pytest.mark.parametrize("name", ["subset", "weighted", "distributed", "by length"])
def test_the_seed_of_the_job_gives_another_order(name):
    orders = [SamplerOrder(SAMPLERS[name](), seed) for seed in (1, 2)]
    same = orders[0].digest == orders[1].digest
    assert same == (name == "distributed"), "a DistributedSampler has a seed of its own"


def test_the_entries_are_those_of_the_sampler():
    order = SamplerOrder(SAMPLERS["subset"](), 0)
    assert sorted(order.items(range(15))) == list(range(0, 30, 2))
    heavy = SamplerOrder(SAMPLERS["weighted"](), 0)
    assert Counter(heavy.items(range(200))).most_common(1)[0][0] == 29
    assert SamplerOrder(SequentialSampler(DATA), 0).items(range(30)) == list(range(30))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(DATA, 1, shuffle=True, generator=seeded(3)),
        lambda: DataLoader(DATA, 1, sampler=SubsetRandomSampler(range(8), generator=seeded(3))),
    ],
)
def test_with_a_generator_of_its_own_the_order_is_that_of_torch(make):
    plain = make()
    expected = [[int(x) - 100 for x in plain] for _ in range(3)]
    loader = make()
    order = SamplerOrder(loader.sampler, 0, DATA, loader.generator)
    size = order.size
    assert [order.items(range(k * size, (k + 1) * size)) for k in range(3)] == expected


class Endless(torch.utils.data.Sampler):
    """Draws each index when it is asked for, and says that a pass is ``size`` long."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        return (int(np.random.randint(30)) for _ in range(self.size))


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(DATA, True, 10**10),
        lambda: RandomSampler(DATA, True, 10**10, seeded(5)),
        lambda: Endless(10**10),
    ],
)
def test_a_pass_of_ten_billion_draws_is_read_in_parts(make):
    first, newcomer = SamplerOrder(make(), 3), SamplerOrder(make(), 3)
    assert (first.size, first.digest) == (10**10, newcomer.digest)
    begun = first.items(range(9_000))
    assert Counter(begun).keys() == set(range(30))
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    assert newcomer.items(range(8_990, 9_000)) == begun[8_990:], "a replica that joins"
    assert first.items(range(7)) == begun[:7], "a job that goes back"
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tolist()


def test_a_long_pass_forgets_its_first_parts_and_reads_them_again(monkeypatch):
    for name, value in {"_WHOLE": 20, "_PART": 4, "_KEPT_PARTS": 2}.items():
        monkeypatch.setattr(sample_plan, name, value)
    for make in (lambda: Epochs(30), lambda: Counted(30), lambda: Endless(30)):
        order = SamplerOrder(make(), 7)
        items = order.items(range(30))
        assert [order.items([position])[0] for position in (29, 3, 17, 0)] == [
            items[x] for x in (29, 3, 17, 0)
        ]
        assert len(order._passes[0]._parts) <= 2


def test_the_random_numbers_of_the_training_are_untouched():
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    order = SamplerOrder(ByLength(), 7)
    order.items([25])
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def test_the_user_s_own_sampler_is_left_as_it_was():
    sampler = Counted(12)
    SamplerOrder(sampler, 7).items([30])
    assert (sampler.passes, sampler.indices) == (0, list(range(12)))


def test_two_passes_are_kept_and_no_more():
    order = SamplerOrder(SAMPLERS["subset"](), 7)
    for position in range(0, 300, 15):
        order.items([position])
    assert len(order._passes) == 2


def test_the_data_set_is_not_copied_with_its_sampler():
    class Uncopied(list):
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

    data = Uncopied(range(20))
    assert sorted(SamplerOrder(RandomSampler(data, generator=seeded(1)), 0, data).items(range(20))) == data


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (Unseeded(12), "the sampler Unseeded gives another order each time it begins"),
        (Growing(12), "pass 1 of the sampler Growing has 13 entries, and pass 0 had 12"),
        (itertools.count(), r"the sampler count has no len\(\)"),
        ([], "the sampler list gives no index"),
    ],
)
def test_a_sampler_that_replicas_cannot_share_is_refused_by_name(sampler, words):
    with pytest.raises(ConfigError, match=words):
        SamplerOrder(sampler, 0)


def test_a_sampler_that_cannot_be_copied_is_refused_by_name():
    sampler = Counted(3)
    sampler.entries = iter([1, 2, 3].__iter__, None)
    sampler.file = open("/dev/null")  # noqa: PTH123, SIM115
    with pytest.raises(ConfigError, match="the sampler Counted cannot be copied"):
        SamplerOrder(sampler, 0)
    sampler.file.close()


def test_a_later_pass_of_another_length_is_refused_by_its_number():
    class Late(Epochs):
        def __len__(self):
            return 8 if self.epoch > 2 else 7

        def __iter__(self):
            return iter(range(len(self)))

        epoch = 0

    with pytest.raises(FabricError, match="pass 3 of the sampler Late has 8 entries, and pass 0 had 7"):
        SamplerOrder(Late(7), 0).items([21])


class Hard(torch.utils.data.Sampler):
    """Draws by weights that the training may change."""

    def __init__(self, weights):
        self.weights = weights

    def __len__(self):
        return len(self.weights)

    def __iter__(self):
        return iter(torch.multinomial(torch.as_tensor(self.weights), len(self), replacement=True).tolist())


def change(weights):
    weights[2] = 9.0


@pytest.mark.parametrize(
    "sampler",
    [
        Hard(torch.ones(8)),
        Hard(np.ones(8)),
        Hard([1.0] * 8),
        WeightedRandomSampler([1.0] * 8, 8),
        BatchSampler(Hard(torch.ones(8)), 2, drop_last=False),
    ],
)
def test_a_sampler_whose_weights_the_training_changes_is_refused_at_the_next_pass(sampler):
    order = SamplerOrder(sampler, 0)
    order.items(range(order.size, 2 * order.size))
    change(getattr(sampler, "sampler", sampler).weights)
    order.items(range(order.size))  # as this pass was before
    with pytest.raises(ConfigError, match="was changed in the training"):
        order.items([2 * order.size])


def test_replicas_with_unlike_orders_are_told_so_before_they_join():
    described = [
        SamplePlan(15, 4, 2, 0, order=SamplerOrder(RandomSampler(DATA, False, 15, seeded(k)), 0)).describe()
        for k in (1, 2)
    ]
    ours, theirs = [{name: str(value) for name, value in x.items()} for x in described]
    assert "the order of the sampler (its digest) is" in unequal_settings(ours, theirs)
    assert unequal_settings(ours, ours) == ""


# --- steps of whole passes ----------------------------------------------------------------------------------


def of_a_model(size, batch, epoch_end, steps):
    """The positions of each step, by a loop that a child could write."""
    found, number = [], 0
    while len(found) < steps:
        positions = list(range(number * size, (number + 1) * size))
        while positions and len(found) < steps:
            step, positions = positions[:batch], positions[batch:]
            if len(step) == batch or epoch_end == "short":
                found.append(step)
        number += 1
    return found


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from(["short", "drop"]),
    st.integers(0, 3),
    st.integers(1, 4),
    st.booleans(),
)
def test_a_pass_is_dealt_out_as_a_plain_loop_deals_it_out(
    size, micro, times, epoch_end, seed, replicas, sampled
):
    batch = micro * times
    order = SamplerOrder(SubsetRandomSampler(range(size)), seed) if sampled else None
    if epoch_end == "drop" and size < batch:
        with pytest.raises(ConfigError, match="too few for one step"):
            SamplePlan(size, batch, micro, seed, epoch_end=epoch_end)
        return
    plan = SamplePlan(size, batch, micro, seed, epoch_end=epoch_end, order=order)
    audit = DataOrder(plan.describe())
    expected = of_a_model(size, batch, epoch_end, 3 * plan.steps_per_pass)
    dealt = []
    for step, positions in enumerate(expected):
        parts = [plan.positions(step, i) for share in cut(times, [1] * replicas) for i in share]
        assert [p for part in parts for p in part] == positions
        assert all(len(part) == micro for part in parts[: len(positions) // micro])
        assert plan.with_samples(step, range(times)) == [i for i in range(times) if len(parts[i])]
        listed = [plan.samples(step, i) for i in range(times)]
        if sampled:
            for i, samples in enumerate(listed):
                audit.learn(step, i, samples)
        assert [audit.samples(step, i) for i in range(times)] == listed
        dealt.append([x for part in listed for x in part])
    for number in range(3):
        steps = dealt[number * plan.steps_per_pass : (number + 1) * plan.steps_per_pass]
        counted = Counter(i for step in steps for i in step)
        assert set(counted.values()) == {1}, "a sample twice in a pass"
        if epoch_end == "short":
            assert set(counted) == set(range(size))


def loader_for(**options):
    sizes = options.pop("sizes", (8, 2, 0))
    return make_loader(DATA, sizes, list, 0, parse_options(options), Settings(replica="r0", replicas="3"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epoch_end": "wrap"}, 'epoch_end is "wrap": it must be "continue", "short" or "drop"'),
        ({"epoch_end": "short", "redundancy": 2}, 'epoch_end="short" does not go with redundancy'),
        ({"sampler": range(9), "redundancy": 2}, "the sampler range does not go with redundancy"),
        ({"sampler": range(9), "batch_sampler": ByLength()}, "has a sampler and a batch_sampler"),
        ({"batch_sampler": ByLength()}, "give micro_batch_size=1, and global_batch_size as a number of"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        loader_for(**options)


def test_a_batch_of_a_batch_sampler_is_a_micro_batch():
    loader = loader_for(batch_sampler=ByLength(), sizes=(4, 1, 0))
    batch = loader.fetch(0, 2)
    assert len(batch) == loader.count(0, 2) == 3 and batch[1] == batch[0] + 1
    assert loader.plan.samples(0, 2) == [x - 100 for x in batch], "the journal lists data set indices"
    assert loader.plan.dataset_size == 10


def test_a_shuffling_sampler_of_all_data_is_the_order_that_a_loader_has_without_it():
    with_sampler, without = loader_for(sampler=RandomSampler(DATA)), loader_for()
    assert with_sampler.plan.describe() == without.plan.describe()


def test_a_generator_as_data_set_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match="the data set is a generator, an iterator that can be read only"):
        make_loader(
            (x for x in DATA), (8, 2, 0), None, 0, parse_options({}), Settings(replica="r0", replicas="3")
        )
