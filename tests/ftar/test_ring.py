"""The ring's result, bit for bit against the documented order, at every awkward size, on every plane."""

from itertools import cycle

import pytest
import torch
from ftar.gathering import MAX, MIN, mean
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_harness import (
    WAIT_S,
    RingMembers,
    documented,
    random_tensor,
    same_bits,
    socket_ring,
    wait_until,
)

from fabric.errors import ConfigError, IllegalTransition, RoundAborted
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.ftar.host.shm_transport import MAX_REFERENCES
from fabric.ftar.plane import Ring
from fabric.ftar.reduce_ops import SUM, Reduction
from fabric.ftar.ring_schedule import ALIGNMENT, DTYPE_CODES, segment_bounds
from fabric.transport.tcp import sending_s

CHUNK_BYTES = 512
PLANES = ["tcp", "shm", "mixed"]
MEMORIES = ["in place", "kept", "shared", "in parts"]


def awkward_lengths(world: int, item_bytes: int) -> list[int]:
    chunk = CHUNK_BYTES // item_bytes
    centres = [0, ALIGNMENT, world * ALIGNMENT, world * chunk, 2 * world * chunk]
    return sorted({max(0, c + d) for c in centres for d in (-1, 0, 1)} | {chunk + ALIGNMENT - 1})


def check(members: RingMembers, epoch: int, step: int, inputs: list[torch.Tensor], *how) -> None:
    bounds = segment_bounds(inputs[0].numel(), len(inputs))
    expected = documented(inputs, bounds, *how[:1])
    for position, result in members.reduce(epoch, step, inputs, *how).items():
        assert same_bits(result, expected), (position, inputs[0].numel(), inputs[0].dtype, how)


def reductions(dtype: torch.dtype) -> list[Reduction]:
    return [SUM, MIN, MAX, mean(3.7)] if dtype.is_floating_point else [SUM, MIN, MAX]


# Two types with every number of members, and the others with two numbers.
WORLDS_AND_TYPES = [
    (world, dtype)
    for dtype in DTYPE_CODES
    for world in (range(1, 10) if dtype in (torch.float32, torch.bfloat16) else (2, 5))
]


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize(("world", "dtype"), WORLDS_AND_TYPES, ids=str)
def test_every_awkward_length_is_reduced_in_the_documented_order(world, dtype, plane):
    """Reductions and kinds of memory in turn, over the lengths."""
    turns = cycle((how, memory) for memory in MEMORIES for how in reductions(dtype))
    with RingMembers(world, plane=plane, chunk_bytes=CHUNK_BYTES) as members:
        members.install(epoch=1)
        for step, length in enumerate(awkward_lengths(world, dtype.itemsize)):
            inputs = [random_tensor(length, dtype, 100 * step + i) for i in range(world)]
            check(members, 1, step, inputs, *next(turns))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("world", [10, 11, 18])
def test_more_members_than_a_list_of_places_holds(world, dtype):
    assert world > MAX_REFERENCES + 1
    with RingMembers(world, plane="shm", chunk_bytes=CHUNK_BYTES) as members:
        members.install(1)
        for step, memory in enumerate(MEMORIES):
            inputs = [random_tensor(world * 150 + 7, dtype, 10 * step + i) for i in range(world)]
            check(members, 1, step, inputs, mean(3.7), memory)


@settings(max_examples=60, deadline=None)
@given(
    world=st.integers(1, 6),
    length=st.integers(0, 4000),
    chunk_bytes=st.integers(128, 5000),
    kind=st.sampled_from(list(DTYPE_CODES)).flatmap(
        lambda d: st.tuples(st.just(d), st.sampled_from(reductions(d)))
    ),
    checksum=st.booleans(),
    plane=st.sampled_from(PLANES),
    memory=st.sampled_from(MEMORIES),
)
def test_any_size_is_reduced_in_the_documented_order(
    world, length, chunk_bytes, kind, checksum, plane, memory
):
    dtype, reduction = kind
    with RingMembers(world, plane=plane, chunk_bytes=chunk_bytes, checksum=checksum) as members:
        members.install(epoch=1)
        check(members, 1, 1, [random_tensor(length, dtype, i) for i in range(world)], reduction, memory)


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("world", [2, 3])
def test_buffers_far_larger_than_the_sockets_do_not_deadlock(world, plane):
    with RingMembers(world, plane=plane) as members:
        members.install(1)
        inputs = [random_tensor(3_000_017, torch.float32, i) for i in range(world)]
        check(members, 1, 1, inputs)


@pytest.mark.parametrize("plane", PLANES)
def test_several_exchanges_of_a_step_and_several_epochs_share_a_plane(plane):
    with RingMembers(3, plane=plane, chunk_bytes=CHUNK_BYTES) as members:
        members.install(1)
        members.install(2)
        for epoch, step in [(1, 7), (1, 7), (1, 8), (2, 8), (2, 8), (2, 9)]:
            for dtype in (torch.float32, torch.bfloat16):
                check(members, epoch, step, [random_tensor(999, dtype, i) for i in range(3)])
        for plane in members.planes.values():
            plane.retire(2)
        check(members, 2, 10, [random_tensor(50, torch.float64, i) for i in range(3)])
        with pytest.raises(RoundAborted, match="epoch 1 is over"):
            members.planes[0].all_reduce(1, 10, torch.zeros(4), torch.ones(4))


def test_infinities_and_overflow_are_sums_and_not_errors():
    biggest = torch.finfo(torch.float32).max
    with RingMembers(2) as members:
        members.install(1)
        values = [torch.tensor([biggest, float("inf"), float("nan"), 1.0])] * 2
        result = members.reduce(1, 1, values)
        assert same_bits(result[0], result[1])
        assert result[0][:2].isinf().all()
        assert result[0][2].isnan()
        assert result[0][3] == 2.0


def test_an_awaited_member_is_named_during_the_wait_and_counted_after_it():
    with RingMembers(3) as members:
        members.install(1)
        buffers = {i: torch.full((40,), float(i)) for i in range(3)}
        futures = members.start(1, 1, {i: buffers[i] for i in (0, 1)})
        wait_until(lambda: members.planes[0].waiting_for == "m2")
        wait_until(lambda: members.planes[1].waiting_for == "m0")
        futures |= members.start(1, 1, {2: buffers[2]})
        for future in futures.values():
            future.result(WAIT_S)
        assert members.planes[0].waiting_for == ""
        assert members.planes[0].waiting_s["m2"] > 0
        assert torch.equal(buffers[0], torch.full((40,), 3.0))
        members.reduce(1, 2, [torch.zeros(0)] * 3)
        assert members.planes[0].waiting_s == {}


def test_the_bytes_for_a_member_that_does_not_read_are_under_way():
    with RingMembers(2) as members:
        pairs = socket_ring(2)
        members.install(1, pairs)
        buffers = {i: torch.full((4_000_000,), float(i)) for i in range(2)}
        first = members.start(1, 1, {0: buffers[0]})
        wait_until(lambda: members.planes[0].waiting_for == "m1")
        wait_until(lambda: sending_s(pairs[0][0]) > 0.1)
        for future in (first | members.start(1, 1, {1: buffers[1]})).values():
            future.result(WAIT_S)
        total_s = members.planes[0].sending_s["m1"]
        assert total_s > 0.1
        members.reduce(1, 2, [torch.zeros(40)] * 2)
        later_s = members.planes[0].sending_s.get("m1", 0.0)
        assert later_s <= sending_s(pairs[0][0]) - total_s + 1e-6, "each exchange reports its own time"


def test_links_of_shared_memory_have_no_bytes_under_way():
    with RingMembers(2, plane="shm") as members:
        members.install(1)
        members.reduce(1, 1, [torch.zeros(40)] * 2)
        assert members.planes[0].sending_s == members.planes[1].sending_s == {}


def test_a_ring_of_one_needs_no_links_and_changes_nothing():
    with RingMembers(1) as members:
        members.planes[0].install(Ring(1, 0, ("alone",)), None, None)
        buffer = torch.arange(10.0)
        members.planes[0].all_reduce(1, 1, buffer)
        assert torch.equal(buffer, torch.arange(10.0))


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(4, 4),
        torch.zeros(8)[::2],
        torch.zeros(4, dtype=torch.complex64),
        torch.zeros(4, dtype=torch.uint8),
        torch.zeros(4, device="meta"),
    ],
)
def test_a_tensor_that_cannot_be_reduced_is_refused_before_a_byte_is_sent(buffer):
    with RingMembers(2) as members:
        members.install(1)
        with pytest.raises(ConfigError):
            members.planes[0].all_reduce(1, 1, buffer)
        check(members, 1, 1, [torch.ones(5), torch.ones(5)])


def test_misuse_of_the_ring_raises_illegal_transition():
    plane = CpuRing()
    with pytest.raises(IllegalTransition, match="no links"):
        plane.all_reduce(1, 1, torch.zeros(1), torch.ones(1))
    with pytest.raises(IllegalTransition, match="needs two links"):
        plane.install(Ring(1, 0, ("a", "b")), None, None)
    plane.install(Ring(1, 0, ("a",)), None, None)
    with pytest.raises(IllegalTransition, match="already"):
        plane.install(Ring(1, 0, ("a",)), None, None)
    for position, members in ((2, ("a", "b")), (-1, ("a",)), (0, ("a", "a"))):
        with pytest.raises(IllegalTransition, match="not a place"):
            Ring(1, position, members)
    plane.close()


@pytest.mark.parametrize(
    "options",
    [{"chunk_bytes": 0}, {"chunk_bytes": 2**31}, {"exchange_s": 0}, {"entry_s": float("nan")}],
)
def test_settings_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError):
        CpuRing(**options)
