"""The fast path of a session handles ordinary text frames, and leaves all other frames to the library."""

import random

import pytest

from fabric.lighthouse.http.websockets import FastFrames


class Library:
    """Stands for the library behind the fast path, and records the frames that it gets."""

    def __init__(self):
        self.data, self.calls = b"", []

    def data_received(self, data):
        self.data += data

    def __getattr__(self, name):
        return lambda *_: self.calls.append(name)


def frame(body, first=0x81, mask=b"\x01\xfe\x7f\x80", long=False):
    size = len(body)
    if size < 126 and not long:
        head = bytes((first, 0x80 | size))
    elif size < 1 << 16:
        head = bytes((first, 0x80 | 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((first, 0x80 | 127)) + size.to_bytes(8, "big")
    masked = bytes(b ^ mask[i % 4] for i, b in enumerate(body))
    return head + mask + masked


@pytest.mark.parametrize("seed", range(20))
def test_plain_text_frames_are_read_in_order_from_any_fragments(seed):
    chance = random.Random(seed)
    texts = ["ü" * chance.choice((0, 1, 62, 63, 64, 200, 2000, 32_767)) + str(i) for i in range(10)]
    stream = b"".join(frame(x.encode(), mask=chance.randbytes(4)) for x in texts)
    found, library = [], Library()
    usual = FastFrames(library, lambda text: found.append(text) or True, library.calls.append)
    while stream:
        size = chance.choice((1, 2, 7, 100, 5000, len(stream)))
        usual.data_received(stream[:size])
        stream = stream[size:]
    assert found == texts and library.data == b""


@pytest.mark.parametrize(
    "other",
    [
        frame(b"part", first=0x01),
        frame(b"compressed", first=0xC1),
        frame(b"binary", first=0x82),
        frame(b"\x03\xe8bye", first=0x88),
        frame(b"x" * 70_000),
        frame(b"\xff\xfe no text"),
        b"\x81\x03abc",  # not masked
    ],
    ids=["in pieces", "compressed", "binary", "close", "long", "no UTF-8", "not masked"],
)
@pytest.mark.parametrize("cut", [1, 3, 1 << 20])
def test_from_the_first_unusual_frame_on_the_library_reads_the_connection(other, cut):
    stream = frame(b"one") + frame(b"two") + other + frame(b"three")
    found, library = [], Library()
    usual = FastFrames(library, lambda text: found.append(text) or True, library.calls.append)
    for at in range(0, len(stream), cut):
        usual.data_received(stream[at : at + cut])
    assert found == ["one", "two"] and library.data == other + frame(b"three")


@pytest.mark.parametrize("cut", [1, 3, 1 << 20])
@pytest.mark.parametrize("body", [b"", b"\x00\xff ping", b"x" * 125])
def test_a_ping_is_answered_at_once_and_the_fast_path_goes_on(body, cut):
    stream = frame(b"one") + frame(body, first=0x89) + frame(b"two")
    found, library = [], Library()
    usual = FastFrames(library, lambda text: found.append(text) or True, library.calls.append)
    for at in range(0, len(stream), cut):
        usual.data_received(stream[at : at + cut])
    assert found == ["one", "two"] and library.data == b""
    assert library.calls == [bytes((0x8A, len(body))) + body]


def test_when_the_receiver_stops_the_library_reads_the_rest():
    library = Library()
    usual = FastFrames(library, lambda _: False, library.calls.append)
    usual.data_received(frame(b"one") + frame(b"two"))
    usual.data_received(frame(b"three"))
    assert library.data == frame(b"two") + frame(b"three")


def test_other_events_of_the_connection_are_passed_to_the_library():
    library = Library()
    usual = FastFrames(library, lambda _: True, lambda _: None)
    usual.pause_writing(), usual.resume_writing(), usual.eof_received(), usual.connection_lost(None)
    assert library.calls == ["pause_writing", "resume_writing", "eof_received", "connection_lost"]
