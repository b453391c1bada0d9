"""The digest of a few samples, by which replicas notice that each has made its data in a way of its own."""

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fabric.client.data.loader import LoaderOptions, make_loader
from fabric.client.loop.data_content import content_digest
from fabric.client.loop.step import StepData
from fabric.runtime.config import Settings


class Files(Dataset):
    """As users write one: paths in a list, and a cache that its calls fill."""

    def __init__(self, paths, labels=None):
        self.paths, self.labels = paths, labels
        self.cache, self.count, self.seen = [None] * len(paths), 0, []

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        self.count += 1
        self.seen.append(index)
        if self.cache[index] is None:
            self.cache[index] = len(self.paths[index])
        return self.cache[index]


PATHS = [f"/data/{n:04}.png" for n in range(200)]
NUMBERS = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
UNEQUAL = {
    "a shuffled list of files": (Files(PATHS), Files(PATHS[100:] + PATHS[:100])),
    "a split": (Subset(PATHS, range(100)), Subset(PATHS, range(100, 200))),
    "drawn samples": (TensorDataset(NUMBERS), TensorDataset(NUMBERS.flip(0))),
    "an array": (Files(PATHS, NUMBERS.numpy()), Files(PATHS, NUMBERS.numpy()[::-1])),
    "pairs in a list": ([(x, 1) for x in NUMBERS], [(x, 1) for x in NUMBERS.flip(0)]),
    "a part of two": (
        ConcatDataset([TensorDataset(NUMBERS), Files(PATHS)]),
        ConcatDataset([TensorDataset(NUMBERS), Files(PATHS[::-1])]),
    ),
    "numbers of words": (TensorDataset(torch.arange(200)), TensorDataset(torch.arange(200).flip(0))),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_data_that_each_process_makes_in_its_own_way_have_other_digests(name):
    one, other = map(content_digest, UNEQUAL[name])
    assert one and other and one != other


def test_the_folder_the_cache_and_the_last_digits_of_a_number_do_not_count():
    used = Files([path.replace("/data", "/scratch/host7") for path in PATHS], NUMBERS * (1 + 1e-7))
    for index in range(100):
        used[index]
    assert content_digest(used) == content_digest(Files(PATHS, NUMBERS.clone()))


def test_a_data_set_that_shows_nothing_has_no_digest_and_is_not_read():
    class Opens(Dataset):
        def __getitem__(self, index):
            raise AssertionError("a sample was read")

    assert content_digest(Opens()) == content_digest(range(3)) == content_digest(None) == ""
    assert content_digest(TensorDataset(torch.empty(4, device="meta"))) == ""
    assert content_digest(Subset(Opens(), np.arange(4))) != ""


def described(dataset, calls=1, **options):
    """Return what replicas compare of the ``calls``-th loader of a process."""
    chosen = LoaderOptions(**options)
    settings = Settings(replica="r0", replicas="2")
    data = StepData({})
    for call in range(calls):
        data.enter(make_loader(dataset, (4, 2, 0), None, 0, chosen, settings), call + 1, None)
    return data.describe()


def test_replicas_compare_the_digest_of_their_first_loader_unless_they_read_shards():
    assert described(PATHS)["content"] == content_digest(PATHS)
    assert "content" not in described(PATHS, calls=2), "later data may hold what a replica has made of them"
    assert "content" not in described(PATHS, redundancy=1)
