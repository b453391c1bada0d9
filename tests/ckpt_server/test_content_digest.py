"""The content digest of a state is the sum of its ranks' digests, and no layout shows in it."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fabric.ckpt_server.format.safetensors_file import TensorEntry, build_preamble, canonical_json
from fabric.ckpt_server.state.content_digest import ContentDigests
from fabric.ckpt_server.state.encoding import FILE_DTYPE
from fabric.ckpt_server.state.training_state import StateDescriber, StateView, host_bytes
from fabric.errors import ProtocolError, StateError
from fabric.protocol.messages.rank_messages import summed_digest

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
MESH = [["dp"], [2]]


def part_of(tensors: dict[str, tuple[torch.Tensor, list[int], list[int]]], step: int = 3) -> StateView:
    """Return a rank's view: its part of each tensor, with the part's offset in the whole tensor."""
    state, entries = {}, []
    for name, (part, offset, shape) in tensors.items():
        node: object = {"$tensor": name}
        if list(part.shape) != shape:
            described = {"shape": shape, "offset": offset, "mesh": MESH, "placements": ["S(0)"]}
            node = {"$shard": [node, described]}
        state[name] = node
        word = FILE_DTYPE[part.dtype]
        entries.append(TensorEntry(name, word, tuple(part.shape), part.numel() * part.dtype.itemsize))
    header = build_preamble(entries, canonical_json({"format": 1, "step": step, "state": state}))
    nbytes = len(header) + sum(e.nbytes for e in entries)
    return StateView(header, tuple((n, t) for n, (t, _, _) in tensors.items()), nbytes, step)


class _Always(dict):
    """Says of every rank's part that it is the first copy."""

    def get(self, key, default=None):
        return True


def whole_digest(tensor: torch.Tensor) -> str:
    view = part_of({"w": (tensor, [0] * tensor.dim(), list(tensor.shape))})
    return ContentDigests(0, {}).of_view(view)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 2),
    st.lists(st.integers(0, 9), max_size=3),
)
def test_digests_of_parts_sum_to_the_digest_of_the_tensor_for_any_cut(shape, dtype, dimension, cuts):
    dimension %= len(shape)
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).mul(37).remainder(251).to(dtype)
    bounds = sorted({0, shape[dimension], *(cut % shape[dimension] for cut in cuts)})
    digests = []
    for rank, (begin, end) in enumerate(itertools.pairwise(bounds)):
        part = tensor.narrow(dimension, begin, end - begin).contiguous()
        offset = [begin if d == dimension else 0 for d in range(len(shape))]
        digests.append(ContentDigests(rank, _Always()).of_view(part_of({"w": (part, offset, shape)})))
    assert summed_digest(digests) == whole_digest(tensor)


@given(st.integers(0, 23), st.integers(0, 31))
def test_one_bit_changes_the_digest(place, bit):
    tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    before = whole_digest(tensor)
    tensor.view(-1).view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
    assert whole_digest(tensor) != before


def test_elements_that_change_places_change_the_digest():
    tensor = torch.arange(12.0).reshape(3, 4)
    others = [tensor.flip(0), tensor.flip(1), tensor.t().contiguous(), tensor.reshape(4, 3)]
    assert len({whole_digest(x) for x in [tensor, *others]}) == 5


def test_a_tensor_copied_on_two_ranks_counts_once_in_the_digest():
    tensor = torch.randn(4)
    view = part_of({"w": (tensor, [0], [4])})
    first, second = (ContentDigests(rank, {}).of_view(view) for rank in range(2))
    assert second[16:] == "0" * 16
    assert summed_digest([first, second]) == first


def test_live_state_and_its_file_have_the_same_digest():
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    view = StateDescriber({"model": model, "optimizer": optimizer}).capture(7)
    file = bytearray(view.header)
    for _, tensor in view.tensors:
        file += bytes(host_bytes(tensor))
    digests = ContentDigests(0, {})
    assert digests.of_file(memoryview(file)) == digests.of_view(view)
    later = StateDescriber({"model": model, "optimizer": optimizer}).capture(8)
    assert digests.of_view(later)[:16] != digests.of_view(view)[:16]
    assert digests.of_view(later)[16:] == digests.of_view(view)[16:]


def test_a_tensor_sharded_unlike_every_parameter_is_refused():
    with pytest.raises(StateError, match="w is sharded as no parameter is"):
        ContentDigests(0, {}).of_view(part_of({"w": (torch.zeros(2), [0], [4])}))


def test_ranks_that_describe_different_states_have_no_sum():
    with pytest.raises(ProtocolError, match="describe their state differently"):
        summed_digest(["0" * 32, "1" * 32])
    assert summed_digest(["0" * 32, ""]) == ""
    assert summed_digest(["a" * 16 + "f" * 16, "a" * 16 + "0" * 15 + "2"]) == "a" * 16 + "0" * 15 + "1"
