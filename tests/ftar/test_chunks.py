"""Headers and notices: what was packed comes back, and nothing altered passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import ProtocolError
from fabric.ftar.chunks import (
    GATHER,
    HEADER_BYTES,
    MAX_NOTICE_BYTES,
    REDUCE,
    Header,
    Round,
    intact,
    notice,
    pack,
    read_notice,
    unpack,
)

U64, U32, U16 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1)
ROUNDS = st.builds(Round, U64, U64, U32, U16, st.integers(0, 255), U64)
HEADERS = st.builds(Header, ROUNDS, st.sampled_from([REDUCE, GATHER]), U16, U32, U32)


@given(HEADERS, st.binary(max_size=100), st.booleans())
def test_a_header_comes_back_and_is_intact(header, payload, checksum):
    data = pack(header, payload, checksum)
    assert len(data) == HEADER_BYTES
    assert unpack(data) == header
    assert intact(data, payload)


@given(HEADERS, st.binary(min_size=1, max_size=100), st.integers(0, 10**6))
def test_one_flipped_bit_anywhere_is_noticed(header, payload, number):
    stream = bytearray(pack(header, payload) + payload)
    bit = number % (len(stream) * 8)
    stream[bit // 8] ^= 1 << bit % 8
    assert not intact(stream[:HEADER_BYTES], stream[HEADER_BYTES:])


def test_without_checksums_the_header_is_still_covered():
    header = Header(Round(1, 2, 3, 4, 5, 6), REDUCE, 1, 2, 3)
    data = bytearray(pack(header, b"abc", checksum=False))
    assert intact(data, b"xyz")
    data[20] ^= 1
    assert not intact(data, b"abc")


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_no_header(data):
    with pytest.raises(ProtocolError):
        unpack(data)


@given(st.text(max_size=500), st.text(max_size=40), st.integers(1, 400))
def test_a_notice_is_read_however_it_arrives(why, about, cut):
    data = notice(7, 2, why, about)
    assert len(data) <= HEADER_BYTES + MAX_NOTICE_BYTES
    if cut < len(data):
        assert read_notice(data[:cut]) is None
    got = read_notice(data)
    assert got is not None
    assert got[0].isprintable()
    assert len(got[0]) <= 300


def test_a_notice_carries_the_cause_and_the_name():
    assert read_notice(notice(7, 2, "m1 was lost", "m1")) == ("m1 was lost", "m1")


@given(st.binary(max_size=300))
def test_a_random_answer_is_refused_or_waited_for(data):
    try:
        assert read_notice(data) is None
    except ProtocolError:
        return
    assert len(data) < HEADER_BYTES


def test_an_altered_notice_is_refused():
    data = bytearray(notice(7, 2, "m1 was lost", "m1"))
    data[-3] ^= 1
    with pytest.raises(ProtocolError, match="corrupt"):
        read_notice(data)
