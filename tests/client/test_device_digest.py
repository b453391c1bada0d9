"""The digest of a gradient on its device, against plain integers, and the changes that it must notice."""

import numpy as np
import pytest
import torch

from fabric.client.gradients import gradient_backend
from fabric.client.gradients.gradient_backend import DeviceDigest


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> DeviceDigest:
    monkeypatch.setattr(gradient_backend, "BLOCK_WORDS", 8)
    return DeviceDigest(torch.device("cpu"))


def some_bytes(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def name(digests: DeviceDigest, data: torch.Tensor) -> str:
    return digests.name(digests.sums(data), data.numel())


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 31, 32, 33, 64, 67, 200])
def test_sums_are_those_of_plain_integers(digests: DeviceDigest, nbytes: int) -> None:
    data = some_bytes(nbytes)
    padded = data.numpy().tobytes() + bytes(-nbytes % 4)
    words = np.frombuffer(padded, "<i4").tolist()
    keys = digests._keys.tolist()
    expected = [
        [sum(word * key for word, key in zip(words[at : at + 8], row, strict=False)) % 2**64 for row in keys]
        for at in range(0, len(words), 8)
    ]
    # the last word is a block of its own where the bytes do not fill it
    if nbytes % 4 and nbytes > 4 and (nbytes // 4) % 8:
        whole = nbytes // 4
        first = whole // 8 * 8
        expected[-1:] = [
            [sum(w * k for w, k in zip(words[first:whole], row, strict=False)) % 2**64 for row in keys],
            [words[whole] * row[0] % 2**64 for row in keys],
        ]
    assert [[value % 2**64 for value in row] for row in digests.sums(data).tolist()] == expected


def test_every_changed_bit_changes_both_sums(digests: DeviceDigest) -> None:
    data = some_bytes(70)
    before = digests.sums(data)
    for bit in range(70 * 8):
        changed = data.clone()
        changed[bit // 8] ^= 1 << (bit % 8)
        assert (digests.sums(changed) != before).any(dim=0).all(), bit


def test_exchanged_words_and_blocks_and_other_lengths_have_other_digests(digests: DeviceDigest) -> None:
    data = some_bytes(128)
    words, blocks = data.view(16 * 2, 4), data.view(4, 32)
    others = [
        words[[1, 0, *range(2, 32)]].reshape(-1),
        blocks[[1, 0, 2, 3]].reshape(-1),
        data[:-1],
        torch.cat([data, torch.zeros(4, dtype=torch.uint8)]),
        torch.zeros(128, dtype=torch.uint8),
        torch.zeros(132, dtype=torch.uint8),
    ]
    names = [name(digests, x) for x in (data, *others)]
    assert len(set(names)) == len(names) and all(len(x) == 32 for x in names)


def test_keys_are_the_same_everywhere() -> None:
    """Members of one job may have different versions of torch and numpy."""
    assert name(DeviceDigest(torch.device("cpu")), some_bytes(0)) == "2c0a8a99dc147d5445c3b49d035665b2"
    counting = torch.arange(1000, dtype=torch.int32).view(torch.uint8)
    assert name(DeviceDigest(torch.device("cpu")), counting) == "cb6a6ea385437452610da7fc6ecb3511"
