"""Headers and notices: what was packed comes back, and nothing altered passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import ProtocolError
from fabric.ftar.chunk_headers import (
    ANSWER,
    CREDIT,
    FOLLOWS,
    GATHER,
    HEADER_BYTES,
    MAX_NOTICE_BYTES,
    READ,
    REDUCE,
    ChunkHeader,
    ExchangeSpec,
    all_read,
    digest,
    notice,
    pack,
    take_back,
    to_previous,
    unpack,
)

U64, U32, U16 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1)
BYTE = st.integers(0, 255)
ROUNDS = st.builds(ExchangeSpec, U64, U64, U32, U16, BYTE, U64, BYTE)
HEADERS = st.builds(ChunkHeader, ROUNDS, st.sampled_from([REDUCE, GATHER]), U16, U32, U32)


@given(HEADERS, st.one_of(st.none(), st.just(FOLLOWS), U64))
def test_a_packed_chunk_header_unpacks_unchanged(header, payload_digest):
    data = pack(header, payload_digest)
    assert len(data) == HEADER_BYTES
    assert unpack(data) == (header, payload_digest)


@given(HEADERS, st.binary(min_size=1, max_size=100), st.integers(0, 10**6))
def test_one_flipped_bit_anywhere_is_noticed(header, payload, number):
    stream = bytearray(pack(header, digest(payload)) + payload)
    bit = number % (len(stream) * 8)
    stream[bit // 8] ^= 1 << bit % 8
    if bit // 8 < HEADER_BYTES:
        with pytest.raises(ProtocolError):
            unpack(stream)
    else:
        assert unpack(stream)[1] != digest(stream[HEADER_BYTES:])


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_no_header(data):
    with pytest.raises(ProtocolError):
        unpack(data)


@given(st.text(max_size=500), st.text(max_size=40), st.integers(1, 400))
def test_an_abort_notice_is_read_from_any_fragments(why, about, cut):
    data = bytearray(notice(7, 2, why, about))
    assert len(data) <= HEADER_BYTES + MAX_NOTICE_BYTES
    if cut < len(data):
        assert take_back(data[:cut]) is None
    got = take_back(data)
    assert isinstance(got, tuple)
    assert got[0].isprintable()
    assert len(got[0]) <= 300
    assert not data


def test_returned_bytes_are_parsed_message_by_message():
    spec = ExchangeSpec(7, 1, 0, 3, 1, 100)
    data = bytearray(all_read(spec, 2, end=True) + notice(7, 2, "m1 was lost", "m1") + b"F")
    said = take_back(data, READ)
    assert isinstance(said, ChunkHeader)
    assert (said.spec, said.source, said.sequence) == (spec, 2, 1)
    assert take_back(data) == ("m1 was lost", "m1")
    assert take_back(data) is None
    assert data == b"F"


def test_answers_and_credits_are_read_in_order_and_only_where_they_are_expected():
    data = bytearray(to_previous(ANSWER, 1) + to_previous(CREDIT, 5) + notice(7, 2, "enough", ""))
    assert take_back(bytearray(data[: HEADER_BYTES - 1]), ANSWER, CREDIT) is None
    with pytest.raises(ProtocolError, match="no notice"):
        take_back(bytearray(data), READ)
    answer, credit = take_back(data, ANSWER, CREDIT), take_back(data, ANSWER, CREDIT)
    assert [(x.kind, x.sequence) for x in (answer, credit)] == [(ANSWER, 1), (CREDIT, 5)]
    assert take_back(data, ANSWER, CREDIT) == ("enough", "") and not data


@given(st.binary(max_size=300))
def test_a_random_answer_is_refused_or_waited_for(data):
    try:
        assert take_back(bytearray(data)) is None
    except ProtocolError:
        return
    assert len(data) < HEADER_BYTES


def test_an_altered_notice_is_refused():
    data = bytearray(notice(7, 2, "m1 was lost", "m1"))
    data[-3] ^= 1
    with pytest.raises(ProtocolError, match="corrupt"):
        take_back(data)
