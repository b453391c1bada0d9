"""Whatever a peer sends on the trainer's channel, it gets one sentence, and published snapshots stay."""

import contextlib
import json
import os
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_support import fetch, publish, snapshot_file

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.wire.channel_protocol import (
    MAX_FIRST_LINE_BYTES,
    SOCKET_NAME,
    LineBuffer,
    encode_line,
)
from fabric.errors import ProtocolError
from fabric.runtime.private_folder import socket_path

ATTACH = {"op": "attach", "pid": os.getpid(), "incarnation": 1, "job": "job", "replica": "r0"}


class Raw:
    """A peer that sends bytes as they are."""

    def __init__(self, handle: ServerHandle) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        with socket_path(handle._settings.run_dir, SOCKET_NAME) as path:
            self._socket.connect(path)
        self._socket.settimeout(20)
        self._file = self._socket.makefile("rb")

    def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(data)

    def answer(self) -> dict[str, Any] | None:
        """Return the next line, or None if the server has ended the connection."""
        try:
            line = self._file.readline()
        except ConnectionError:
            return None
        return json.loads(line) if line else None

    def ask(self, **body: Any) -> dict[str, Any]:
        self.send(encode_line(body))
        answer = self.answer()
        assert answer is not None
        return answer

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@pytest.fixture
def raw(served) -> Iterator[Raw]:
    """A raw channel of this process as trainer, with a published snapshot of step 9."""
    handle = served
    handle.ensure()
    publish(handle, 0, snapshot_file(1000), 9)
    peer = Raw(handle)
    assert peer.ask(**ATTACH)["ok"] is True
    yield peer
    assert fetch(handle.url, "/v1/snapshots/9/data").body == snapshot_file(1000)
    peer.close()


def test_only_the_first_request_attaches(raw):
    answer = raw.ask(**ATTACH)
    assert answer["ok"] is False
    assert "known are allocate, begin" in answer["error"]


@pytest.mark.parametrize(
    "body",
    [
        {**ATTACH, "pid": 1},
        {**ATTACH, "pid": "1"},
        {**ATTACH, "replica": "r1"},
        {**ATTACH, "job": None},
        {"op": "attach"},
        {"op": "allocate", "kind": "snapshot", "slot": 0, "nbytes": 10},
        {"op": "finish"},
        {},
    ],
)
def test_a_malformed_attach_is_refused_and_cut_off(served, body):
    peer = Raw(served)
    answer = peer.ask(**body)
    assert answer["ok"] is False and answer["error"]
    assert peer.answer() is None
    peer.close()
    assert served.ensure() is False  # the same server still answers


@pytest.mark.parametrize(
    "line",
    [b"\n", b"[]\n", b"nonsense\n", b"\xff\xfe\n", b"[" * 5000 + b"\n", b'{"op": NaN}\n', b"1\n", b"null\n"],
)
def test_lines_that_are_not_requests_are_refused(raw, line):
    for _ in range(2):
        raw.send(line)
        answer = raw.answer()
        assert answer is not None and answer["ok"] is False
        assert "Traceback" not in answer["error"]


def test_a_long_first_line_is_cut_off_before_it_is_kept(served):
    peer = Raw(served)
    peer.send(b"x" * (MAX_FIRST_LINE_BYTES * 3))
    answer = peer.answer()
    # The unread rest of the line may cause a reset, and the reset may destroy the refusal.
    assert answer is None or "over the limit" in answer["error"]
    peer.close()


def test_silent_peers_hold_up_no_other(attach):
    handle = attach()
    silent = [Raw(handle) for _ in range(200)]
    publish(handle, 0, snapshot_file(1000), 3)
    assert fetch(handle.url, "/v1/snapshots/3/data").status == 200
    for peer in silent:
        peer.close()
    assert attach().pid == handle.pid


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["snapshot", "gradient"]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


@pytest.fixture(scope="module")
def fuzzed(served: ServerHandle) -> Iterator[Raw]:
    peer = Raw(served)
    assert peer.ask(**ATTACH)["ok"] is True
    yield peer
    peer.close()


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    op=st.sampled_from(["begin", "publish_snapshot", "publish_gradient", "void", "attach", "x", None, 5]),
    fields=st.dictionaries(
        st.sampled_from(
            [
                "kind",
                "slot",
                "nbytes",
                "manifest",
                "generation",
                "step",
                "epoch",
                "digest",
                "weight",
                "layout",
                "meta",
                "unless_read",
            ]
        ),
        VALUES,
    ),
)
def test_every_request_gets_one_answer(fuzzed, op, fields):
    answer = fuzzed.ask(op=op, **fields)
    assert answer["ok"] is True or (answer["error"] and "defect" not in answer["error"])
    # The server's next answer must belong to the next request.
    assert "there is no operation 'probe'" in fuzzed.ask(op="probe")["error"]


def test_requests_in_pieces_and_many_at_once(raw):
    line = encode_line({"op": "begin", "kind": "gradient", "slot": 3})
    chance = random.Random(3)
    data = line * 50
    at = 0
    while at < len(data):
        size = chance.randint(1, 90)
        raw.send(data[at : at + size])
        at += size
    for _ in range(50):
        assert raw.answer() == {"ok": True, "readers": 0}


def test_finish_refuses_an_impossible_linger_time(raw):
    for linger_s in (-1, 1e9, "5", None):
        assert raw.ask(op="finish", linger_s=linger_s)["ok"] is False


@given(st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")), max_size=10), st.randoms())
def test_the_line_buffer_returns_lines_as_they_were_sent(lines, chance):
    data = b"".join(line + b"\n" for line in lines)
    buffer, got = LineBuffer(100), []
    while data:
        size = chance.randint(1, 30)
        buffer.feed(data[:size])
        data = data[size:]
        while (line := buffer.next_line()) is not None:
            got.append(line)
    assert got == lines


def test_a_line_over_the_limit_is_refused_with_or_without_its_end():
    for data in (b"x" * 11, b"x" * 11 + b"\n"):
        buffer = LineBuffer(10)
        buffer.feed(data)
        with pytest.raises(ProtocolError, match="over the limit of 10 bytes"):
            buffer.next_line()
    buffer = LineBuffer(10)
    buffer.feed(b"x" * 10 + b"\n")
    assert buffer.next_line() == b"x" * 10
