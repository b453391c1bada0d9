"""A DataLoader is taken whole, or refused; every argument of the installed release has a row."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from refusal_pages import check_page
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from fabric.client.loop.session import SoloSession
from fabric.errors import ConfigError
from fabric.integrations.training_data import DATALOADER, StepFeed, TrainingData

DATA = list(range(100, 123))


def steps_of(loader, batches=1, steps=6, epoch_end="short"):
    """The micro-batches of each step, of a job that takes ``batches`` batches of the DataLoader a step."""
    data = TrainingData.of(loader)
    session = SoloSession([], {})
    size = data.batch_size * batches
    made = data.feed(session, steps, global_batch_size=size, seed=0, epoch_end=epoch_end).data
    return [[made.fetch(s, i) for i in made.plan.with_samples(s, range(batches))] for s in range(steps)]


def passes_of(loader, number):
    return [batch.tolist() for _ in range(number) for batch in loader]


def flat(steps):
    return [batch.tolist() for step in steps for batch in step]


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 4},
        {"batch_size": 5, "sampler": [3, 1, 2, 9, 9, 0, 4]},
        {"batch_sampler": BatchSampler(SequentialSampler(DATA), 4, drop_last=False)},
        {"batch_sampler": [[0, 1, 2], [3], [4, 5]]},
        {"batch_size": None},
        {"batch_size": None, "sampler": [3, 1, 2]},
        {"batch_size": 4, "collate_fn": lambda samples: torch.tensor(samples) * 2},
    ],
)
def test_a_loader_in_a_fixed_order_has_the_batches_that_it_has_without_fabric(arguments):
    plain = DataLoader(DATA, **arguments)
    if arguments.get("batch_size") is None and "batch_sampler" not in arguments:
        expected = [x for _ in range(3) for x in plain]
        assert [x for step in steps_of(plain, steps=len(expected)) for x in step] == expected
        return
    expected = passes_of(plain, 3)
    assert flat(steps_of(DataLoader(DATA, **arguments), steps=len(expected))) == expected


def test_a_loader_that_shuffles_with_a_generator_has_the_passes_that_it_has_without_fabric():
    def make():
        return DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(8))

    expected = passes_of(make(), 3)
    assert flat(steps_of(make(), steps=len(expected))) == expected


@pytest.mark.parametrize(("replicas", "weights"), [(1, [1.0, 1.0, 1.0]), (2, [1.5, 0.5, 2.0])])
def test_all_batches_of_a_step_weigh_the_same_whatever_a_batch_sampler_puts_into_them(replicas, weights):
    data = TrainingData.of(DataLoader(DATA, batch_sampler=[[0, 1, 2], [3], [4, 5]]))
    epochs = data.epochs(replicas, 4)
    feed = data.feed(SoloSession([], {}), 1, global_batch_size=4 * replicas, epoch_end="short", seed=0)
    given = []
    for number, samples in enumerate([3, 1, 2]):
        progress = SimpleNamespace(at=(0, number))
        step = SimpleNamespace(weight=SimpleNamespace(samples=samples))
        under_way = SimpleNamespace(step=step, data=feed.data, session=SimpleNamespace(_progress=progress))
        given.append(StepFeed.weight(under_way, epochs))
    assert given == weights


def test_a_micro_batch_has_the_batch_number_of_the_replica_whose_part_it_is():
    """Two replicas, two batches a step: parts 0 and 1 are of a step's first batch, 2 and 3 of its second."""
    epochs = TrainingData.of(DataLoader(DATA, 4)).epochs(2, 2)  # three batches, in two steps
    numbers = []
    for at in [(0, 0), (0, 1), (0, 3), (1, 1), (2, 2)]:
        under_way = SimpleNamespace(session=SimpleNamespace(_progress=SimpleNamespace(at=at)))
        numbers.append(StepFeed.batch(under_way, epochs))
    assert numbers == [0, 0, 1, 2, 1]


def test_drop_last_is_told_and_its_steps_are_whole():
    data = TrainingData.of(DataLoader(DATA, 4, drop_last=True))
    epochs = data.epochs(1, 2)
    assert (data.drop_last, data.size, epochs.samples, epochs.batches, epochs.steps) == (True, 23, 20, 5, 3)
    dropped = steps_of(DataLoader(DATA, 4, drop_last=True), steps=10, epoch_end="drop")
    assert flat(dropped) == passes_of(DataLoader(DATA, 4, drop_last=True), 2)


def test_a_job_of_several_replicas_takes_several_batches_a_step():
    steps = steps_of(DataLoader(DATA, 4), batches=3, steps=2)
    assert [[len(batch) for batch in step] for step in steps] == [[4, 4, 4], [4, 4, 3]]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(7))


def test_a_stream_is_read_in_batches():
    loader = DataLoader(Stream(), 3)
    assert TrainingData.of(loader).is_stream
    steps = steps_of(loader, steps=4, epoch_end="continue")
    assert flat(steps) == [[0, 1, 2], [3, 4, 5], [6, 0, 1], [2, 3, 4]]


class Replaced(DataLoader):
    def __iter__(self):
        return super().__iter__()


class Named(DataLoader):
    """A subclass that only adds things."""

    name = "train"

    def describe(self):
        return self.name


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ([1, 2], "got a list: give a torch.utils.data.DataLoader"),
        (DataLoader(DATA, in_order=False, num_workers=1), r"refuses DataLoader\(in_order=False\), because"),
        (Replaced(DATA), "does not know what Replaced.__iter__ changes, which replaces that of DataLoader"),
        (
            DataLoader(DATA, sampler=DistributedSampler(DATA, 3, 1)),
            "the DistributedSampler gives part 1 of 3 of the data",
        ),
        (DataLoader(DATA, batch_sampler=itertools.repeat([1])), r"the sampler repeat has no len\(\)"),
        (DataLoader((x for x in DATA), sampler=range(3)), "the data set is a generator, an iterator"),
    ],
)
def test_a_loader_that_cannot_be_kept_is_refused_in_a_sentence(loader, words):
    with pytest.raises(ConfigError, match=words):
        TrainingData.of(loader)


def test_a_subclass_that_only_adds_things_is_taken():
    assert TrainingData.of(Named(DATA, 4)).size == len(DATA)


def test_the_workers_of_a_loader_are_taken_with_their_options():
    def tell(worker):
        pass

    loader = DataLoader(DATA, 4, num_workers=2, worker_init_fn=tell, prefetch_factor=3, timeout=9)
    data = TrainingData.of(loader)
    assert data.num_workers == 2
    assert data.reading == {
        "worker_init_fn": tell,
        "prefetch_factor": 3,
        "multiprocessing_context": None,
        "pin_memory": False,
        "timeout": 9,
    }


def test_a_subset_of_a_data_set_stays_a_subset():
    """As for a split into training and validation."""
    loader = DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(0, 23, 2)))
    seen = [x - 100 for batch in flat(steps_of(loader, steps=6)) for x in batch]
    assert sorted(seen) == sorted([*range(0, 23, 2)] * 2)


# --- the table ---------------------------------------------------------------------------------------------


def loader_classes():
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return [DataLoader]
    return [DataLoader, StatefulDataLoader]


def test_the_page_has_the_table():
    check_page("dataloader", {"DataLoader": DATALOADER.rows})


@pytest.mark.parametrize("kind", loader_classes(), ids=lambda x: x.__name__)
def test_every_argument_of_the_installed_release_has_a_row(kind):
    assert DATALOADER.unknown(kind) == []


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_sampler_that_divides_the_data_among_a_replicas_ranks_is_taken_whole(shuffle):
    own = DistributedSampler(DATA, 2, 1, shuffle=shuffle, seed=5)
    data = TrainingData.of(DataLoader(DATA, 4, sampler=own), ranks=2)
    whole = DistributedSampler(DATA, 1, 0, shuffle=shuffle, seed=5)
    assert data.size == len(DATA) and list(data.sampler) == list(whole)
