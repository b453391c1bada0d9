"""The digest of a gradient on its device, against plain integers, and the changes that it must notice."""

import itertools
import random

import numpy as np
import pytest
import torch
from server_support import manifest_of

from fabric.ckpt_server.format.manifest import check_manifest, of_rank, state_digest
from fabric.ckpt_server.state import device_digest
from fabric.ckpt_server.state.device_digest import DeviceDigest
from fabric.errors import StateError
from fabric.protocol.messages.rank_messages import replica_digest


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> DeviceDigest:
    monkeypatch.setattr(device_digest, "BLOCK_WORDS", 16)
    return DeviceDigest(torch.device("cpu"))


def some_bytes(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def name(digests: DeviceDigest, data: torch.Tensor) -> str:
    return digests.name(digests.sums([data]), data.numel())


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 63, 64, 65, 128, 131, 700])
def test_sums_are_those_of_plain_integers(digests: DeviceDigest, nbytes: int) -> None:
    data = some_bytes(nbytes)
    padded = data.numpy().tobytes() + bytes(-nbytes % 4)
    words = np.frombuffer(padded, "<i4").tolist()
    keys = digests._keys.tolist()
    expected = [
        [sum(word * key for word, key in zip(words[at : at + 16], row, strict=False)) % 2**64 for row in keys]
        for at in range(0, len(words), 16)
    ]
    assert [[value % 2**64 for value in row] for row in digests.sums([data]).tolist()] == expected


def test_parts_have_the_sums_of_the_whole_wherever_it_is_cut(digests: DeviceDigest) -> None:
    """A piece is 256 bytes here: parts are smaller, larger, and begin at any address."""
    data = some_bytes(2000)
    expected = digests.sums([data])
    draw = random.Random(7)
    for count in (1, 2, 3, 5, 20, 200):
        cuts = sorted(draw.sample(range(1, 2000), count))
        parts = [data[a:b] for a, b in itertools.pairwise([0, *cuts, 2000])]
        assert torch.equal(digests.sums(parts), expected), cuts
    assert torch.equal(digests.sums(list(data.split(256))), expected)


def test_every_changed_bit_changes_both_sums(digests: DeviceDigest) -> None:
    data = some_bytes(70)
    before = digests.sums([data])
    for bit in range(70 * 8):
        changed = data.clone()
        changed[bit // 8] ^= 1 << (bit % 8)
        assert (digests.sums([changed]) != before).any(dim=0).all(), bit


def test_exchanged_words_and_blocks_and_other_lengths_have_other_digests(digests: DeviceDigest) -> None:
    data = some_bytes(256)
    words, blocks = data.view(16 * 4, 4), data.view(4, 64)
    others = [
        words[[1, 0, *range(2, 64)]].reshape(-1),
        blocks[[1, 0, 2, 3]].reshape(-1),
        data[:-1],
        torch.cat([data, torch.zeros(4, dtype=torch.uint8)]),
        torch.zeros(256, dtype=torch.uint8),
        torch.zeros(260, dtype=torch.uint8),
    ]
    names = [name(digests, x) for x in (data, *others)]
    assert len(set(names)) == len(names) and all(len(x) == 32 for x in names)


def test_keys_are_the_same_everywhere() -> None:
    """Members of one job may have different versions of torch and numpy."""
    assert name(DeviceDigest(torch.device("cpu")), some_bytes(0)) == "2c0a8a99dc147d5445c3b49d035665b2"
    counting = torch.arange(1000, dtype=torch.int32).view(torch.uint8)
    assert name(DeviceDigest(torch.device("cpu")), counting) == "cb6a6ea385437452610da7fc6ecb3511"


def test_the_ranks_of_a_manifest_list_the_names_of_states_made_on_devices() -> None:
    file, names = bytes(5000), ["1" * 32, "2" * 32]
    for rank, name_ in enumerate(names):
        manifest = of_rank(manifest_of(file, 4) | {"state": name_}, rank, names)
        assert state_digest(check_manifest(manifest)) == replica_digest(names)
    assert state_digest(check_manifest(manifest_of(file, 4) | {"state": names[0]})) == names[0]
    with pytest.raises(StateError, match="is not what it lists for its own rank 1"):
        check_manifest(of_rank(manifest_of(file, 4) | {"state": names[0]}, 1, names))
    with pytest.raises(StateError, match="The manifest's state is not 32 hex digits"):
        check_manifest(manifest_of(file, 4) | {"state": "x"})
