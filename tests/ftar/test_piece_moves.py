"""The compiled moves of pieces: the bits of reduce_ops in every case, and a digest that finds every error."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_harness import random_tensor, tcp_pair

from fabric.ftar.host.exchange_buffers import raw
from fabric.ftar.host.piece_moves import BLOCK_BYTES, DIGEST_BYTES, Inlet, Outlet, digest, fold
from fabric.ftar.reduce_ops import OPERATION_CODES
from fabric.ftar.ring_schedule import DTYPE_CODES

FLOAT = DTYPE_CODES[torch.float32]
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0]


@pytest.fixture
def link() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = tcp_pair()
    near.setblocking(False)
    yield near, far
    near.close()
    far.close()


def pumped(inlet: Inlet, far: socket.socket, parts: Sequence[bytes]) -> bytes | None:
    """Let the parts come one after another; return what the piece's end says."""
    for part in parts:
        far.sendall(part)
        left = len(part)
        while left:
            try:
                left -= inlet.pump()
            except BlockingIOError:
                continue
    return inlet.finish()


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[low:high] for low, high in pairwise(edges)]


def memory(values: torch.Tensor, shift: int) -> memoryview:
    """A copy of the bytes of ``values`` at an address that is ``shift`` bytes after an aligned one."""
    data = raw(torch.zeros(values.numel() * values.element_size() + shift, dtype=torch.uint8))[shift:]
    data[:] = raw(values)
    return data


def values_of(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)


def with_specials(length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random values with zeros, infinities and numbers that are no number at random places."""
    values = random_tensor(length, dtype, seed)
    if dtype.is_floating_point:
        generator = torch.Generator().manual_seed(seed)
        where = torch.rand(length, generator=generator) < 0.3
        which = torch.randint(0, len(SPECIAL), (length,), generator=generator)
        values = torch.where(where, torch.tensor(SPECIAL, dtype=dtype)[which], values)
    return values


def by_numpy(operation: str, weight: float, parts: list[torch.Tensor], last: bool) -> torch.Tensor:
    """The documented fold in numpy's arithmetic; 16-bit types in float32."""
    folds = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}
    sixteen = parts[-1].dtype in (torch.float16, torch.bfloat16)
    total, *others = [(part.float() if sixteen else part).numpy() for part in parts]
    with np.errstate(all="ignore"):
        for other in others:
            total = folds[operation](total, other)
        if operation == "mean" and last:
            total = np.divide(total, total.dtype.type(weight))
    return torch.from_numpy(total)


def equal(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all bits are equal; the payload of a NaN may differ."""
    if not result.numel():
        return not expected.numel()
    odd = result != result  # only a NaN differs from itself
    return torch.equal(odd, expected != expected) and torch.equal(
        result[~odd].view(torch.uint8), expected[~odd].view(torch.uint8)
    )


CASES = [
    (dtype, operation, wide)
    for dtype in DTYPE_CODES
    for operation in OPERATION_CODES
    for wide in ("as they are", "from float32", "to float32", "from and to float32")
    if operation != "mean" or dtype.is_floating_point
    if wide == "as they are" or (dtype in (torch.float16, torch.bfloat16) and operation in ("sum", "mean"))
]


@settings(max_examples=300, deadline=None)
@given(
    case=st.sampled_from(CASES),
    length=st.one_of(st.integers(1, 70), st.integers(900, 5000), st.just(BLOCK_BYTES // 4 + 33)),
    seed=st.integers(0, 10**6),
    weight=st.sampled_from([1.0, 3.7, 1e-3, 7e4]),
    cuts=st.lists(st.integers(0, 10**7), max_size=6),
    shift=st.integers(0, 9),
    in_place=st.booleans(),
    places=st.lists(st.integers(0, 10**7), max_size=4),
)
def test_a_sum_has_the_bits_of_reduce_ops(case, length, seed, weight, cuts, shift, in_place, places):
    dtype, operation, wide = case
    came = torch.float32 if wide.startswith("from") else dtype
    kept = torch.float32 if wide.endswith("to float32") else dtype
    last = kept == dtype
    received, own = with_specials(length, came, seed), with_specials(length, dtype, seed + 1)
    expected = by_numpy(operation, weight, [received, own], last).to(kept)

    near, far = tcp_pair()
    near.setblocking(False)
    with near, far:
        scratch = memoryview(bytearray(BLOCK_BYTES))
        inlet = Inlet(near.fileno(), scratch, DTYPE_CODES[dtype], OPERATION_CODES[operation], weight)
        payload, mine = bytes(raw(received)), memory(own, shift)
        into = mine if in_place and kept == dtype else memory(expected, shift)
        own_places = tuple(map(bytearray, cut(bytes(mine), places))) if places and not in_place else mine
        inlet.begin(len(payload), own_places, into, DTYPE_CODES[came], DTYPE_CODES[kept], last, True)
        kept_digest = pumped(inlet, far, cut(payload + digest(payload), cuts))
        assert inlet.kept() == len(into)
    assert equal(values_of(into, kept), expected)
    assert kept_digest == digest(into)


@settings(max_examples=150, deadline=None)
@given(
    case=st.sampled_from(CASES),
    length=st.one_of(st.integers(1, 70), st.integers(900, 3000)),
    members=st.integers(1, 9),
    seed=st.integers(0, 10**6),
    shift=st.integers(0, 9),
    in_place=st.booleans(),
)
def test_the_memory_of_several_members_is_summed_in_their_order(case, length, members, seed, shift, in_place):
    dtype, operation, wide = case
    first = torch.float32 if wide.startswith("from") else dtype
    kept = torch.float32 if wide.endswith("to float32") else dtype
    last = kept == dtype
    values = [with_specials(length, first if not i else dtype, seed + i) for i in range(members + 1)]
    parts = [memory(x, shift) for x in values]
    expected = by_numpy(operation, 3.7, values, last).to(kept)
    into = parts[-1] if in_place and kept == dtype else memory(expected, 0)
    if into is not parts[-1]:
        into[:] = bytes(len(into))
    codes = [DTYPE_CODES[x] for x in (dtype, first, kept)]
    fold(tuple(parts[:-1]), parts[-1], into, *codes, OPERATION_CODES[operation], 3.7, last)
    assert equal(values_of(into, kept), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_sixteen_bits_is_widened_and_rounded_as_torch_does(link, dtype):
    near, far = link
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    scratch = memoryview(bytearray(BLOCK_BYTES))
    inlet = Inlet(near.fileno(), scratch, DTYPE_CODES[dtype], OPERATION_CODES["sum"], 1.0)
    for shift in (0, 1, 77, 4099, 20011):
        other = every.roll(shift)
        into = memory(torch.zeros_like(every), 0)
        inlet.begin(2 * 2**16, raw(every), into, DTYPE_CODES[dtype], DTYPE_CODES[dtype], True, False)
        pumped(inlet, far, [bytes(raw(other))])
        result, expected = values_of(into, dtype), (other.float() + every.float()).to(dtype)
        odd = expected.isnan()
        assert torch.equal(result[~odd].view(torch.int16), expected[~odd].view(torch.int16))
        assert bool(result[odd].isnan().all())


# --- the digest -------------------------------------------------------------------------------------------

MASK = 2**64 - 1
LANE_KEYS = [
    0x243F6A8885A308D3,
    0x13198A2E03707344,
    0xA4093822299F31D0,
    0x082EFA98EC4E6C89,
    0x452821E638D01377,
    0xBE5466CF34E90C6C,
    0xC0AC29B7C97C50DD,
    0x3F84D5B5B5470917,
]
STRIPE_KEY = 0x9E3779B97F4A7C15


def written_out(payload: bytes) -> bytes:
    """The digest as the comment in piece_moves.c describes it."""
    sums, products = [0] * 8, [0] * 8
    for stripe, low in enumerate(range(0, len(payload), 64)):
        part = payload[low : low + 64].ljust(64, b"\0")
        for lane in range(8):
            word = int.from_bytes(part[8 * lane : 8 * lane + 8], "little")
            keyed = word ^ ((LANE_KEYS[lane] + stripe * STRIPE_KEY) & MASK)
            sums[lane] = (sums[lane] + word) & MASK
            products[lane] = (products[lane] + (keyed & 0xFFFFFFFF) * (keyed >> 32)) & MASK
    halves = b""
    for half, words in ((len(payload), sums), (len(payload) * STRIPE_KEY & MASK, products)):
        for word in words:
            half = (half ^ word) * 0x9FB21C651E98DF25 & MASK
            half ^= half >> 32
        halves += half.to_bytes(8, "little")
    return halves


@given(st.binary(max_size=700))
def test_the_digest_is_the_documented_one(payload):
    assert digest(payload) == written_out(payload)
    assert len(digest(payload)) == DIGEST_BYTES


def test_the_digest_of_a_long_payload_is_the_documented_one():
    payload = bytes(raw(random_tensor(25_001, torch.float32, 5)))[:-1]
    assert digest(payload) == written_out(payload)


@settings(deadline=None)
@given(
    st.one_of(st.integers(1, 700), st.just(BLOCK_BYTES + 77)),
    st.lists(st.integers(0, 10**7), max_size=6),
    st.booleans(),
)
def test_a_result_lands_with_its_digest_wherever_the_stream_is_cut(size, cuts, keeps):
    payload = bytes(raw(torch.randint(0, 255, (size,), dtype=torch.uint8)))
    near, far = tcp_pair()
    near.setblocking(False)
    with near, far:
        into = memoryview(bytearray(size))
        inlet = Inlet(near.fileno(), memoryview(bytearray(BLOCK_BYTES)), FLOAT, 0, 1.0)
        inlet.begin(size, None, into if keeps else None, FLOAT, FLOAT, False, True)
        assert pumped(inlet, far, cut(payload + digest(payload), cuts)) == digest(payload)
    assert bytes(into) == (payload if keeps else bytes(size))


@pytest.mark.parametrize("zeros", [True, False])
def test_every_flipped_bit_is_found(zeros):
    payload = bytes(333) if zeros else bytes(raw(random_tensor(333, torch.int32, 3)))[:333]
    good = digest(payload)
    for bit in range(len(payload) * 8):
        bad = bytearray(payload)
        bad[bit // 8] ^= 1 << bit % 8
        assert digest(bad) != good, bit


@pytest.mark.parametrize("bit", range(64))
def test_one_line_of_the_bus_that_flips_in_several_words_is_found(bit):
    """The top bit is the hard case of sums: two flips of it cancel in every sum of words."""
    for payload in (bytes(4096), bytes(raw(random_tensor(1024, torch.int32, bit)))):
        good = digest(payload)
        for distance in (8, 64, 128, 512, 2048):
            bad = bytearray(payload)
            for at in range(bit // 8, len(bad), distance):
                bad[at] ^= 1 << bit % 8
            assert digest(bad) != good, distance


@given(
    st.binary(min_size=1, max_size=400),
    st.integers(0, 10**6),
    st.binary(min_size=1, max_size=80),
    st.booleans(),
)
def test_any_burst_is_found(payload, at, burst, replaces):
    bad = bytearray(payload)
    at %= len(payload)
    for i, byte in enumerate(burst[: len(payload) - at]):
        bad[at + i] = byte if replaces else bad[at + i] ^ byte
    assert (digest(bad) == digest(payload)) == (bad == payload)


def test_blocks_that_change_places_or_are_lost_are_found():
    payload = bytes(raw(random_tensor(4096, torch.int32, 9)))
    for size in (1, 4, 8, 64, 128, 1024, 4096):
        for distance in (size, 2 * size, 8192):
            first, second = payload[:size], payload[distance : distance + size]
            swapped = second + payload[size:distance] + first + payload[distance + size :]
            assert (digest(swapped) == digest(payload)) == (first == second)
        assert digest(payload[size:]) != digest(payload)
        assert digest(payload + bytes(size)) != digest(payload)


# --- the two ends of a link -------------------------------------------------------------------------------


@pytest.mark.parametrize(("ahead", "digested"), [(72, True), (100, True), (0, True), (72, False)])
def test_the_header_behind_a_piece_comes_with_its_digest_and_nothing_behind_it(link, ahead, digested):
    near, far = link
    inlet = Inlet(near.fileno(), memoryview(bytearray(BLOCK_BYTES)), FLOAT, 0, 1.0)
    payload, behind = bytes(raw(random_tensor(35, torch.float32, 1))), bytes(range(120))
    inlet.begin(140, None, memoryview(bytearray(140)), FLOAT, FLOAT, True, digested, 0, None, ahead)
    stream = payload + digest(payload) * digested
    far.sendall(stream + behind)
    assert inlet.pump(near.fileno()) == len(stream), "the bytes ahead do not count"
    came = inlet.ahead()
    assert came == behind[: ahead * digested]
    assert inlet.finish() == digest(payload) * digested
    assert near.recv(200) == behind[len(came) :]


def test_a_flipped_bit_anywhere_behind_the_header_ends_the_piece_without_a_digest(link):
    near, far = link
    inlet = Inlet(near.fileno(), memoryview(bytearray(BLOCK_BYTES)), FLOAT, 0, 1.0)
    payload = bytes(raw(random_tensor(35, torch.float32, 1)))
    stream, own = payload + digest(payload), raw(torch.ones(35))
    into = memoryview(bytearray(140))
    for bit in range(len(stream) * 8):
        bad = bytearray(stream)
        bad[bit // 8] ^= 1 << bit % 8
        inlet.begin(140, own, into, FLOAT, FLOAT, True, True)
        assert pumped(inlet, far, [bytes(bad)]) is None, bit
    inlet.begin(140, own, into, FLOAT, FLOAT, True, True)
    assert pumped(inlet, far, [stream]) == digest(into)


def drained(outlet: Outlet, far: socket.socket, count: int) -> bytes:
    """Pump until ``count`` bytes have come out at the other end."""
    came = b""
    far.settimeout(20)
    while len(came) < count:
        with suppress(BlockingIOError):
            outlet.pump()
        came += far.recv(count - len(came))
    return came


@pytest.mark.parametrize("size", [1, 63, 64, 65, 5000, BLOCK_BYTES, 3 * BLOCK_BYTES + 70])
@pytest.mark.parametrize("digested", [True, False])
def test_own_elements_are_digested_on_their_way_out(link, size, digested):
    near, far = link
    payload = bytes(raw(torch.randint(0, 255, (size,), dtype=torch.uint8)))
    outlet = Outlet(near.fileno())
    for _ in range(2):
        outlet.begin(b"header", memoryview(payload), digested, True)
        expected = b"header" + payload + (digest(payload) if digested else b"")
        assert drained(outlet, far, len(expected)) == expected
        assert not outlet.may_send()


@pytest.mark.parametrize("size", [1, 65, 5000, 3 * BLOCK_BYTES + 70])
@pytest.mark.parametrize("digested", [True, False])
def test_elements_of_several_places_go_out_one_after_the_other(link, size, digested):
    near, far = link
    values = bytes(raw(torch.randint(0, 255, (size,), dtype=torch.uint8)))
    outlet = Outlet(near.fileno())
    for places in ([0], [1, 2, 63, 4097], [size // 2], [BLOCK_BYTES - 3, BLOCK_BYTES + 5]):
        payload = bytearray(size)
        parts = [memoryview(part) for part in cut(values, places)]
        first = len(parts[0])
        payload[:first] = parts[0]
        parts[0] = memoryview(payload)[:first]  # this part lies where it is sent from
        outlet.begin(b"header", memoryview(payload), digested, True, 0, tuple(parts))
        expected = b"header" + values + (digest(values) if digested else b"")
        assert drained(outlet, far, len(expected)) == expected and payload == values
    with pytest.raises(ValueError, match="do not fit"):
        outlet.begin(b"", memoryview(bytearray(size)), digested, True, 0, (memoryview(values), b"x"))


def test_a_piece_follows_its_arrival_and_its_digest_goes_last(link):
    near, far = link
    payload = bytes(range(200))
    outlet = Outlet(near.fileno())
    outlet.begin(b"header", memoryview(payload), True, False)
    assert drained(outlet, far, 6) == b"header"
    with pytest.raises(BlockingIOError):
        outlet.pump()
    outlet.allow(150)
    assert drained(outlet, far, 150) == payload[:150]
    outlet.allow(200)
    assert drained(outlet, far, 50) == payload[150:]
    assert not outlet.may_send()
    with pytest.raises(ValueError, match="under way"):
        outlet.begin(b"header", memoryview(payload), True, True)
    outlet.allow(200, digest(payload))
    assert drained(outlet, far, DIGEST_BYTES) == digest(payload)
    outlet.begin(b"header", memoryview(payload), True, True)


def test_the_end_of_a_link_and_the_lack_of_bytes_are_errors(link):
    near, far = link
    inlet, outlet = (
        Inlet(near.fileno(), memoryview(bytearray(BLOCK_BYTES)), FLOAT, 0, 1.0),
        Outlet(near.fileno()),
    )
    inlet.begin(8, None, memoryview(bytearray(8)), FLOAT, FLOAT, False, False)
    with pytest.raises(BlockingIOError):
        inlet.pump()
    with pytest.raises(ValueError, match="not come"):
        inlet.finish()
    far.sendall(b"1234")
    far.close()
    assert inlet.pump() == 4
    with pytest.raises(EOFError):
        inlet.pump()
    outlet.begin(b"", memoryview(bytes(10**6)), False, True)
    with pytest.raises(OSError):
        while True:
            outlet.pump()


def test_memory_that_does_not_fit_is_refused(link):
    near, _ = link
    scratch, ten = memoryview(bytearray(BLOCK_BYTES)), memoryview(bytearray(40))
    double = DTYPE_CODES[torch.float64]
    inlet = Inlet(near.fileno(), scratch, FLOAT, 0, 1.0)
    for arguments in (
        (0, None, None, FLOAT, FLOAT),
        (41, None, ten, FLOAT, FLOAT),
        (36, ten, ten, FLOAT, FLOAT),
        (40, ten, ten[:36], FLOAT, FLOAT),
        (40, ten, None, FLOAT, FLOAT),
        (80, ten, ten, double, FLOAT),
        (40, ten, ten, FLOAT, 99),
        (40, ten, ten, 0, FLOAT),
    ):
        with pytest.raises(ValueError, match="fit"):
            inlet.begin(*arguments, False, False)
    codes = (FLOAT, FLOAT, FLOAT, 0, 1.0, True)
    fold((memoryview(b""),), memoryview(b""), memoryview(bytearray()), *codes)
    for parts, own, into in (((), ten, ten), ((ten[:36],), ten, ten), ((ten, ten[:36]), ten, ten)):
        with pytest.raises(ValueError):
            fold(parts, own, into, *codes)
    for wrong in ((99, FLOAT, FLOAT, 0), (FLOAT, double, FLOAT, 0), (FLOAT, FLOAT, FLOAT, 7)):
        with pytest.raises(ValueError, match="unknown"):
            fold((ten,), ten, ten, *wrong, 1.0, True)
    for arguments in ((scratch, 0, 0), (scratch, FLOAT, 9), (scratch[:9], FLOAT, 0)):
        with pytest.raises(ValueError):
            Inlet(near.fileno(), *arguments, 1.0)
    outlet = Outlet(near.fileno())
    with pytest.raises(ValueError, match="too long"):
        outlet.begin(b"x" * 2400, ten, True, False)
    outlet.begin(b"", ten, True, False)
    for ready, payload_digest in ((41, None), (-1, None), (39, bytes(16)), (40, bytes(15))):
        with pytest.raises(ValueError, match="fit"):
            outlet.allow(ready, payload_digest)
