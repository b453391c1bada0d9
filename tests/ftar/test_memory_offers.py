"""Offers of shared device memory on the wire, and the handling of foreign bytes."""

import os
from dataclasses import replace

import pytest
from ftar.simulated_device import SimulatedDevice
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import ProtocolError
from fabric.ftar.device import device_ring
from fabric.ftar.device.cuda import SharedMemoryHandle

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
    sent = device_ring.offer(handle)
    head, body = sent[: device_ring.OFFER_HEAD_BYTES], sent[device_ring.OFFER_HEAD_BYTES :]
    assert device_ring.offer_size(head) == len(body) <= device_ring.MAX_OFFER_BYTES
    assert device_ring.read_offer(body) == handle


def test_an_offer_may_contain_no_memory_handle():
    assert device_ring.read_offer(device_ring.offer(None)[device_ring.OFFER_HEAD_BYTES :]) is None


@given(st.binary(min_size=1, max_size=300))
def test_arbitrary_bytes_are_refused_as_a_memory_handle(body):
    with pytest.raises(ProtocolError):
        device_ring.read_offer(body)


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
    sent = device_ring.offer(SharedMemoryHandle("h", "d", 5, b"x", 6, 7, b"y", 8, b"z", False))[
        device_ring.OFFER_HEAD_BYTES :
    ]
    assert change[0] in sent
    with pytest.raises(ProtocolError, match="has not the fields"):
        device_ring.read_offer(sent.replace(*change))


def test_an_offer_is_bounded_before_memory_is_taken():
    with pytest.raises(ProtocolError):
        device_ring.offer_size(b"FDO1" + (device_ring.MAX_OFFER_BYTES + 1).to_bytes(4, "little"))


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
