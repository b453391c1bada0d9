"""The frames of a device ring on the wire, and its handling of foreign bytes."""

import os
from dataclasses import replace

import pytest
from ftar.simulated_device import SimulatedDevice
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import ProtocolError
from fabric.ftar.device import frames
from fabric.ftar.device.device_api import SharedMemoryHandle

HANDLES = st.builds(
    SharedMemoryHandle,
    host=st.text(max_size=40),
    device=st.text(max_size=40),
    nbytes=st.integers(0, 2**40),
    memory=st.binary(max_size=200),
    storage_bytes=st.integers(0, 2**40),
    offset=st.integers(0, 2**40),
    counter=st.binary(max_size=60),
    counter_offset=st.integers(0, 2**20),
    event=st.binary(max_size=64),
    event_wanted=st.booleans(),
)


@given(HANDLES)
def test_a_packed_memory_handle_unpacks_unchanged(handle):
    sent = frames.offer(handle)
    head, body = sent[: frames.OFFER_HEAD_BYTES], sent[frames.OFFER_HEAD_BYTES :]
    assert frames.offer_size(head) == len(body) <= frames.MAX_OFFER_BYTES
    assert frames.read_offer(body) == handle


def test_an_offer_may_contain_no_memory_handle():
    assert frames.read_offer(frames.offer(None)[frames.OFFER_HEAD_BYTES :]) is None


@given(st.binary(min_size=1, max_size=300))
def test_arbitrary_bytes_are_refused_as_a_memory_handle(body):
    with pytest.raises(ProtocolError):
        frames.read_offer(body)


@pytest.mark.parametrize(
    "change",
    [
        (b'"nbytes": 5', b'"nbytes": -5'),
        (b'"nbytes": 5', b'"nbytes": true'),
        (b'"nbytes": 5', b'"nbytes": "5"'),
        (b'"nbytes": 5', b'"nbytes": 1e9'),
        (b'"nbytes": 5', b'"nbytes": 99999999999999999999'),
        (b'"nbytes": 5', b'"more": 1, "nbytes": 5'),
        (b'"nbytes": 5, ', b""),
        (b'"event_wanted": false', b'"event_wanted": 0'),
        (b'"memory": "eA=="', b'"memory": "e"'),
        (b'"memory": "eA=="', b'"memory": 7'),
    ],
)
def test_every_field_of_a_handle_is_checked(change):
    sent = frames.offer(SharedMemoryHandle("h", "d", 5, b"x", 6, 7, b"y", 8, b"z", False))[
        frames.OFFER_HEAD_BYTES :
    ]
    assert change[0] in sent
    with pytest.raises(ProtocolError, match="has not the fields"):
        frames.read_offer(sent.replace(*change))


def test_an_offer_is_bounded_before_memory_is_taken():
    with pytest.raises(ProtocolError):
        frames.offer_size(b"FDO1" + (frames.MAX_OFFER_BYTES + 1).to_bytes(4, "little"))


@given(
    st.builds(
        frames.ChunkFrame,
        epoch=st.integers(0, 2**62),
        step=st.integers(0, 2**62),
        exchange=st.integers(0, 2**31),
        world=st.integers(0, 2**16 - 1),
        source=st.integers(0, 2**16 - 1),
        dtype=st.integers(0, 255),
        operation=st.integers(0, 255),
        length=st.integers(0, 2**62),
        gather=st.booleans(),
        sequence=st.integers(0, 2**32 - 1),
        size=st.integers(0, 2**32 - 1),
        digested=st.booleans(),
        digest=st.integers(0, 2**64 - 1),
    ),
    st.data(),
)
def test_a_damaged_chunk_frame_is_refused_and_an_intact_one_unpacks_unchanged(chunk, data):
    sent = bytearray(frames.pack(chunk))
    assert len(sent) == frames.CHUNK_BYTES
    assert frames.unpack(sent) == chunk
    at = data.draw(st.integers(0, len(sent) - 1))
    sent[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ProtocolError):
        frames.unpack(sent)


@given(st.text(max_size=600), st.text(max_size=3000), st.lists(st.integers(0, 9), max_size=4))
def test_returned_bytes_may_come_in_any_pieces(why, about, credits_):
    sent = b"".join(frames.back(frames.CREDIT, n) for n in credits_) + frames.notice(why, about)
    buffer, found = bytearray(), []
    for byte in sent:
        buffer.append(byte)
        while (frame := frames.take_back(buffer)) is not None:
            found.append(frame)
    assert not buffer
    assert [f.value for f in found[:-1]] == credits_
    assert found[-1].kind == frames.ABORT
    assert found[-1].about in (about, "")


@given(st.binary(min_size=frames.BACK_BYTES, max_size=200))
def test_arbitrary_returned_bytes_are_refused(data):
    with pytest.raises(ProtocolError):
        frames.take_back(bytearray(data))


def test_memory_of_strangers_is_not_opened():
    device = SimulatedDevice()
    shared = device.share(4096)
    assert shared is not None
    memory, handle = shared
    opened = device.open(handle)
    assert opened is not None
    memory[7] = 9
    assert opened[7] == 9 and opened.numel() == 4096
    for changes in (
        {"host": "another"},
        {"device": "another"},
        {"nbytes": 8192},
        {"memory": b"1 1/../../../etc/passwd"},
        {"memory": b"self 3"},
        {"memory": f"{os.getpid()} 0".encode()},
        {"memory": b"999999999 3"},
    ):
        assert device.open(replace(handle, **changes)) is None, changes
    device.close()
