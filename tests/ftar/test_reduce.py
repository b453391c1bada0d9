"""The ring's arithmetic alone: cuts, schedules and kernels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ring_harness import random_tensor, same_bits

from fabric.ftar.reduce import ALIGNMENT, DTYPE_CODES, add_into, schedule, segment_bounds

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
def test_what_a_member_sends_is_what_the_next_one_receives(length, world, chunk):
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


@given(LENGTHS, st.integers(2, 9), st.integers(0, 300))
def test_the_schedule_run_on_sets_gives_everybody_everything_once(length, world, chunk):
    """Each element carries the list of members added to it; hop by hop, as the ring would."""
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


@pytest.mark.parametrize("dtype", DTYPE_CODES)
def test_the_kernel_is_the_documented_arithmetic(dtype):
    one, two = random_tensor(5000, dtype, 1), random_tensor(5000, dtype, 2)
    if dtype.is_floating_point:
        biggest = torch.finfo(dtype).max
        edges = [0.0, -0.0, biggest, -biggest, float("inf"), torch.finfo(dtype).tiny / 2]
        one[: len(edges)] = torch.tensor(edges, dtype=dtype)
        two[: len(edges)] = torch.tensor(edges, dtype=dtype)
    if dtype in (torch.float16, torch.bfloat16):
        expected = (two.float() + one.float()).to(dtype)
    else:
        expected = two + one
    add_into(one, two)
    assert same_bits(one, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_exponent_of_sixteen_bits_rounds_as_documented(dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    patterns = patterns[~patterns.isnan()]
    for shift in (1, 77, 4099, 20011):
        other = patterns.roll(shift)
        expected = (other.float() + patterns.float()).to(dtype)
        own = patterns.clone()
        add_into(own, other)
        finite = ~expected.isnan()
        assert same_bits(own[finite], expected[finite])
        assert bool(own[~finite].isnan().all())
