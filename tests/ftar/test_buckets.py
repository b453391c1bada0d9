"""Gradients into a flat buffer and back: every form of parameter, nothing written on refusal."""

import pytest
import torch
from ftar.gathering import gather
from torch import nn

from fabric.errors import ConfigError, StateError
from fabric.ftar.buckets import ALIGNMENT_BYTES, FlatGradients, layout_hash
from fabric.ftar.reduce_ops import put_together


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


def test_gathered_gradients_are_scattered_divided_by_the_weight():
    named = parameters(*MIXED)
    flat = FlatGradients(named)
    fill(named, 1)
    before = [p.grad.clone() for _, p in named]
    buffer = torch.full((flat.nbytes,), 255, dtype=torch.uint8)
    gather(flat, buffer)
    for _, p in named:
        p.grad = torch.zeros_like(p) if p.dim() else None
    flat.scatter(buffer, 3.0)
    for (_, p), old in zip(named, before, strict=True):
        assert torch.equal(p.grad, old / 3.0)


def test_a_missing_gradient_may_become_a_part_of_the_buffer():
    named = parameters(*MIXED, ((6, 4), torch.float32))
    flat = FlatGradients(named)
    by_name = dict(named)
    by_name["p6"].data = torch.randn(4, 6).t()  # its gradient has other strides than the buffer
    fill(named, 1)
    before = {name: p.grad.clone() for name, p in named}
    buffer = torch.full((flat.nbytes,), 255, dtype=torch.uint8)
    gather(flat, buffer)
    for name, p in named:
        p.grad = torch.zeros_like(p) if name == "p0" else None
    flat.of_one = frozenset({"p2"})
    flat.scatter(buffer, 3.0, lend=True)
    memory = buffer.untyped_storage().data_ptr()
    for name, p in named:
        assert torch.equal(p.grad, before[name] / (1.0 if name == "p2" else 3.0)), name
        assert (p.grad.untyped_storage().data_ptr() == memory) == (name not in ("p0", "p6")), name


@pytest.mark.parametrize("buffers", [1, 3, 5])
def test_gradients_come_from_the_buffer_that_is_given_however_many_there_are(buffers):
    named = parameters(*MIXED)
    flat = FlatGradients(named)
    slots = [torch.zeros(flat.nbytes, dtype=torch.uint8) for _ in range(buffers)]
    for step in range(3 * buffers):
        fill(named, step)
        before = [p.grad.clone() for _, p in named]
        gather(flat, slots[step % buffers])
        for _, p in named:
            p.grad = None
        flat.scatter(slots[step % buffers], 2.0)
        assert all(torch.equal(p.grad, old / 2.0) for (_, p), old in zip(named, before, strict=True))


def test_buckets_are_aligned_by_type_last_parameter_first_and_cover_their_parameters():
    named = parameters(*MIXED)
    flat = FlatGradients(named)
    buffer = torch.zeros(flat.nbytes, dtype=torch.uint8)
    by_bytes = sorted(flat.buckets, key=lambda bucket: bucket.begin)
    held = [(bucket.dtype, [name for name, _ in bucket.parameters]) for bucket in by_bytes]
    assert held == [
        (torch.bfloat16, ["p5", "p1"]),
        (torch.float64, ["p4"]),
        (torch.float16, ["p3"]),
        (torch.float32, ["p2", "p0"]),
    ]
    for bucket in flat.buckets:
        lane = bucket.view(buffer)
        assert (lane.data_ptr() - buffer.data_ptr()) % ALIGNMENT_BYTES == 0 or not lane.numel()
        lane.fill_(1)
    for _, p in named:
        p.grad = None
    flat.scatter(buffer, 2.0)
    assert all((p.grad == 0.5).all() for _, p in named)


def test_buckets_come_in_the_order_in_which_backward_completes_them():
    named = parameters(*MIXED)
    order = [bucket.parameters[-1][0] for bucket in FlatGradients(named).buckets]
    assert order == ["p4", "p3", "p1", "p0"]


@pytest.mark.parametrize("bucket_bytes", [1, 16, 100, 10**9])
def test_buckets_of_any_size_cover_every_byte_once_and_hold_the_same_bytes(bucket_bytes):
    named = parameters(*MIXED, *[((n,), torch.float32) for n in range(1, 20)])
    whole, cut = FlatGradients(named), FlatGradients(named, bucket_bytes)
    fill(named, 5)
    buffers = [torch.full((flat.nbytes,), 255, dtype=torch.uint8) for flat in (whole, cut)]
    gather(whole, buffers[0])
    for bucket in reversed(cut.buckets):
        cut.gather_bucket(bucket, buffers[1])
    for bucket in cut.buckets:
        assert bucket.presence(buffers[1]).tolist() == [1] * len(bucket.parameters)
    for p in (p for _, p in named):
        p.grad = None
    (whole_gradients, cut_gradients) = (
        flat.scatter(buffer, 1.0) or [p.grad.clone() for _, p in named]
        for flat, buffer in zip((whole, cut), buffers, strict=True)
    )
    assert all(map(torch.equal, whole_gradients, cut_gradients))
    ranges = sorted((bucket.gap, bucket.end) for bucket in cut.buckets)
    assert [gap for gap, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == cut.nbytes
    assert all(b.begin % ALIGNMENT_BYTES == 0 and 0 <= b.begin - b.gap < ALIGNMENT_BYTES for b in cut.buckets)
    assert all(b.end - b.begin < bucket_bytes + 4 * 19 + 60 + 8 * len(b.parameters) for b in cut.buckets)


def test_equal_gradients_are_equal_bytes_whatever_was_in_the_buffer():
    named = parameters(*MIXED)
    flat = FlatGradients(named)
    fill(named, 2)
    one = torch.full((flat.nbytes,), 255, dtype=torch.uint8)
    two = torch.zeros(flat.nbytes, dtype=torch.uint8)
    gather(flat, one)
    gather(flat, two)
    assert torch.equal(one, two)


def summed(flats: list[FlatGradients], seed: int) -> torch.Tensor:
    """Return the sum of the gathered gradients, bucket by bucket, as a data plane adds them."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.randint(256, (flats[0].nbytes,), dtype=torch.uint8, generator=generator)
    gather(flats[0], total)
    for flat in flats[1:]:
        part = torch.randint(256, (flat.nbytes,), dtype=torch.uint8, generator=generator)
        gather(flat, part)
        for bucket in flat.buckets:
            bucket.view(total).add_(bucket.view(part))
    return total


@pytest.mark.parametrize("bucket_bytes", [1, 64, 10**6])
@pytest.mark.parametrize("seed", range(20))
def test_a_parameter_that_no_member_used_keeps_no_gradient_and_the_others_get_the_average(seed, bucket_bytes):
    """Random subsets of used parameters per member, against a dictionary of lists."""
    generator = torch.Generator().manual_seed(seed)
    members = [parameters(*MIXED, *MIXED) for _ in range(3)]
    flats = [FlatGradients(named, bucket_bytes) for named in members]
    expected: dict[str, list[torch.Tensor]] = {}
    for named in members:
        for name, p in named:
            used = torch.rand(1, generator=generator).item() < 0.2
            p.grad = torch.randint(9, p.shape, generator=generator).to(p.dtype) if used else None
            expected.setdefault(name, []).extend([p.grad.clone()] if used else [])
    assert any(expected.values())
    total = summed(flats, seed)
    for flat, named in zip(flats, members, strict=True):
        flat.scatter(total, 2.0)
        for name, p in named:
            if not expected[name]:
                assert p.grad is None, name
            else:
                assert torch.equal(p.grad, torch.stack(expected[name]).sum(0) / 2), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_thousands_of_members_in_a_small_type_still_count_as_some(dtype):
    named = parameters(((1,), dtype), ((1,), dtype))
    flat = FlatGradients(named)
    named[0][1].grad = torch.zeros(1, dtype=dtype)
    one = torch.zeros(flat.nbytes, dtype=torch.uint8)
    gather(flat, one)
    total, (bucket,) = one.clone(), flat.buckets
    for _ in range(5000):
        bucket.view(total).add_(bucket.view(one))
    assert flat.absent(total) == {"p1"} and not bucket.presence(total).isinf().any()


def test_a_step_in_which_no_member_has_any_gradient_leaves_none():
    named = parameters(((4,), torch.float32), ((2,), torch.float32))
    flat = FlatGradients(named)
    flat.scatter(torch.zeros(flat.nbytes, dtype=torch.uint8), 1.0)
    assert all(p.grad is None for _, p in named)


def test_the_gradient_tensors_themselves_are_kept_where_they_exist():
    named = parameters(((4,), torch.float32))
    flat = FlatGradients(named)
    fill(named, 3)
    gradient = named[0][1].grad
    buffer = torch.zeros(flat.nbytes, dtype=torch.uint8)
    gather(flat, buffer)
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
    gather(flat, buffer)
    weight.grad = None
    flat.scatter(buffer, 2.0)
    assert torch.equal(weight.grad, expected[0])
    assert torch.equal(turned.grad, expected[1])


def test_frozen_parameters_take_no_part():
    named = parameters(((4,), torch.float32), ((8,), torch.float32))
    named[0][1].requires_grad_(False)
    flat = FlatGradients(named)
    assert flat.nbytes == 32 + 4  # with the presence
    assert [name for name, _ in flat.parameters] == ["p1"]


def test_a_model_without_parameters_needs_no_bytes():
    flat = FlatGradients([])
    buffer = torch.zeros(0, dtype=torch.uint8)
    gather(flat, buffer)
    flat.scatter(buffer, 1.0)
    assert (flat.nbytes, flat.buckets) == (0, ())


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
    "buffer", [torch.zeros(21, dtype=torch.uint8), torch.zeros(20), torch.zeros(4, 5).byte()]
)
def test_a_buffer_of_the_wrong_form_is_refused(buffer):
    flat = FlatGradients(parameters(((4,), torch.float32)))
    for use in (lambda b: gather(flat, b), lambda b: flat.scatter(b, 1.0)):
        with pytest.raises(StateError, match="20 bytes"):
            use(buffer)


def test_a_sparse_gradient_is_refused_by_name_and_the_buffer_is_untouched():
    dense = nn.Linear(2, 2)
    table = nn.Embedding(4, 2, sparse=True)
    (table(torch.tensor([1])).sum() + dense(torch.ones(1, 2)).sum()).backward()
    flat = FlatGradients([*dense.named_parameters(), ("table.weight", table.weight)])
    buffer = torch.full((flat.nbytes,), 9, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"table\.weight is sparse"):
        gather(flat, buffer)
    assert (buffer == 9).all()


def test_types_that_cannot_be_summed_and_repeated_names_are_refused():
    with pytest.raises(ConfigError, match="complex64"):
        FlatGradients([("c", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))])
    twice = parameters(((4,), torch.float32)) * 2
    with pytest.raises(ConfigError, match="'p0'"):
        FlatGradients(twice)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_first_tensor_that_is_not_finite_is_named(value, dtype):
    parameters = [(f"p{i}", torch.nn.Parameter(torch.ones(5 + i, dtype=dtype))) for i in range(3)]
    for _, parameter in parameters:
        parameter.grad = torch.full_like(parameter, 3e4)
    flat = FlatGradients(parameters)
    buffer = torch.zeros(flat.nbytes, dtype=torch.uint8)
    gather(flat, buffer)
    assert flat.first_nonfinite(buffer) == flat.first_nonfinite_own() == ""
    parameters[1][1].grad[3] = value
    assert flat.first_nonfinite_own() == "p1"
    gather(flat, buffer)
    assert flat.first_nonfinite(buffer) == "p1"


def test_a_finite_gradient_whose_sum_overflows_is_not_called_nonfinite():
    parameters = [("p", torch.nn.Parameter(torch.ones(4)))]
    parameters[0][1].grad = torch.full((4,), 3e38)
    flat = FlatGradients(parameters)
    buffer = torch.zeros(flat.nbytes, dtype=torch.uint8)
    gather(flat, buffer)
    assert flat.first_nonfinite(buffer) == flat.first_nonfinite_own() == ""


def test_gradients_that_lie_as_in_the_buffer_stay_where_they_are():
    named = parameters(*MIXED, ((6, 4), torch.float32), ((5,), torch.float32), ((9,), torch.float32))
    flat = FlatGradients(named, bucket_bytes=60)
    fill(named, 3)
    by_name = dict(named)
    by_name["p6"].grad = torch.randn(4, 6).t()  # other strides than in the buffer
    by_name["p7"].grad = None
    copied, buffer = (torch.full((flat.nbytes,), 255, dtype=torch.uint8) for _ in range(2))
    gather(flat, copied)
    for bucket in flat.buckets:
        parts = flat.gather_bucket(bucket, buffer, in_place=True)
        together = torch.cat([part.reshape(-1) for part in parts])
        assert torch.equal(together.view(torch.uint8), bucket.view(copied).view(torch.uint8))
        places = {part.data_ptr() for part in parts}
        for name, p in bucket.parameters:
            in_place = name not in ("p6", "p7") and p.numel() > 0
            assert (p.grad is not None and p.grad.data_ptr() in places) == in_place, name
        put_together(parts, bucket.view(buffer))
    assert torch.equal(buffer, copied)


@pytest.mark.parametrize("case", ["scaled", "another member has the values"])
def test_values_that_change_on_their_way_into_the_buffer_are_copied(case):
    named = parameters(((4,), torch.float32))
    flat = FlatGradients(named)
    fill(named, 3)
    if case == "scaled":
        flat.scale = 2.0
    else:
        flat.of_one = frozenset({"p0"})
    buffer = torch.full((flat.nbytes,), 255, dtype=torch.uint8)
    (part,) = flat.gather_bucket(flat.buckets[0], buffer, is_one=False, in_place=True)
    assert part.data_ptr() == buffer.data_ptr()
    expected = named[0][1].grad * 2 if case == "scaled" else torch.zeros(4)
    assert torch.equal(part[:4], expected)
