"""Elements that travel in fewer bytes: the documented bits, equal on all members, and bounded errors."""

from collections.abc import Sequence
from concurrent.futures import as_completed

import numpy as np
import pytest
import torch
from ftar.gathering import gather
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_harness import (
    WAIT_S,
    RingMembers,
    coded,
    documented,
    random_tensor,
    same_bits,
    tcp_pair,
)

from fabric.errors import RoundAborted
from fabric.ftar.buckets import FlatGradients
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.ftar.host.exchange_buffers import raw
from fabric.ftar.host.piece_moves import Inlet, Outlet, coded_bytes, digest, fold
from fabric.ftar.reduce_ops import EXCHANGE_FORMS, Reduction
from fabric.ftar.ring_schedule import DTYPE_CODES, schedule, segment_bounds

FLOAT = DTYPE_CODES[torch.float32]
FORMS = ["bfloat16", "int8"]
PLANES = ["tcp", "shm", "mixed"]
BLOCK, LEVELS, LEAST_SCALE = 128, 126, np.float32(2.0**-119)
SLACK = 1 + 2.0**-15


def scales(values: torch.Tensor) -> torch.Tensor:
    """The documented scale of each element's block."""
    padded = torch.nn.functional.pad(values.abs(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    most = torch.where(padded.isfinite(), padded, 0).max(dim=1).values.numpy()
    cut = (most / np.float32(LEVELS)).view(np.uint32) & np.uint32(0xFFFFFF00)
    scale = torch.from_numpy(np.maximum(cut.view(np.float32), LEAST_SCALE))
    return scale.repeat_interleave(BLOCK)[: values.numel()]


def rounded(values: torch.Tensor, form: str) -> torch.Tensor:
    """What a receiver decodes of ``values``, which are one piece: written down again, in numpy."""
    if form == "bfloat16":
        return values.bfloat16().float()
    scale = scales(values)
    with np.errstate(all="ignore"):
        codes = np.rint(values.numpy() * (np.float32(1) / scale.numpy()))
        result = torch.from_numpy(codes * scale.numpy()) + 0.0
    return torch.where(values.isfinite(), result, values)


def summed(
    inputs: Sequence[torch.Tensor], reduction: Reduction, chunk: int, kinds: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The documented result, and a bound on the distance of each element from the exact sum of the inputs.

    ``kinds``: of the link from each member to the next. Over TCP each piece is rounded, and at the end each
    result is. A rounding moves an element by at most half the scale of its block.
    """
    world, length = len(inputs), inputs[0].numel()
    result, bound = torch.empty(length), torch.zeros(length, dtype=torch.float64)
    for position in range(world):
        plan = schedule(length, world, position, chunk, cut=min(reduction.coarse, length))
        for piece in (p for p in plan.sends if p.hop == 0):
            part, coarse = slice(piece.start, piece.stop), piece.start < reduction.coarse
            total = inputs[position][part].clone()
            moved = torch.zeros_like(total, dtype=torch.float64)
            for hop in range(world):
                ends = hop == world - 1
                if ends and reduction.operation == "mean":
                    total, moved = total / torch.tensor(reduction.weight), moved / reduction.weight
                if coarse and (ends or kinds[(position + hop) % world] == "tcp"):
                    moved += scales(total).double() / 2 * SLACK
                    total = rounded(total, reduction.exchange)
                if not ends:
                    total = total + inputs[(position + hop + 1) % world][part]
                    moved += total.abs().double() * 2.0**-23  # the addition itself rounds
            result[part], bound[part] = total, moved
    return result, bound


def kinds_of(plane: str, world: int) -> list[str]:
    kinds = ("shm", "tcp") if plane == "mixed" else (plane,)
    return [kinds[i % len(kinds)] for i in range(world)]


def with_specials(values: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    where = torch.rand(values.numel(), generator=generator) < 0.02
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e38, -3e38, 1e-45, 1e-37])
    which = torch.randint(0, len(special), (values.numel(),), generator=generator)
    return torch.where(where, special[which], values)


def equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether all bits are equal; the payload of a NaN may differ."""
    odd = one != one
    return torch.equal(odd, two != two) and same_bits(one[~odd], two[~odd])


def decoded(payload: bytes, form: str, count: int) -> torch.Tensor:
    """What an Inlet keeps of a result in a form, one byte after the other."""
    near, far = tcp_pair()
    with near, far:
        near.setblocking(False)
        inlet = Inlet(near.fileno(), memoryview(bytearray(1 << 18)), FLOAT, 0, 1.0)
        result = torch.full((count,), 77.0)
        inlet.begin(len(payload), None, raw(result), FLOAT, FLOAT, True, True, EXCHANGE_FORMS[form])
        stream = payload + digest(payload)
        left = len(stream)
        far.sendall(stream)
        while left:
            try:
                left -= inlet.pump()
            except BlockingIOError:
                continue
        assert inlet.finish() == digest(payload)
    return result


lengths = st.one_of(st.integers(1, 300), st.integers(2000, 2200), st.integers(4000, 9000))


@settings(max_examples=150, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    length=lengths,
    seed=st.integers(0, 10**6),
    exponent=st.integers(-140, 120),
)
def test_what_is_decoded_has_the_documented_bits_and_is_exact_the_second_time(form, length, seed, exponent):
    values = with_specials(random_tensor(length, torch.float32, seed) * 2.0**exponent, seed)
    once = decoded(coded(values, form), form, length)
    assert equal(once, rounded(values, form))
    assert same_bits(once, decoded(coded(once, form), form, length))
    if form == "int8":
        finite = values.isfinite()
        moved = (once.double() - values.double()).abs()[finite]
        assert bool((moved <= scales(values).double()[finite] / 2 * SLACK).all())


def test_infinities_and_nan_stay_in_their_places_and_a_huge_element_rounds_small_ones_to_zero():
    values = torch.full((300,), 0.5)
    values[3], values[7], values[9] = torch.inf, -torch.inf, torch.nan
    values[130] = 1e6
    once = decoded(coded(values, "int8"), "int8", 300)
    assert once[3] == torch.inf
    assert once[7] == -torch.inf
    assert bool(once[9].isnan())
    assert int(once.isfinite().sum()) == 297
    assert torch.allclose(once[10:128], torch.tensor(0.5), rtol=1e-4)
    assert bool((once[131:256] == 0).all())
    assert abs(once[130] - 1e6) < 1e6 / 126 / 2
    assert torch.allclose(once[256:], torch.tensor(0.5), rtol=1e-4)


@settings(max_examples=80, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    world=st.integers(2, 5),
    length=st.one_of(st.integers(1, 700), st.integers(4000, 12000)),
    coarse=st.one_of(st.integers(1, 12000), st.just(10**9)),
    chunk_bytes=st.sampled_from([128, 512, 1000, 20_000, 2**20]),
    plane=st.sampled_from(PLANES),
    weight=st.sampled_from([0.0, 3.7]),
    memory=st.sampled_from(["in place", "kept", "shared"]),
    special=st.booleans(),
    checksum=st.booleans(),
)
def test_all_members_get_the_documented_bits_within_the_bound(
    form, world, length, coarse, chunk_bytes, plane, weight, memory, special, checksum
):
    reduction = Reduction("mean" if weight else "sum", weight or 1.0, form, coarse)
    inputs = [random_tensor(length, torch.float32, i) for i in range(world)]
    if special:
        inputs = [with_specials(x, i) for i, x in enumerate(inputs)]
    chunk = chunk_bytes // 128 * 128 // 4
    expected, bound = summed(inputs, reduction, chunk, kinds_of(plane, world))
    with RingMembers(world, plane=plane, chunk_bytes=chunk_bytes, checksum=checksum) as members:
        members.install(1)
        for result in members.reduce(1, 1, inputs, reduction, memory).values():
            assert equal(result, expected)
    plain = Reduction(reduction.operation, reduction.weight)
    exact = documented(inputs, segment_bounds(length, world), plain)
    assert same_bits(expected[coarse:], exact[coarse:])
    if form == "int8" and not special:
        doubles = torch.stack(inputs).double().sum(0) / (weight or 1.0)
        assert bool(((expected.double() - doubles).abs() <= bound + doubles.abs() * 2.0**-22).all())


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world", [2, 3])
def test_buffers_far_larger_than_the_sockets(world, form, plane):
    reduction = Reduction("sum", 1.0, form, 3_000_000)
    inputs = [random_tensor(3_000_017, torch.float32, i) for i in range(world)]
    expected, _ = summed(inputs, reduction, 2 * 2**20, kinds_of(plane, world))
    with RingMembers(world, plane=plane) as members:
        members.install(1)
        for step in range(2):
            for result in members.reduce(1, step, inputs, reduction).values():
                assert same_bits(result, expected)


@pytest.mark.parametrize(
    ("dtype", "operation"),
    [(d, "sum") for d in DTYPE_CODES if d != torch.float32] + [(torch.float32, x) for x in ("min", "max")],
    ids=str,
)
def test_other_types_and_reductions_keep_their_bits(dtype, operation):
    inputs = [random_tensor(999, dtype, i) for i in range(3)]
    expected = documented(inputs, segment_bounds(999, 3), Reduction(operation))
    with RingMembers(3) as members:
        members.install(1)
        for result in members.reduce(1, 1, inputs, Reduction(operation, 1.0, "int8", 999)).values():
            assert same_bits(result, expected)


@pytest.mark.parametrize("plane", ["tcp", "shm"])
def test_members_of_unequal_forms_abort_by_name(plane):
    with RingMembers(2, plane=plane) as members:
        members.install(1)
        futures = {}
        for i, form in enumerate(("int8", "bfloat16")):
            reduction = Reduction("sum", 1.0, form, 5000)
            futures |= members.start(1, 1, {i: torch.ones(5000)}, None, reduction)
        sentences = []
        for future in futures.values():
            with pytest.raises(RoundAborted) as aborted:
                future.result(WAIT_S)
            sentences.append(str(aborted.value))
        assert all("FABRIC_EXCHANGE differs" in x for x in sentences)


def outcomes_where_one_leaves(
    members: RingMembers,
    leaves_at: int,
    inputs: Sequence[torch.Tensor],
    reduction: Reduction,
    chunk_bytes: int,
) -> list[BaseException | None]:
    """Let member 1 close its plane at one of its pieces, as a killed process does: its sockets end.

    A member whose exchange has ended passes no notice on. So the others hear of the first abort as in a job,
    where the control plane tells them.
    """
    arrived: list[int] = []

    def leave(step: int) -> None:
        arrived.append(step)
        if len(arrived) == leaves_at + 1:
            members.planes[1].close()

    members.planes[1].close()
    members.planes[1] = CpuRing(chunk_bytes=chunk_bytes, on_piece=leave)
    members.install(1)
    futures = members.start(1, 1, {i: x.clone() for i, x in enumerate(inputs)}, None, reduction)
    for future in as_completed(futures.values(), WAIT_S):
        if future.exception() is not None:
            for plane in members.planes.values():
                plane.abort(1, "m1 is gone", "m1")
    outcomes = [future.exception() for future in futures.values()]
    members.planes[1] = CpuRing(chunk_bytes=chunk_bytes)
    return outcomes


@pytest.mark.parametrize("plane", ["tcp", "mixed"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_member_that_leaves_at_any_piece_ends_the_round_and_the_next_epoch_has_the_bits(world, form, plane):
    length, chunk_bytes = 601, 512
    reduction = Reduction("sum", 1.0, form, 590)
    inputs = [random_tensor(length, torch.float32, i) for i in range(world)]
    expected, _ = summed(inputs, reduction, chunk_bytes // 4, kinds_of(plane, world))
    plan = schedule(length, world, 1, chunk_bytes // 4, cut=590)
    for leaves_at in range(len(plan.receives)):
        with RingMembers(world, plane=plane, chunk_bytes=chunk_bytes) as members:
            for outcome in outcomes_where_one_leaves(members, leaves_at, inputs, reduction, chunk_bytes):
                assert outcome is None or isinstance(outcome, RoundAborted)
            members.install(2)
            for result in members.reduce(2, 2, inputs, reduction).values():
                assert same_bits(result, expected)


def test_presence_and_exact_values_keep_their_bits_beside_gradients_of_any_size():
    """A counter of millions, a flag of 1 and gradients of 1e-9 lie side by side in one flat buffer."""
    world, exact = 3, {"buffer:counter", "copied"}
    shapes = {"first": (300, 7), "copied": (130,), "unused": (5,), "last": (411,), "buffer:counter": (3,)}
    flats, buffers = [], []
    for member in range(world):
        parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        for number, (name, parameter) in enumerate(parameters.items()):
            if name != "unused":
                values = random_tensor(parameter.numel(), torch.float32, 10 * member + number)
                parameter.grad = values.view(parameter.shape) * 1e-9
        parameters["buffer:counter"].grad = torch.tensor([2.0**24 - 1 if member == 1 else 0.0, 1.0, 1e-20])
        flats.append(FlatGradients(parameters.items(), exact=exact))
        buffers.append(torch.zeros(flats[0].nbytes, dtype=torch.uint8))
        gather(flats[member], buffers[member])
    before = [buffer.clone() for buffer in buffers]
    with RingMembers(world) as members:
        members.install(1)
        for bucket in flats[0].buckets:
            parts = {i: bucket.view(buffer) for i, buffer in enumerate(buffers)}
            reduction = Reduction(exchange="int8", coarse=bucket.coarse)
            for future in members.start(1, 1, parts, None, reduction).values():
                future.result(WAIT_S)
    assert flats[0].absent(buffers[0]) == {"unused"}
    for bucket in flats[0].buckets:
        parts = [bucket.view(buffer) for buffer in before]
        exact_sum = documented(parts, segment_bounds(parts[0].numel(), world))
        assert all(same_bits(bucket.view(buffer), bucket.view(buffers[0])) for buffer in buffers)
        assert same_bits(bucket.view(buffers[0])[bucket.coarse :], exact_sum[bucket.coarse :])
        assert bucket.coarse == 0 or not same_bits(bucket.view(buffers[0]), exact_sum)
        # Beside a flag of 1 in their block all of these gradients would become zero.
        assert bool(((bucket.view(buffers[0]) - exact_sum).abs() < 1e-8).all())
        assert bucket.coarse in (0, bucket.view(buffers[0]).numel() - len(bucket.parameters))
        assert (bucket.coarse == 0) == bool({name for name, _ in bucket.parameters} & exact)


@pytest.mark.parametrize(
    ("size", "own", "into", "form", "onward"),
    [
        (136, 0, 129 * 4, 7, None),  # 129 elements in blocks have 137 bytes
        (133, 0, 129 * 4, 7, None),  # a block without an element
        (3, 0, 4, 7, None),
        (137, 128 * 4, 129 * 4, 7, None),
        (137, 0, 128 * 4, 7, None),
        (137, 0, 0, 7, 136),
        (137, 0, 0, 7, None),
        (257, 0, 128 * 4, 4, None),
        (137, 0, 129 * 4, 3, None),
        (137, 0, 129 * 4, 99, None),
        (137, 0, 129 * 4, -1, None),
    ],
)
def test_memory_that_does_not_fit_a_form_is_refused(size, own, into, form, onward):
    parts = [memoryview(bytearray(n)) if n else None for n in (own, into)]
    room = None if onward is None else memoryview(bytearray(onward))
    inlet = Inlet(0, memoryview(bytearray(1 << 18)), FLOAT, 0, 1.0)
    with pytest.raises(ValueError, match="does not fit"):
        inlet.begin(size, *parts, FLOAT, FLOAT, True, True, form, room)


def test_an_outlet_and_a_fold_refuse_what_is_no_form():
    source, room = memoryview(bytearray(64)), memoryview(bytearray(20))
    for form, elements, payload in (
        (7, source, room[:19]),
        (7, None, room),
        (99, source, room),
        (2, source, room),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            Outlet(0).begin(b"", payload, True, True, form, elements)
    with pytest.raises(ValueError, match="unknown"):
        fold((source,), source, memoryview(bytearray(64)), FLOAT, FLOAT, FLOAT, 0, 1.0, True, 99)
    with pytest.raises(ValueError, match="no such form"):
        coded_bytes(1, 5)
