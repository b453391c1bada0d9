"""The DataLoader of an adopted script: the job trains on what one process with the whole batch would."""

from collections import Counter

import pytest
import torch
from test_adopted_loops import ScriptedSession, adopt, data, make  # noqa: F401
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

REPLICAS, EPOCHS = 3, 3


class Numbers(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(index).float().reshape(-1)


class Counting(Sampler):
    """Another order in each pass, from a counter of its own."""

    def __init__(self, size):
        self.size, self.passes = size, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        self.passes += 1
        return iter((i * (2 * self.passes + 1)) % self.size for i in range(self.size))


def seeded():
    return torch.Generator().manual_seed(4)


def loader(batch_size, sampler=None, size=40, **options):
    return DataLoader(Numbers(size), batch_size, sampler=sampler, **options)


LOADERS = {
    "subset": lambda b: loader(b, SubsetRandomSampler(range(0, 36, 2), seeded())),
    "weighted": lambda b: loader(
        b, WeightedRandomSampler([i + 1 for i in range(40)], 24, generator=seeded())
    ),
    "replacement": lambda b: loader(b, RandomSampler(range(40), True, 30, generator=seeded())),
    "generator": lambda b: loader(b, shuffle=True, generator=seeded()),
    "in order": loader,
    "state of its own": lambda b: loader(b, Counting(40)),
    "distributed": lambda b: loader(b, DistributedSampler(Numbers(40), 1, 0, seed=3)),
    "without the last": lambda b: loader(b, drop_last=True),
    "one sample left": lambda b: loader(b, size=37),
    "two samples left": lambda b: loader(b, size=38),
    "less than a batch": lambda b: loader(b, size=4),
    "workers": lambda b: loader(b, SubsetRandomSampler(range(9), seeded()), num_workers=1),
    "one by one": lambda b: DataLoader(Numbers(30), batch_size=None, sampler=Counting(30)),
}


def trained(adopt, monkeypatch, loader, replica):  # noqa: F811
    """The samples of each step on one replica, those of weight 0 left out; and the indices of its journal."""
    monkeypatch.setenv("FABRIC_REPLICA", f"r{replica}")
    monkeypatch.setenv("FABRIC_REPLICAS", str(REPLICAS))
    seen, listed = [], []

    def script():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(EPOCHS):
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            number = 0
            for number, x in enumerate(loader, 1):  # noqa: B007
                model(x).sum().backward()
                optimizer.step()
                seen.append(x.flatten().int().tolist())
            assert number == len(loader)

    session = adopt(script)
    weights = [weight for _, weight in session.made]
    for step, weight in enumerate(weights):
        listed.append(Counter(session.sampler.indices(step)))
        if not weight:
            seen[step] = []
        assert weight == len(seen[step])
    assert all(took for _, took in session.took)
    return [Counter(x) for x in seen], listed


@pytest.mark.parametrize("name", LOADERS)
def test_the_replicas_together_train_on_the_batches_of_one_process(adopt, monkeypatch, name):  # noqa: F811
    alone = LOADERS[name](2 * REPLICAS)
    expected = []
    for epoch in range(EPOCHS):
        if isinstance(alone.sampler, DistributedSampler):
            alone.sampler.set_epoch(epoch)
        expected += [x.flatten().int().tolist() for x in alone]
    if alone.batch_size is None:
        expected = [
            [i for x in expected[at : at + REPLICAS] for i in x] for at in range(0, len(expected), REPLICAS)
        ]
    parts = [trained(adopt, monkeypatch, LOADERS[name](2), replica) for replica in range(REPLICAS)]
    for seen, listed in parts:
        assert seen == listed, "the journal names other samples"
    together = [sum(steps, Counter()) for steps in zip(*(seen for seen, _ in parts), strict=True)]
    assert together == [Counter(x) for x in expected]


def test_a_batch_sampler_gives_one_batch_to_each_rank(adopt, monkeypatch):  # noqa: F811
    def made():
        batches = [*BatchSampler(range(40), 4, False), [0]]
        return DataLoader(Numbers(40), batch_sampler=batches)

    expected = [Counter(x.flatten().int().tolist()) for _ in range(EPOCHS) for x in made()]
    parts = [trained(adopt, monkeypatch, made(), replica)[0] for replica in range(REPLICAS)]
    steps = [list(x) for x in zip(*parts, strict=True)]
    assert [batch for step in steps for batch in step if batch] == expected
    assert steps[3][2] == Counter(), "eleven batches are three for each rank, and two"


def test_evaluations_are_whole_whatever_their_sampler(adopt):  # noqa: F811
    seen = []

    def script():
        model, optimizer = make()
        train, validation, shuffled = data(), data(shuffle=False, size=6), data(size=6)
        assert next(iter(validation)) and next(iter(shuffled)), "a look at the data"
        with torch.no_grad():
            assert len(train) == 8 and len(shuffled) == 3, "whole, as what it reads here"
            seen.append(len(list(shuffled)))
        for (x,) in train:
            model(x).sum().backward()
            optimizer.step()
            for loader in (validation, shuffled):
                assert len(loader) == 3
                for count, _ in enumerate(loader, 1):  # noqa: B007
                    with torch.no_grad():
                        pass
                seen.append(count)
            for _, _ in zip(range(2), validation, strict=False):
                pass

    assert len(adopt(script).made) == 4
    assert seen == [3] * 9


def test_a_loader_that_is_made_again_for_each_epoch_goes_on(adopt):  # noqa: F811
    dataset, made = TensorDataset(torch.randn(16, 2)), []

    def script():
        model, optimizer = make()
        for _ in range(2):
            loader = DataLoader(dataset, batch_size=2, sampler=SubsetRandomSampler(range(0, 16, 2)))
            made.append(len(loader))
            for (x,) in loader:
                model(x).sum().backward()
                optimizer.step()

    session = adopt(script)
    assert made == [2, 2] and len(session.made) == 4
    assert all(took for _, took in session.took)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_that_the_script_leaves_early_is_followed_by_a_whole_one(adopt, shuffle):  # noqa: F811
    seen = []

    def script():
        model, optimizer = make()
        loader = DataLoader(TensorDataset(torch.arange(16.0)), batch_size=2, shuffle=shuffle)
        for limit in (3, 3, 9):
            for number, (x,) in enumerate(loader, 1):
                model(torch.ones(2)).sum().backward()
                optimizer.step()
                seen.append([int(i) for i in x])
                if number == limit:
                    break

    session = adopt(script)
    assert len(session.made) == 3 + 3 + 4 and all(took for _, took in session.took)
    if not shuffle:  # part 1 of blocks of four samples, from the first in each epoch
        first = [[2, 3], [6, 7], [10, 11]]
        assert seen == [*first, *first, *first, [14, 15]]


def test_a_file_says_which_part_of_the_passes_the_loop_has_left_out(adopt, tmp_path):  # noqa: F811
    path, seen = tmp_path / "snapshot.pt", []

    def script():
        model, optimizer = make()
        if path.exists():
            model.load_state_dict(torch.load(path, weights_only=True))
        loader = DataLoader(TensorDataset(torch.arange(16.0)), batch_size=2)
        for _ in range(2):
            for number, (x,) in enumerate(loader, 1):
                model(torch.ones(2)).sum().backward()
                optimizer.step()
                seen.append(int(x[0]))
                if number == 3:
                    break
        torch.save(model.state_dict(), path)

    adopt(script)
    assert seen == [2, 6, 10] * 2
    again = ScriptedSession()
    again.at = 6
    adopt(script, again)
    assert seen[6:] == [14, 2, 6, 10], "the second run ends the pass in which the first one has saved"


def test_a_loop_that_trains_on_a_stream_goes_over_all_its_batches(adopt):  # noqa: F811
    class Noise(IterableDataset):
        def __iter__(self):
            return (torch.randn(2) for _ in range(8))

    counts = []

    def script():
        model, optimizer = make()
        loader = DataLoader(Noise(), batch_size=2)
        for _ in range(3):
            count = 0
            for count, x in enumerate(loader, 1):  # noqa: B007
                model(x).sum().backward()
                optimizer.step()
            counts.append(count)

    session = adopt(script, ScriptedSession([9]))
    assert counts == [4, 4, 4] and [n for n, _ in session.made] == [9, 10, 11]
