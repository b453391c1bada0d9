"""Gradients into a flat buffer and back: every form of parameter, nothing written on refusal."""

import pytest
import torch
from torch import nn

from fabric.errors import ConfigError, StateError
from fabric.ftar.buckets import ALIGNMENT_BYTES, FlatGradients, layout_hash


def parameters(*shapes_and_types: tuple[tuple[int, ...], torch.dtype]):
    return [
        (f"p{i}", nn.Parameter(torch.randn(shape).to(dtype)))
        for i, (shape, dtype) in enumerate(shapes_and_types)
    ]


MIXED = [
    ((3, 5), torch.float32),
    ((7,), torch.bfloat16),
    ((), torch.float32),
    ((2, 0), torch.float16),
    ((4,), torch.float64),
    ((1, 1, 9), torch.bfloat16),
]


def fill(named, seed: int) -> None:
    torch.manual_seed(seed)
    for _, p in named:
        p.grad = torch.randn(p.shape).to(p.dtype)


def test_what_was_gathered_is_scattered_divided_by_the_weight():
    named = parameters(*MIXED)
    flat = FlatGradients(named)
    fill(named, 1)
    before = [p.grad.clone() for _, p in named]
    buffer = torch.full((flat.nbytes,), 255, dtype=torch.uint8)
    flat.gather(buffer)
    for _, p in named:
        p.grad = torch.zeros_like(p) if p.dim() else None
    flat.scatter(buffer, 3.0)
    for (_, p), old in zip(named, before, strict=True):
        assert torch.equal(p.grad, old / 3.0)


def test_lanes_are_aligned_in_order_and_cover_their_parameters():
    named = parameters(*MIXED)
    flat = FlatGradients(named)
    buffer = torch.zeros(flat.nbytes, dtype=torch.uint8)
    lanes = flat.lanes(buffer)
    assert [lane.dtype for lane in lanes] == [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    ]
    assert [lane.numel() for lane in lanes] == [16, 16, 0, 4]
    for lane in lanes:
        assert (lane.data_ptr() - buffer.data_ptr()) % ALIGNMENT_BYTES == 0
        lane.fill_(1)
    for _, p in named:
        p.grad = None
    flat.scatter(buffer, 2.0)
    assert all((p.grad == 0.5).all() for _, p in named)


def test_equal_gradients_are_equal_bytes_whatever_was_in_the_buffer():
    named = parameters(*MIXED)
    flat = FlatGradients(named)
    fill(named, 2)
    one = torch.full((flat.nbytes,), 255, dtype=torch.uint8)
    two = torch.zeros(flat.nbytes, dtype=torch.uint8)
    flat.gather(one)
    flat.gather(two)
    assert torch.equal(one, two)


def test_a_parameter_without_gradient_counts_as_zeros_and_gets_one():
    named = parameters(((4,), torch.float32), ((2,), torch.float32))
    flat = FlatGradients(named)
    named[0][1].grad = torch.ones(4)
    buffer = torch.full((flat.nbytes,), 7, dtype=torch.uint8)
    flat.gather(buffer)
    flat.scatter(buffer, 1.0)
    assert torch.equal(named[1][1].grad, torch.zeros(2))


def test_the_gradient_tensors_themselves_are_kept_where_they_exist():
    named = parameters(((4,), torch.float32))
    flat = FlatGradients(named)
    fill(named, 3)
    gradient = named[0][1].grad
    buffer = torch.zeros(flat.nbytes, dtype=torch.uint8)
    flat.gather(buffer)
    flat.scatter(buffer, 2.0)
    assert named[0][1].grad is gradient


def test_strides_of_parameter_and_gradient_do_not_matter():
    weight = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    turned = nn.Parameter(torch.randn(5, 3).t())
    flat = FlatGradients([("weight", weight), ("turned", turned)])
    weight.grad = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    turned.grad = torch.randn(3, 5)
    expected = [weight.grad.clone() / 2.0, turned.grad.clone() / 2.0]
    buffer = torch.zeros(flat.nbytes, dtype=torch.uint8)
    flat.gather(buffer)
    weight.grad = None
    flat.scatter(buffer, 2.0)
    assert torch.equal(weight.grad, expected[0])
    assert torch.equal(turned.grad, expected[1])


def test_frozen_parameters_take_no_part():
    named = parameters(((4,), torch.float32), ((8,), torch.float32))
    named[0][1].requires_grad_(False)
    flat = FlatGradients(named)
    assert flat.nbytes == 32
    assert [name for name, _ in flat.parameters] == ["p1"]


def test_a_model_without_parameters_needs_no_bytes():
    flat = FlatGradients([])
    buffer = torch.zeros(0, dtype=torch.uint8)
    flat.gather(buffer)
    flat.scatter(buffer, 1.0)
    assert (flat.nbytes, flat.lanes(buffer)) == (0, [])


def test_the_layout_tells_names_shapes_types_and_order_apart():
    base = [("a", torch.zeros(2, 3)), ("b", torch.zeros(4))]
    others = [
        [("b", torch.zeros(4)), ("a", torch.zeros(2, 3))],
        [("a", torch.zeros(3, 2)), ("b", torch.zeros(4))],
        [("a", torch.zeros(2, 3)), ("b", torch.zeros(4, dtype=torch.float64))],
        [("a", torch.zeros(2, 3)), ("c", torch.zeros(4))],
        base[:1],
    ]
    hashes = {layout_hash(rows) for rows in [base, *others]}
    assert len(hashes) == 6
    assert layout_hash(base) == layout_hash([(n, torch.ones_like(t)) for n, t in base])
    assert all(len(h) == 16 and int(h, 16) >= 0 for h in hashes)


def test_the_layout_is_the_documented_function():
    import xxhash

    text = b'[["w",[2,3],"float32"]]'
    assert layout_hash([("w", torch.zeros(2, 3))]) == xxhash.xxh3_64_hexdigest(text)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_gives_no_average_is_refused_and_nothing_written(weight):
    named = parameters(((4,), torch.float32))
    flat = FlatGradients(named)
    fill(named, 4)
    before = named[0][1].grad.clone()
    with pytest.raises(StateError, match="weight"):
        flat.scatter(torch.zeros(flat.nbytes, dtype=torch.uint8), weight)
    assert torch.equal(named[0][1].grad, before)


@pytest.mark.parametrize(
    "buffer", [torch.zeros(17, dtype=torch.uint8), torch.zeros(16), torch.zeros(4, 4).byte()]
)
def test_a_buffer_of_the_wrong_form_is_refused(buffer):
    flat = FlatGradients(parameters(((4,), torch.float32)))
    for use in (flat.gather, flat.lanes, lambda b: flat.scatter(b, 1.0)):
        with pytest.raises(StateError, match="16 bytes"):
            use(buffer)


def test_a_sparse_gradient_is_refused_by_name_and_the_buffer_is_untouched():
    dense = nn.Linear(2, 2)
    table = nn.Embedding(4, 2, sparse=True)
    (table(torch.tensor([1])).sum() + dense(torch.ones(1, 2)).sum()).backward()
    flat = FlatGradients([*dense.named_parameters(), ("table.weight", table.weight)])
    buffer = torch.full((flat.nbytes,), 9, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"table\.weight is sparse"):
        flat.gather(buffer)
    assert (buffer == 9).all()


def test_types_that_cannot_be_summed_and_repeated_names_are_refused():
    with pytest.raises(ConfigError, match="complex64"):
        FlatGradients([("c", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))])
    twice = parameters(((4,), torch.float32)) * 2
    with pytest.raises(ConfigError, match="'p0'"):
        FlatGradients(twice)
