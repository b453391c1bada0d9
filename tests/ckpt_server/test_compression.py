"""Compressed transfers: every way in and out, malicious frames, and the measurement that decides on
compression.
"""

import contextlib
import random
import socket
import struct
import threading
import time
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from server_support import fetch, manifest_of, publish, publish_gradient

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.fetch import multi_source
from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.ckpt_server.fetch.multi_source import FAST_BYTES_S, LinkSpeed
from fabric.ckpt_server.format.safetensors_file import build_preamble
from fabric.ckpt_server.wire.compression import (
    IDENTITY,
    PIECE_BYTES,
    SHUFFLE,
    ZSTD,
    Compressor,
    choose,
    decompress,
)
from fabric.errors import ProtocolError
from fabric.model import SnapshotRef

STEP = 1200
COUNT = 6_000_001  # number of elements: several blocks, and no multiple of a piece
WEIGHTS = np.random.default_rng(1).normal(0, 0.02, COUNT).astype(np.float32)
FILE = build_preamble([("w", "F32", (COUNT,), WEIGHTS.nbytes)], "{}") + WEIGHTS.tobytes()
DATA = f"/v1/snapshots/{STEP}/data"


@pytest.fixture(scope="module")
def url(served: ServerHandle) -> str:
    publish(served, 6, FILE, STEP)
    publish_gradient(served, 3, WEIGHTS[:1000].tobytes(), STEP)
    return served.url


def decompressed(body: bytes, nbytes: int) -> bytes:
    into, at = bytearray(nbytes), 0

    def read(part: memoryview) -> None:
        nonlocal at
        if at + len(part) > len(body):
            raise ConnectionError("the body ended too early")
        part[:] = body[at : at + len(part)]
        at += len(part)

    decompress(read, memoryview(into))
    assert at == len(body)
    return bytes(into)


def inflated(body: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(body)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (DATA, FILE),
        (f"/v1/snapshots/{STEP}/tensors/w", WEIGHTS.tobytes()),
        (f"/v1/snapshots/{STEP}/tensors/w?slice=100:200", WEIGHTS[100:200].tobytes()),
        (f"/v1/gradients/{STEP}", WEIGHTS[:1000].tobytes()),
        (f"/v1/snapshots/{STEP}/blocks/1-2", FILE[4 << 20 : 12 << 20]),
        (f"/v1/snapshots/{STEP}/blocks/5-5", FILE[20 << 20 :]),
    ],
    ids=["state", "tensor", "slice", "gradient", "blocks", "last block"],
)
def test_a_compressed_answer_is_smaller_and_decompresses_to_the_bytes(url, path, expected):
    plain = fetch(url, path)
    assert plain.body == expected and "Content-Encoding" not in plain.headers
    zstd = fetch(url, path, Accept_Encoding="gzip, zstd")
    assert zstd.headers["Content-Encoding"] == ZSTD and inflated(zstd.body) == expected
    shuffled = fetch(url, path, Accept_Encoding=f"{ZSTD}, {SHUFFLE}")
    assert (
        shuffled.headers["Content-Encoding"] == SHUFFLE
        and decompressed(shuffled.body, len(expected)) == expected
    )
    if len(expected) > 100_000:
        assert len(shuffled.body) < 0.87 * len(expected) < 0.87 * len(plain.body) + 1
        assert len(shuffled.body) < len(zstd.body) < len(expected)
    tags = {answer.headers["ETag"] for answer in (plain, zstd, shuffled)}
    assert len(tags) == 3, "a strong tag is of one representation"
    assert all(answer.headers["Vary"] == "Accept-Encoding" for answer in (plain, zstd, shuffled))
    assert fetch(url, path, Accept_Encoding=ZSTD, If_None_Match=zstd.headers["ETag"]).status == 304


def test_a_range_is_of_the_plain_bytes(url):
    answer = fetch(url, DATA, Accept_Encoding=ZSTD, Range="bytes=10-19")
    assert (answer.status, answer.body) == (206, FILE[10:20]) and "Content-Encoding" not in answer.headers
    head = fetch(url, DATA, method="HEAD", Accept_Encoding=ZSTD)
    assert head.headers["Content-Length"] == str(len(FILE))


def test_blocks_that_do_not_exist_are_refused(url):
    told = fetch(url, f"/v1/snapshots/{STEP}/blocks/3-6")
    assert told.status == 404 and "lists blocks 0 to 5" in told.error
    for blocks in ("5-3", "a-b", "-1-2", "1", "1-", "9" * 20 + "-" + "9" * 20):
        assert fetch(url, f"/v1/snapshots/{STEP}/blocks/{blocks}").status == 400


@pytest.mark.parametrize(
    ("header", "chosen"),
    [
        (None, IDENTITY),
        ("", IDENTITY),
        ("*", IDENTITY),
        ("identity", IDENTITY),
        ("gzip, br", IDENTITY),
        ("zstd", ZSTD),
        ("ZSTD", ZSTD),
        ("zstd;q=0", IDENTITY),
        ("zstd;q=0.000", IDENTITY),
        ("gzip;q=1.0, zstd;q=0.5", ZSTD),
        ("zstd, x-fabric-shuffle", SHUFFLE),
        ("x-fabric-shuffle, zstd", SHUFFLE),
        ("x-fabric-shuffle;q=0.4, zstd;q=0.5", ZSTD),
        ("zstd;q=2", IDENTITY),
        ("zstd;q=nan", IDENTITY),
        ("zstd;level=3", IDENTITY),
    ],
)
def test_the_accepted_encodings_of_a_reader(header, chosen):
    assert choose(header) == chosen


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_accept_encoding_names_a_coding_or_none(header):
    assert choose(header) in (IDENTITY, ZSTD, SHUFFLE)


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=3000), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_compression_round_trip_returns_the_bytes(data, width, repeats):
    data = data * 400 if repeats else data
    compressor, body = Compressor(SHUFFLE, width), b""
    for at in range(0, len(data), PIECE_BYTES):
        body += compressor.pack(memoryview(data)[at : at + PIECE_BYTES])
    assert decompressed(body + compressor.end(), len(data)) == data


def frame(width: int, nbytes: int, compressed: bytes, follow: int | None = None) -> bytes:
    return struct.pack("<B3xII", width, nbytes, len(compressed) if follow is None else follow) + compressed


BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 28))  # some kilobytes that decompress to 256 MiB
STREAMED = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
WIDE = zstandard.ZstdCompressor(
    compression_params=zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
).compress(bytes(1000))


LIES = ["a bomb cut", "a bomb", "no size", "a wide window", "4 GiB", "2 GiB", "width 3", "no whole elements"]
LIES += ["nothing", "too little", "too much", "more behind", "no zstd", "cut"]


@pytest.mark.parametrize(
    "body",
    [
        frame(4, 1000, BOMB[:999]),
        frame(1, PIECE_BYTES, BOMB),
        frame(1, 1000, STREAMED),
        frame(1, 1000, WIDE),
        frame(4, 2**32 - 1, b"", follow=2**32 - 1),
        frame(4, 1000, b"", follow=2**31),
        frame(3, 999, b"x" * 10),
        frame(4, 1001, b"x" * 10),
        frame(4, 0, b""),
        frame(1, 1000, zstandard.ZstdCompressor().compress(bytes(999))),
        frame(1, 1000, zstandard.ZstdCompressor().compress(bytes(1001))),
        frame(1, 1000, zstandard.ZstdCompressor().compress(bytes(1000)) + b"more"),
        frame(1, 1000, b"no zstd at all"),
        frame(1, 1000, zstandard.ZstdCompressor().compress(bytes(1000))[:-3]),
    ],
    ids=LIES,
)
def test_a_frame_with_a_false_length_is_refused_before_memory_is_taken(body):
    tracemalloc.start()
    with pytest.raises((ProtocolError, ConnectionError)):
        decompressed(body, 1 << 21)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * PIECE_BYTES


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_damaged_frame_is_decompressed_or_refused(data):
    good = frame(4, 400, zstandard.ZstdCompressor().compress(bytes(400))) + frame(1, 5, b"hello")
    body = bytearray(good)
    for _ in range(data.draw(st.integers(0, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))]
    try:
        decompressed(bytes(body), 405)
    except (ProtocolError, ConnectionError, AssertionError):
        return


# --- who decides -----------------------------------------------------------------------------------------


def test_a_fast_link_is_never_compressed():
    speed = LinkSpeed(2)
    for _ in range(100):
        assert not speed.compress_next()
        speed.measured(False, int(FAST_BYTES_S), 2.0)
    assert speed.why == "plain: the link gives 400 MB/s, faster than compressing"


def measure(speed: LinkSpeed, plain: float, compressed: float, ranges: int) -> list[bool]:
    """Return for each range in turn whether a stream with these speeds compresses it."""
    ways = []
    for _ in range(ranges):
        ways.append(speed.compress_next())
        speed.measured(ways[-1], 1 << 22, (1 << 22) / (compressed if ways[-1] else plain))
    return ways


def test_a_slow_link_is_compressed_after_one_trial_and_looked_at_again():
    speed = LinkSpeed(2)
    assert speed.why.startswith("plain: too little")
    ways = measure(speed, 10e6, 14e6, 40)
    assert ways[:4] == [False] * 4 and all(ways[4:37]) and ways.count(False) == 5
    assert speed.why == "compressed: the link gives 20 MB/s plain and 28 MB/s compressed"
    assert not any(measure(speed, 300e6, 14e6, 100)[40:]), "the link has become fast"


def test_small_ranges_do_not_count_as_measurements_of_the_link():
    speed = LinkSpeed(1)
    measure(speed, 10e6, 14e6, 5)
    for compressed in (False, True):
        speed.measured(compressed, 1000, 0.1)
    assert speed.why == "compressed: the link gives 10 MB/s plain and 14 MB/s compressed"


def test_compression_without_gain_is_tried_on_one_range_and_dropped():
    speed = LinkSpeed(3)
    assert measure(speed, 100e6, 105e6, 30) == [False] * 6 + [True] + [False] * 23
    assert speed.why == "plain: the link gives 300 MB/s plain and 315 MB/s compressed"


def test_a_failed_trial_of_compression_is_repeated_and_only_one_runs_at_a_time():
    speed = LinkSpeed(1)
    measure(speed, 10e6, 10e6, 2)
    assert speed.compress_next() and not speed.compress_next()
    speed.measured(True, 0, 1.0)
    assert speed.compress_next()
    assert "nothing was left to try" in speed.why


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e12), st.floats(0, 1e6), st.booleans()), max_size=80))
def test_any_measurements_lead_to_plain_or_compressed(measured):
    speed = LinkSpeed(2)
    for compressed, nbytes, seconds, fails in measured:
        speed.compress_next()
        speed.measured(compressed, 0 if fails else int(nbytes), seconds)
        assert speed.why.partition(":")[0] in ("plain", "compressed")


class SlowLink:
    """A proxy that passes at most ``bytes_per_s`` on to the reader over all connections, and counts the
    bytes.
    """

    def __init__(self, target: tuple[str, int], bytes_per_s: float) -> None:
        self._target, self._pace, self._lock = target, bytes_per_s, threading.Lock()
        self._due = time.monotonic()
        self.passed = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._server]
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, slow: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if slow:
                    with self._lock:
                        self.passed += len(data)
                        self._due = max(self._due, time.monotonic()) + len(data) / self._pace
                        due = self._due
                    time.sleep(max(0.0, due - time.monotonic()))
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def test_a_slow_link_brings_a_state_compressed_and_says_so(served):
    nbytes = 48 << 20
    file = build_preamble([("z", "F32", (nbytes // 4,), nbytes)], "{}") + bytes(nbytes)
    publish(served, 7, file, STEP + 1)
    target = bytearray(len(file))
    host, port = served.url.removeprefix("http://").split(":")
    link = SlowLink((host, int(port)), 15e6)
    try:
        fetcher = StateFetcher(streams_per_source=2, range_bytes=4 << 20)
        state = SnapshotRef(1, STEP + 1, manifest_of(file, STEP + 1)["digest"])
        fetched = fetcher.fetch_state([link.url], state, lambda _: memoryview(target))
    finally:
        link.close()
    assert target == file
    # Compression makes zeros a thousand times smaller, so it wins under any load on this machine.
    assert fetched.compression.startswith("compressed: the link gives"), fetched.compression
    assert link.passed < 0.7 * nbytes


@pytest.mark.parametrize("offers", [True, False], ids=["compresses", "has no blocks by number"])
def test_compressed_bytes_are_verified_after_decompression(served, url, monkeypatch, offers):
    """Fetch compressed weights from a server that compresses and from a server of the version before."""
    monkeypatch.setattr(multi_source, "_FIRST_PLAIN", 0)
    monkeypatch.setattr(multi_source, "FAST_BYTES_S", 1e15)
    monkeypatch.setattr(multi_source, "GAIN", 0.0)
    if not offers:
        monkeypatch.setattr(
            "fabric.ckpt_server.fetch.multi_source.BLOCKS_PATH", "/v1/snapshots/{}/nothing/{}-{}{}"
        )
    before = random.Random(3).randbytes(len(FILE))
    target = bytearray(before)
    state = SnapshotRef(1, STEP, manifest_of(FILE, STEP)["digest"])
    fetcher = StateFetcher()
    fetcher.same_host = False  # a fetch from the same host's memory is never compressed
    fetched = fetcher.fetch_state([url], state, lambda _: memoryview(target))
    assert target == FILE and not fetched.warnings
    assert fetched.compression.startswith("compressed" if offers else "plain")
