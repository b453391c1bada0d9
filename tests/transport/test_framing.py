"""Frames survive any cut of the stream; anything else is refused before memory is taken."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import ProtocolError
from fabric.transport.link import GOODBYE, MAX_FRAME_BYTES, FrameParser, frame


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(stream) + 1) for c in cuts), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(st.binary(min_size=1, max_size=300)), st.lists(st.integers(0, 10**6), max_size=20))
def test_any_cut_of_the_stream_gives_the_same_messages(payloads: list[bytes], cuts: list[int]):
    parser = FrameParser()
    stream = b"".join(frame(p) for p in payloads) + GOODBYE
    got = [m for piece in cut(stream, cuts) for m in parser.feed(piece)]
    assert got == [*payloads, b""]
    assert not parser.pending


@given(st.lists(st.binary(max_size=64), max_size=30))
def test_random_bytes_give_messages_or_one_refusal_and_bounded_memory(pieces: list[bytes]):
    parser = FrameParser(limit_bytes=100)
    for piece in pieces:
        try:
            messages = parser.feed(piece)
        except ProtocolError:
            assert not parser.pending
            break
        assert all(len(m) <= 100 for m in messages)
        assert len(parser.pending) <= 104


def test_a_length_over_the_limit_is_refused_with_the_header_alone():
    with pytest.raises(ProtocolError, match="announces 1048577 bytes"):
        FrameParser().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))


@pytest.mark.parametrize("payload", [b"", b"x" * (MAX_FRAME_BYTES + 1)])
def test_a_payload_that_no_parser_would_take_is_not_framed(payload: bytes):
    with pytest.raises(ProtocolError):
        frame(payload)


def test_the_largest_message_passes():
    assert FrameParser().feed(frame(b"x" * MAX_FRAME_BYTES)) == [b"x" * MAX_FRAME_BYTES]
