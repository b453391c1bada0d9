"""The device ring on a simulated device that performs everything as late as events allow."""

import pytest
import torch
from device_harness import FORMS, DeviceMembers
from ftar.simulated_device import SimulatedStream
from hypothesis import given
from hypothesis import strategies as st
from ring_harness import WAIT_S, RingMembers, random_tensor, same_bits, socket_ring

from fabric.ftar.device import connections
from fabric.ftar.reduce_ops import Reduction
from fabric.ftar.ring_schedule import DTYPE_CODES, schedule, segment_bounds

LENGTHS = [0, 1, 15, 17, 64, 65, 1000, 4099]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(connections, "PART_BYTES", 64)


def documented(inputs: list[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """The left fold in ring order, segment s beginning at member s, 16-bit sums rounded once."""
    world, result = len(inputs), torch.empty_like(inputs[0])
    wide = torch.float32 if inputs[0].dtype.itemsize == 2 else inputs[0].dtype
    kernel = {"min": torch.minimum, "max": torch.maximum}.get(reduction.operation, torch.add)
    for s, (start, stop) in enumerate(segment_bounds(len(inputs[0]), world)):
        total = inputs[s][start:stop].to(wide, copy=True)
        for k in range(1, world):
            total = kernel(total, inputs[(s + k) % world][start:stop].to(wide))
        if reduction.operation == "mean":
            total = total / torch.tensor(reduction.weight, dtype=wide)
        result[start:stop] = total
    return result


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_member_gets_the_documented_bits(world, form):
    with DeviceMembers(world, **FORMS[form]) as members:
        members.install(1)
        for step, length in enumerate(LENGTHS):
            inputs = [random_tensor(length, torch.float32, seed) for seed in range(world)]
            expected = documented(inputs, Reduction())
            for result in members.reduce(1, step, inputs).values():
                assert same_bits(result, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "operation"),
    [
        (dtype, operation)
        for dtype in DTYPE_CODES
        for operation in ("sum", "mean", "min", "max")
        if dtype.is_floating_point or operation != "mean"  # integers have no mean
    ],
)
def test_every_type_and_operation_gives_the_documented_bits(dtype, operation, form):
    reduction = Reduction(operation, 3.7 if operation == "mean" else 1.0)
    with DeviceMembers(3, **FORMS[form]) as members:
        members.install(1)
        inputs = [random_tensor(777, dtype, seed) for seed in range(3)]
        expected = documented(inputs, reduction)
        for result in members.reduce(1, 0, inputs, reduction).values():
            assert same_bits(result, expected)


@pytest.mark.parametrize("form", FORMS)
def test_in_place_and_several_exchanges_of_one_step(form):
    with DeviceMembers(3, **FORMS[form]) as members:
        members.install(1)
        for step in range(3):
            inputs = [random_tensor(500, torch.float32, 10 * step + i) for i in range(3)]
            expected = documented(inputs, Reduction())
            futures = [members.submit(i, 1, step, inputs[i], None, Reduction(), False) for i in range(3)]
            for future in futures:
                future.result(WAIT_S)
            assert all(same_bits(buffer, expected) for buffer in inputs)
        first = members.reduce(1, 3, [torch.ones(70) for _ in range(3)])
        second = members.reduce(1, 3, [torch.full((90,), 2.0) for _ in range(3)])
        assert (first[0] == 3).all() and (second[2] == 6).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_copy_waits_for_enqueued_work_of_the_compute_stream(form):
    """Queued work writes the gradient, and this work runs only when a thread waits for it."""
    with DeviceMembers(2, **FORMS[form]) as members:
        members.install(1)
        values = [random_tensor(1000, torch.float32, i) for i in range(2)]
        sources = [torch.zeros(1000) for _ in range(2)]
        for i in range(2):
            members.devices[i].compute().run(lambda i=i: sources[i].copy_(values[i]))
        results = [torch.zeros(1000) for _ in range(2)]
        for future in [members.submit(i, 1, 0, sources[i], results[i]) for i in range(2)]:
            future.result(WAIT_S)
        expected = documented(values, Reduction())
        after = [torch.zeros(1000) for _ in range(2)]
        for i in range(2):
            # Work enqueued after the exchange must run after it.
            members.devices[i].compute().run(lambda i=i: after[i].copy_(results[i]))
            members.devices[i].compute().record().wait()
        assert all(same_bits(x, expected) for x in after)


def test_events_keep_the_streams_in_order(monkeypatch):
    """On a device that ignores waits the ring gives wrong bits, so the tests above can fail."""
    monkeypatch.setattr(SimulatedStream, "wait", lambda self, event: None)
    with DeviceMembers(2) as members:
        members.install(1)
        for i in range(2):
            members.devices[i].compute().run(lambda: None)
        sources = [torch.zeros(1000) for _ in range(2)]
        for i in range(2):
            members.devices[i].compute().run(lambda i=i: sources[i].fill_(1.0))
        results = [torch.zeros(1000) for _ in range(2)]
        for future in [members.submit(i, 1, 0, sources[i], results[i]) for i in range(2)]:
            future.result(WAIT_S)
        assert not (results[0] == 2).all()


@given(st.integers(0, 3000), st.integers(1, 7), st.integers(0, 4), st.sampled_from([1, 16, 48, 1000]))
def test_every_element_takes_the_documented_way(length, world, group, chunk):
    """Each member adds its own element once, in ring order, and gets each result once."""
    bounds = segment_bounds(length, world)
    plans = [schedule(length, world, i, chunk, group) for i in range(world)]
    links = [(plan.sends, plan.receives) for plan in plans]
    for position, (sends, _) in enumerate(links):
        received = links[(position + 1) % world][1]
        assert [(p.hop, p.start, p.stop) for p in sends] == [(p.hop, p.start, p.stop) for p in received]
        assert [p.sequence for p in sends] == list(range(len(sends)))
        for piece in sends:
            segment = (position - piece.hop) % world
            assert bounds[segment][0] <= piece.start < piece.stop <= bounds[segment][1]
            assert piece.gather == (piece.hop >= world - 1)
            if piece.needs >= 0:
                needed = links[position][1][piece.needs]
                assert (needed.hop, needed.start, needed.stop) == (piece.hop - 1, piece.start, piece.stop)
            else:
                assert piece.hop == 0
        for hop in range(2 * (world - 1)):
            low, high = bounds[(position - hop) % world]
            assert sum(p.stop - p.start for p in sends if p.hop == hop) == high - low


@given(st.integers(1, 3000), st.integers(2, 7), st.integers(1, 4))
def test_two_groups_of_buffers_for_partial_sums_suffice(length, world, group):
    """With all members in lock step, each sending whenever it may, no member waits for ever."""
    plans = [schedule(length, world, i, 16, group) for i in range(world)]
    links = [(plan.sends, plan.receives) for plan in plans]
    sent, got, held = [0] * world, [0] * world, [set() for _ in range(world)]
    while any(sent[i] < len(links[i][0]) for i in range(world)):
        moved = False
        for i in range(world):
            after = (i + 1) % world
            if sent[i] == len(links[i][0]):
                continue
            piece = links[i][0][sent[i]]
            keeps = not piece.gather and not piece.last
            if (piece.needs >= 0 and piece.needs >= got[i]) or (keeps and len(held[after]) == 2 * group):
                continue
            held[i].discard(piece.needs)
            if keeps:
                held[after].add(got[after])
            sent[i], got[after], moved = sent[i] + 1, got[after] + 1, True
        assert moved


def test_links_of_both_kinds_in_one_ring():
    with DeviceMembers(4) as members:
        members.install(1, socket_ring(4, "mixed"))
        inputs = [random_tensor(3000, torch.bfloat16, seed) for seed in range(4)]
        expected = documented(inputs, Reduction())
        for result in members.reduce(1, 0, inputs).values():
            assert same_bits(result, expected)


def test_the_same_bits_as_the_ring_of_host_memory():
    inputs = [random_tensor(2000, torch.bfloat16, seed) for seed in range(3)]
    with DeviceMembers(3) as members, RingMembers(3) as others:
        members.install(1)
        others.install(1)
        results = members.reduce(1, 0, inputs)
        for i, result in others.reduce(1, 0, inputs).items():
            assert same_bits(result, results[i])
