"""The ring's arithmetic alone: cuts, schedules and kernels."""

import pytest
import torch
from ftar.gathering import MAX, MIN, mean
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_harness import combine, documented, random_tensor, same_bits

from fabric.errors import ConfigError
from fabric.ftar.reduce_ops import SUM, Reduction
from fabric.ftar.ring_schedule import ALIGNMENT, DTYPE_CODES, schedule, segment_bounds

LENGTHS = st.integers(0, 3000)
WORLDS = st.integers(1, 12)


@given(LENGTHS, WORLDS)
def test_segments_cover_everything_once_at_aligned_cuts_of_about_equal_size(length, world):
    bounds = segment_bounds(length, world)
    assert len(bounds) == world
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(bounds[i][1] == bounds[i + 1][0] for i in range(world - 1))
    assert all(start <= stop for start, stop in bounds)
    assert all(start % ALIGNMENT == 0 or start == length for start, _ in bounds)
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) < 2 * ALIGNMENT


@given(LENGTHS, st.integers(2, 9), st.integers(0, 300))
def test_the_next_member_receives_the_bytes_that_a_member_sends(length, world, chunk):
    plans = [schedule(length, world, p, chunk) for p in range(world)]
    for p in range(world):
        assert plans[p].sends == plans[(p + 1) % world].receives


@given(LENGTHS, st.integers(2, 9), st.integers(0, 300))
def test_a_member_forwards_only_what_it_has_received(length, world, chunk):
    for position in range(world):
        plan = schedule(length, world, position, chunk)
        own = plan.sends[: plan.free]
        assert sum(p.stop - p.start for p in own) == (
            segment_bounds(length, world)[position][1] - segment_bounds(length, world)[position][0]
        )
        for sent, received in zip(plan.sends[plan.free :], plan.receives, strict=False):
            assert (sent.start, sent.stop) == (received.start, received.stop)


@settings(deadline=None)  # on a busy machine single examples are slow
@given(LENGTHS, st.integers(2, 9), st.integers(0, 300))
def test_the_schedule_run_on_sets_gives_all_members_everything_once(length, world, chunk):
    """Run the schedule hop by hop on elements that list the members added to them."""
    state = [[[p] for _ in range(length)] for p in range(world)]
    plans = [schedule(length, world, p, chunk) for p in range(world)]
    sent = [0] * world
    received = [0] * world
    queues: list[list] = [[] for _ in range(world)]
    moved = True
    while moved:
        moved = False
        for p, plan in enumerate(plans):
            if sent[p] < min(len(plan.sends), plan.free + received[p]):
                piece = plan.sends[sent[p]]
                data = [list(x) for x in state[p][piece.start : piece.stop]]
                queues[(p + 1) % world].append((piece, data))
                sent[p] += 1
                moved = True
            if queues[p]:
                piece, data = queues[p].pop(0)
                assert piece.last == (piece.hop in (world - 2, 2 * world - 3))
                if piece.everybody:
                    assert all(set(x) | {p} == set(range(world)) for x in data)
                for offset, x in enumerate(data):
                    own = state[p][piece.start + offset]
                    state[p][piece.start + offset] = x if piece.gather else x + own
                received[p] += 1
                moved = True
    bounds = segment_bounds(length, world)
    for p in range(world):
        for s, (start, stop) in enumerate(bounds):
            order = [(s + k) % world for k in range(world)]
            assert all(x == order for x in state[p][start:stop])


@pytest.mark.parametrize("reduction", [SUM, MIN, MAX, mean(2.5)], ids=lambda r: r.operation)
@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=lambda d: str(d).removeprefix("torch."))
def test_the_kernel_is_the_documented_arithmetic(dtype, reduction):
    if reduction.operation == "mean" and not dtype.is_floating_point:
        pytest.skip("integers have no mean")
    one, two = random_tensor(50_000, dtype, 1), random_tensor(50_000, dtype, 2)
    if dtype.is_floating_point:
        biggest = torch.finfo(dtype).max
        edges = [0.0, -0.0, biggest, -biggest, float("inf"), torch.finfo(dtype).tiny / 2]
        one[: len(edges)] = torch.tensor(edges, dtype=dtype)
        two[: len(edges)] = torch.tensor(edges, dtype=dtype)
    expected = documented([two, one], [(0, one.numel()), (one.numel(), one.numel())], reduction)
    out = torch.empty_like(one)
    combine(reduction, two, one, out, last=True)
    assert same_bits(out, expected)
    combine(reduction, two, one, one, last=True)
    assert same_bits(one, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_partial_sums_of_sixteen_bits_are_float32_and_rounded_once(dtype):
    """With rounding at every addition each addend would be lost."""
    tiny = 2.0**-12 if dtype == torch.float16 else 2.0**-9
    parts = [torch.full((100,), x, dtype=dtype) for x in (1.0, tiny, tiny, tiny)]
    wide = torch.empty(100)
    combine(SUM, parts[0], parts[1], wide, last=False)
    combine(SUM, wide, parts[2], wide, last=False)
    result = torch.empty(100, dtype=dtype)
    combine(SUM, wide, parts[3], result, last=True)
    assert (result.float() > 1).all()
    assert same_bits(result, documented(parts, [(0, 100), (100, 100), (100, 100), (100, 100)]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_exponent_of_sixteen_bits_rounds_as_documented(dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    patterns = patterns[~patterns.isnan()]
    for shift in (1, 77, 4099, 20011):
        other = patterns.roll(shift)
        expected = (other.float() + patterns.float()).to(dtype)
        own = patterns.clone()
        combine(SUM, other, own, own, last=True)
        finite = ~expected.isnan()
        assert same_bits(own[finite], expected[finite])
        assert bool(own[~finite].isnan().all())


@pytest.mark.parametrize(
    ("operation", "weight", "sentence"),
    [("median", 1.0, "no reduction"), ("mean", 0.0, "total weight"), ("mean", float("inf"), "total weight")],
)
def test_an_unknown_reduction_is_refused(operation, weight, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Reduction(operation, weight)
    with pytest.raises(ConfigError, match="no mean"):
        mean(2.0).check(torch.int32)
