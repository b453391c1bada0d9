"""A fetch from sources that lie, stall, die or disagree ends complete and verified, or with an error."""

import contextlib
import json
import random
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.ckpt_server.fetch.http_source import PIECE_BYTES
from fabric.ckpt_server.fetch.multi_source import RangeClaim, RangeQueue, streams_per_source
from fabric.ckpt_server.format.manifest import SEAL, digest_of_blocks, seal
from fabric.ckpt_server.format.safetensors_file import build_preamble
from fabric.errors import ConfigError, Gone, IntegrityError, StateError
from fabric.model import SnapshotRef

BLOCK = 4096


def make_file(nbytes: int, seed: int = 0) -> bytes:
    data = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()
    third = nbytes // 3
    tensors = [("a", "U8", (third,), third), ("b", "U8", (nbytes - third,), nbytes - third)]
    return build_preamble(tensors, "{}") + data


def manifest_of(file: bytes, step: int = 5, block_bytes: int = BLOCK) -> dict[str, Any]:
    cuts = range(0, len(file), block_bytes)
    blocks = [xxhash.xxh3_64_hexdigest(file[i : i + block_bytes]) for i in cuts]
    return {
        "format": 1,
        "job": "j",
        "replica": "r",
        "generation": 1,
        "step": step,
        "digest": digest_of_blocks(len(file), blocks, block_bytes),
        "nbytes": len(file),
        "block_bytes": block_bytes,
        "blocks": blocks,
        "created": 0.0,
        "tensors": {},
    }


class Origin:
    """A source that serves correct bytes until the test changes it."""

    def __init__(self, file: bytes, token: str = "") -> None:
        self.file, self.token = file, token
        self.lock = threading.Lock()
        self.data_requests = 0
        self.manifest: dict[str, Any] = manifest_of(file)
        self.mangle: Callable[[int, bytes], bytes] = lambda begin, data: data
        self.on_data: Callable[[int], None] = lambda number: None  # called before the n-th data request
        self.headers: dict[str, str] = {}
        self.stop_after: int | None = None  # the connection ends after this many bytes of a body
        self.hang = threading.Event()  # while set, bodies stop after one block
        self.go = threading.Event()
        self.status = 0
        self.gradients: dict[int, tuple[bytes, dict[str, str]]] = {}
        self.asked: list[str] = []
        self.connections: set[socket.socket] = set()
        origin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                origin.connections.add(self.connection)

            def do_GET(self) -> None:
                with contextlib.suppress(OSError):
                    origin.answer(self)

            def log_message(self, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def kill(self) -> None:
        """Act as a killed source: close the port and reset every connection."""
        self.server.shutdown()
        self.server.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.go.set()
        self.kill()
        self.thread.join()

    def reply(self, request: Any, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        request.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    def answer(self, request: Any) -> None:
        self.asked.append(request.path)
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            self.reply(request, 401, b'{"error": "The token does not match."}')
        elif self.status:
            self.reply(request, self.status, b'{"error": "The snapshot is not held.", "available": []}')
        elif "/manifest" in request.path:
            self.reply(request, 200, json.dumps(self.manifest).encode())
        elif "/gradients/" in request.path:
            self.gradient(request)
        else:
            with self.lock:
                self.data_requests += 1
                number = self.data_requests
            self.on_data(number)
            self.data(request)

    def data(self, request: Any) -> None:
        begin, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["Range"]).groups())
        body = self.mangle(begin, self.file[begin : last + 1])
        request.send_response(206)
        headers = {
            "Content-Length": str(last + 1 - begin),
            "Content-Range": f"bytes {begin}-{last}/{len(self.file)}",
            "ETag": f'"{self.manifest["digest"]}"',
        }
        for name, value in (headers | self.headers).items():
            request.send_header(name, value)
        request.end_headers()
        if self.hang.is_set():
            request.wfile.write(body[:BLOCK])
            self.go.wait(30)
            return
        if self.stop_after is not None and len(body) > self.stop_after:
            request.wfile.write(body[: self.stop_after])
            request.close_connection = True
            return
        request.wfile.write(body)

    def gradient(self, request: Any) -> None:
        step = int(re.search(r"/gradients/(\d+)", request.path)[1])
        if step in self.gradients:
            body, headers = self.gradients[step]
            self.reply(request, 200, body, headers)
        else:
            gone = bool(self.gradients) and step < min(self.gradients)
            error = {"error": "Not held.", "available": sorted(self.gradients), "gone": gone}
            self.reply(request, 409, json.dumps(error).encode())


@pytest.fixture
def origins() -> Iterator[Callable[..., list[Origin]]]:
    running: list[Origin] = []

    def start(count: int, nbytes: int = 40 * BLOCK + 77, **options: Any) -> list[Origin]:
        file = make_file(nbytes)
        running.extend(Origin(file, **options) for _ in range(count))
        return running[-count:]

    yield start
    for origin in running:
        origin.close()


def ref(origin: Origin) -> SnapshotRef:
    return SnapshotRef(1, 5, manifest_of(origin.file)["digest"])


class Memory:
    """The target memory of a fetch; records its requests."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.buffer = bytearray()

    def __call__(self, nbytes: int) -> memoryview:
        self.asked.append(nbytes)
        if len(self.buffer) != nbytes:
            self.buffer = bytearray(nbytes)
        return memoryview(self.buffer)


def fetcher(**options: Any) -> StateFetcher:
    return StateFetcher(**({"range_bytes": 2 * BLOCK, "timeout_s": 5.0} | options))


def test_striped_over_all_sources_and_verified(origins) -> None:
    three = origins(3)
    all_asked = threading.Barrier(3, timeout=10)
    for origin in three:
        origin.on_data = lambda number: all_asked.wait() if number == 1 else None
    memory = Memory()
    done = fetcher().fetch_state([origin.url for origin in three], ref(three[0]), memory)
    assert memory.buffer == three[0].file
    assert memory.asked == [len(three[0].file)]
    assert sum(done.sources.values()) == done.nbytes == len(three[0].file)
    assert all(any("/data" in path for path in origin.asked) for origin in three)
    assert done.warnings == ()
    assert sum(len(origin.connections) for origin in three) <= 3 * 2  # kept alive


def test_connections_are_kept_for_the_next_fetch_and_dialled_again_where_closed(origins) -> None:
    two = origins(2)
    fetch, urls = fetcher(), [origin.url for origin in two]
    fetch.fetch_state(urls, ref(two[0]), Memory())
    opened = [len(origin.connections) for origin in two]
    assert max(opened) <= 2  # one of the two streams reuses the manifest's connection
    fetch.fetch_state(urls, ref(two[0]), Memory())
    assert all(len(origin.connections) <= 2 for origin in two)
    for origin in two:
        for connection in list(origin.connections):
            connection.shutdown(socket.SHUT_RDWR)
    memory = Memory()
    assert fetch.fetch_state(urls, ref(two[0]), memory).warnings == ()
    assert memory.buffer == two[0].file
    fetch.close()


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK - 200, 3 * BLOCK])
def test_states_of_sizes_around_a_block_boundary_arrive_whole(origins, nbytes: int) -> None:
    (origin,) = origins(1, nbytes)
    memory = Memory()
    fetcher().fetch_state([origin.url], ref(origin), memory)
    assert memory.buffer == origin.file


@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_the_last_bytes_of_a_range_wake_the_reader(origins, pieces: int, beyond: int) -> None:
    """The kernel wakes it for whole pieces, of which a range's end has none. The connection serves on."""
    size = pieces * PIECE_BYTES + beyond
    [origin] = origins(1)
    origin.file = make_file(size)[:size]
    origin.manifest = manifest_of(origin.file, block_bytes=1 << 16)
    state = SnapshotRef(1, 5, origin.manifest["digest"])
    with contextlib.closing(fetcher(streams_per_source=1, range_bytes=8 << 20)) as fetching:
        for _ in range(2):
            memory = Memory()
            assert fetching.fetch_state([origin.url], state, memory).warnings == ()
            assert memory.buffer == origin.file


def flip(position: int) -> Callable[[int, bytes], bytes]:
    def mangle(begin: int, data: bytes) -> bytes:
        if begin <= position < begin + len(data):
            data = bytearray(data)
            data[position - begin] ^= 0x10
        return bytes(data)

    return mangle


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(position=st.integers(0, 10 * BLOCK))
def test_a_byte_flipped_in_flight_is_fetched_elsewhere_and_named(origins, position: int) -> None:
    liar, honest = origins(2, 9 * BLOCK + 1)
    position %= len(liar.file)
    liar.mangle = flip(position)
    memory = Memory()
    done = fetcher(streams_per_source=1).fetch_state([liar.url, honest.url], ref(honest), memory)
    assert memory.buffer == honest.file
    for warning in done.warnings:  # no warning if the honest source happened to serve the damaged block
        assert warning.startswith(f"{liar.url} sent wrong bytes for block {position // BLOCK} of")
    liar.close()
    honest.close()


def test_a_source_that_sends_wrong_bytes_twice_is_dropped(origins) -> None:
    liar, honest = origins(2)
    liar.mangle = lambda begin, data: bytes(len(data))
    honest.on_data = lambda number: time_gate.wait(5)
    time_gate = threading.Event()
    liar.on_data = lambda number: time_gate.set() if number >= 2 else None
    done = fetcher(streams_per_source=1).fetch_state([liar.url, honest.url], ref(honest), Memory())
    assert done.sources == {liar.url: 0, honest.url: done.nbytes}
    assert sum(liar.url in warning for warning in done.warnings) == 2
    assert done.warnings[-1].endswith("the source is not used any more.")


def test_wrong_bytes_of_the_only_source_are_an_integrity_error(origins) -> None:
    (liar,) = origins(1)
    liar.mangle = flip(3 * BLOCK)
    with pytest.raises(IntegrityError, match="it sent wrong bytes 2 times"):
        fetcher().fetch_state([liar.url], ref(liar), Memory())


def test_truncated_bodies_are_fetched_elsewhere(origins) -> None:
    short, honest = origins(2)
    short.stop_after = BLOCK + 10
    memory = Memory()
    done = fetcher().fetch_state([short.url, honest.url], ref(honest), memory)
    assert memory.buffer == honest.file
    assert done.sources[honest.url] > 0


def test_the_fetch_goes_on_when_a_source_is_killed_in_mid_transfer(origins) -> None:
    victim, survivor = origins(2, 200 * BLOCK)

    def die(number: int) -> None:
        if number == 4:
            threading.Thread(target=victim.kill).start()

    victim.on_data = die
    memory = Memory()
    done = fetcher().fetch_state([victim.url, survivor.url], ref(victim), memory)
    assert memory.buffer == victim.file
    assert done.sources[survivor.url] > 0


@pytest.mark.parametrize("timeout_s", [0.5, 30.0])
def test_the_fetch_goes_on_when_a_source_stops_sending(origins, timeout_s: float) -> None:
    stalled, survivor = origins(2)
    stalled.hang.set()
    memory = Memory()
    # the range ends by the timeout, or an idle stream takes it over earlier
    fetch = fetcher(timeout_s=timeout_s)
    fetch.fetch_state([stalled.url, survivor.url], ref(survivor), memory)
    assert memory.buffer == survivor.file


def test_a_fetch_from_dead_sources_names_every_reason(origins) -> None:
    one, two = origins(2)
    for origin in (one, two):
        origin.on_data = lambda number, origin=origin: threading.Thread(target=origin.kill).start()
        origin.stop_after = 0
    with pytest.raises(
        StateError, match=f"No source could deliver step 5.*{one.url}: .*{two.url}: "
    ) as caught:
        fetcher().fetch_state([one.url, two.url], ref(one), Memory())
    assert "\n" not in str(caught.value)


def test_a_second_fetch_resumes_and_does_not_restart(origins) -> None:
    dying, healthy = origins(2)

    def refuse(number: int) -> None:
        if number > 6:
            dying.status = 503

    dying.on_data = refuse
    memory, fetch = Memory(), fetcher(streams_per_source=1)
    with pytest.raises(StateError, match="503"):
        fetch.fetch_state([dying.url], ref(dying), memory)
    done = fetch.fetch_state([healthy.url], ref(healthy), memory)
    assert memory.buffer == healthy.file
    assert done.sources[healthy.url] < done.nbytes - 8 * BLOCK


def test_a_resumed_fetch_verifies_the_bytes_already_in_memory(origins) -> None:
    dying, healthy = origins(2)
    dying.on_data = lambda number: setattr(dying, "status", 503 if number > 6 else 0)
    memory, fetch = Memory(), fetcher(streams_per_source=1)
    with pytest.raises(StateError):
        fetch.fetch_state([dying.url], ref(dying), memory)
    memory.buffer[:] = bytes(len(memory.buffer))
    fetch.fetch_state([healthy.url], ref(healthy), memory)
    assert memory.buffer == healthy.file


def test_wrong_digest_is_refused_before_memory_is_taken(origins) -> None:
    (origin,) = origins(1)
    memory = Memory()
    with pytest.raises(IntegrityError, match="it holds the digest"):
        fetcher().fetch_state([origin.url], SnapshotRef(1, 5, "0" * 32), memory)
    assert memory.asked == []


def test_digests_of_blocks_that_do_not_make_the_digest_of_the_state_are_noticed_before_a_byte_is_fetched(
    origins,
) -> None:
    liars = origins(2)
    truth = liars[0].file
    fake = bytearray(truth)
    fake[-1] ^= 1
    for liar in liars:
        liar.file = bytes(fake)
        liar.manifest = manifest_of(bytes(fake)) | {"digest": manifest_of(truth)["digest"]}
    wanted = SnapshotRef(1, 5, manifest_of(truth)["digest"])
    memory = Memory()
    with pytest.raises(IntegrityError, match="blocks give the digest"):
        fetcher().fetch_state([liar.url for liar in liars], wanted, memory)
    assert memory.asked == []
    (honest,) = origins(1)
    memory = Memory()
    done = fetcher().fetch_state([liar.url for liar in liars] + [honest.url], wanted, memory)
    assert memory.buffer == truth
    assert [done.sources[liar.url] for liar in liars] == [0, 0]
    for liar in liars:
        assert any(liar.url in warning and "blocks give" in warning for warning in done.warnings)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"nbytes": 1 << 45}, "needs"),
        ({"nbytes": 1 << 60}, "no usable size"),
        ({"nbytes": 0}, "no usable size"),
        ({"nbytes": True}, "no usable size"),
        ({"nbytes": 3.0}, "no usable size"),
        ({"block_bytes": 1}, "no usable block size"),
        ({"block_bytes": 1 << 40}, "no usable block size"),
        ({"blocks": ["0" * 16]}, "lists 1 blocks"),
        ({"blocks": None}, "lists 0 blocks"),
        ({"blocks": ["Z" * 16] * 42}, "not 16 hex digits|lists 42"),
        ({"digest": "xyz"}, "not 32 hex digits"),
        ({"step": 6}, "another step"),
        ({"generation": 2}, "another step or generation"),
        ({"format": 9}, "format '9'"),
    ],
)
def test_an_impossible_manifest_is_refused_before_memory_is_taken(
    origins, change: dict[str, Any], match: str
) -> None:
    (origin,) = origins(1)
    origin.manifest |= change
    memory = Memory()
    with pytest.raises(StateError, match=match):
        fetcher().fetch_state([origin.url], ref(origin), memory)
    assert memory.asked == []
    with pytest.raises(StateError, match=match):
        fetcher().fetch_manifest(origin.url, 5, 1)


def test_a_manifest_that_promises_more_bytes_than_the_server_has(origins) -> None:
    (origin,) = origins(1)
    longer = origin.file + bytes(5 * BLOCK)
    blocks = [xxhash.xxh3_64_hexdigest(longer[i : i + BLOCK]) for i in range(0, len(longer), BLOCK)]
    digest = digest_of_blocks(len(longer), blocks, BLOCK)
    origin.manifest |= {"nbytes": len(longer), "blocks": blocks, "digest": digest}
    with pytest.raises(StateError, match=r"it offers 'bytes \d+-\d+/"):
        fetcher().fetch_state([origin.url], SnapshotRef(1, 5, digest), Memory())


@pytest.mark.parametrize(
    ("headers", "match"),
    [
        ({"Content-Range": "bytes 0-1/99"}, "it offers"),
        ({"Content-Range": "nonsense"}, "it offers"),
        ({"Content-Length": "99999999999"}, "bytes where .* were asked for"),
    ],
)
def test_false_response_headers_are_refused(origins, headers: dict[str, str], match: str) -> None:
    (origin,) = origins(1)
    origin.headers = headers
    with pytest.raises(StateError, match=match):
        fetcher().fetch_state([origin.url], ref(origin), Memory())


def test_a_file_that_was_replaced_after_its_manifest_is_gone_whatever_its_size(origins) -> None:
    (origin,) = origins(1)
    for size in (len(origin.file), len(origin.file) + 99):
        origin.headers = {"ETag": '"0123"', "Content-Range": f"bytes 0-{BLOCK - 1}/{size}"}
        with pytest.raises(Gone, match="another file of this step by now"):
            fetcher().fetch_state([origin.url], ref(origin), Memory())


def test_a_source_that_does_not_speak_http_is_refused(origins) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def babble() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.sendall(b"SSH-2.0-OpenSSH\r\n" + b"\0" * 70_000)
                    connection.close()

        thread = threading.Thread(target=babble)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(StateError, match="No source could deliver"):
            fetcher().fetch_state([url], SnapshotRef(1, 5, "0" * 32), Memory())
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_the_error_quotes_the_refusal_of_the_source(origins) -> None:
    (origin,) = origins(1, token="secret")
    with pytest.raises(StateError, match="it answered 401: The token does not match"):
        fetcher(token="wrong").fetch_state([origin.url], ref(origin), Memory())
    fetcher(token="secret").fetch_state([origin.url], ref(origin), Memory())
    origin.status = 409
    with pytest.raises(Gone, match="The snapshot is not held"):
        fetcher(token="secret").fetch_state([origin.url], ref(origin), Memory())
    for bad in ("ftp://h", "http://", "http://h:99999", "x", "http://u@h"):
        with pytest.raises(ConfigError, match="URL"):
            fetcher().fetch_state([bad], ref(origin), Memory())
    with pytest.raises(StateError, match="no source"):
        fetcher().fetch_state([], ref(origin), Memory())
    for bad_token in ("a\nb", "ü"):
        with pytest.raises(ConfigError, match="token"):
            fetcher(token=bad_token)
    with pytest.raises(StateError, match="too small or not writable"):
        fetcher(token="secret").fetch_state(
            [origins(1, token="secret")[0].url], ref(origin), lambda nbytes: memoryview(bytes(nbytes))
        )


def test_cancel_ends_everything_at_once(origins) -> None:
    two, before = origins(2), set(threading.enumerate())
    arrived = threading.Semaphore(0)
    for origin in two:
        origin.hang.set()
        origin.on_data = lambda number: arrived.release()
    fetch = fetcher(timeout_s=60.0)
    errors: list[Exception] = []

    def work() -> None:
        try:
            fetch.fetch_state([origin.url for origin in two], ref(two[0]), Memory())
        except StateError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in two:  # at least one stream per source
        assert arrived.acquire(timeout=10)
    fetch.cancel()
    thread.join(10)
    assert not thread.is_alive()
    assert "cancelled" in str(errors[0])
    with pytest.raises(StateError, match="cancelled"):
        fetch.fetch_state([two[0].url], ref(two[0]), Memory())
    assert not [t.name for t in set(threading.enumerate()) - before if t.name.startswith("fabric-")]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    both = tmp_path_factory.mktemp("tls") / "both.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(both)]
    done = subprocess.run(
        [openssl, "req", "-x509", *key, "-days", "2", *subject], check=True, capture_output=True, text=True
    )
    both.write_text(both.read_text() + done.stdout)
    return both


def test_tls_with_a_context_and_cancelled(origins, certificate: Path) -> None:
    (origin,) = origins(1)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate)
    origin.server.socket = server_side.wrap_socket(origin.server.socket, server_side=True)
    url = origin.url.replace("http:", "https:")
    context = ssl.create_default_context(cafile=str(certificate))
    memory = Memory()
    fetcher(ssl_context=context).fetch_state([url], ref(origin), memory)
    assert memory.buffer == origin.file
    with pytest.raises(StateError, match="CERTIFICATE_VERIFY_FAILED"):
        fetcher().fetch_state([url], ref(origin), Memory())
    fetch = fetcher(ssl_context=context, timeout_s=60.0)
    origin.hang.set()
    arrived = threading.Semaphore(0)
    origin.on_data = lambda number: arrived.release()
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(fetch.fetch_state, [url], ref(origin), Memory())
        assert arrived.acquire(timeout=10)
        assert arrived.acquire(timeout=10)
        fetch.cancel()
        assert "cancelled" in str(failing.exception(10))


# --- gradients ------------------------------------------------------------------------------------


def with_gradient(origin: Origin, step: int, body: bytes, **headers: str) -> None:
    default = {
        "X-Fabric-Generation": "1",
        "X-Fabric-Step": str(step),
        "X-Fabric-Epoch": "4",
        "X-Fabric-Weight": repr(0.1 + 0.2),
        "X-Fabric-Digest": xxhash.xxh3_128_hexdigest(body),
        "X-Fabric-Layout": "abcd",
        "X-Fabric-Meta": '{"lr": [1, 2]}',
    }
    told = default | {k.replace("_", "-"): v for k, v in headers.items()}
    told = {
        SEAL: seal(lambda name: told.get(name, str(len(body)) if name == "Content-Length" else None))
    } | told
    origin.gradients[step] = (body, {name: value for name, value in told.items() if value})


def test_gradient_arrives_verified_over_one_connection(origins) -> None:
    (origin,) = origins(1)
    fetch, into = fetcher(), bytearray(2000)
    for step in range(3):
        with_gradient(origin, step, bytes([step]) * 1234)
        meta = fetch.fetch_gradient([origin.url], generation=1, step=step, into=memoryview(into))
        assert into[:1234] == bytes([step]) * 1234
        assert (meta.epoch, meta.weight, meta.layout, meta.nbytes) == (4, 0.1 + 0.2, "abcd", 1234)
        assert meta.meta == {"lr": [1, 2]}
    assert len(origin.connections) == 1
    for connection in origin.connections:  # the server has closed this connection: dial again
        connection.shutdown(socket.SHUT_RDWR)
    assert fetch.fetch_gradient([origin.url], generation=1, step=2, into=memoryview(into)).step == 2
    fetch.close()


def test_gradient_from_the_next_source_when_one_fails(origins) -> None:
    liar, dead, honest = origins(3)
    with_gradient(liar, 7, b"y" * 50, X_Fabric_Digest="0" * 32)
    with_gradient(honest, 7, b"z" * 50)
    dead.kill()
    into = bytearray(50)
    urls = [liar.url, dead.url, honest.url]
    fetch = fetcher()
    assert fetch.fetch_gradient(urls, generation=1, step=7, into=memoryview(into)).source == honest.url
    assert into == b"z" * 50
    fetch.close()


def test_a_gradient_that_is_gone_or_late_or_wrong_is_reported_as_such(origins) -> None:
    one, two = origins(2)
    fetch, into = fetcher(), memoryview(bytearray(100))
    for origin in (one, two):
        with_gradient(origin, 9, b"x")
    urls = [one.url, two.url]
    with pytest.raises(Gone, match="Not held"):
        fetch.fetch_gradient(urls, generation=1, step=3, into=into)
    with pytest.raises(StateError, match=r"was not published within 0\.05 s"):
        fetch.fetch_gradient(urls, generation=1, step=30, into=into, wait_s=0.05)
    del two.gradients[9]
    with pytest.raises(StateError, match="not published") as caught:
        fetch.fetch_gradient(urls, generation=1, step=3, into=into)
    assert not isinstance(caught.value, Gone)
    for headers, match in (
        ({"X_Fabric_Generation": "2"}, "another generation"),
        ({"X_Fabric_Step": "3"}, "another step"),
        ({"X_Fabric_Seal": "0" * 32}, "not what it sealed"),
        ({"X_Fabric_Seal": ""}, "not what it sealed"),
        ({"X_Fabric_Weight": "nan"}, "incomplete"),
        ({"X_Fabric_Weight": "-1"}, "incomplete"),
        ({"X_Fabric_Epoch": "x"}, "incomplete"),
        ({"X_Fabric_Digest": "x"}, "incomplete"),
        ({"X_Fabric_Meta": "[1]"}, "incomplete"),
        ({"X_Fabric_Meta": "{"}, "cannot be read"),
        ({"X_Fabric_Layout": "l" * 999}, "too long"),
        ({"Content_Length": "101"}, "has 101 bytes where 100 fit"),
    ):
        with_gradient(one, 11, b"x" * 9, **headers)
        with pytest.raises(StateError, match=match):
            fetch.fetch_gradient([one.url], generation=1, step=11, into=into)
    with pytest.raises(StateError, match="writable"):
        fetch.fetch_gradient(urls, generation=1, step=3, into=memoryview(b"x"))
    fetch.close()


def test_gradient_published_while_waiting(origins) -> None:
    (origin,) = origins(1)
    first = threading.Event()
    answered = origin.gradient

    def publish_after_first(request: Any) -> None:
        answered(request)
        if not first.is_set():
            first.set()
            with_gradient(origin, 4, b"q" * 8)

    origin.gradient = publish_after_first
    into = bytearray(8)
    fetch = fetcher()
    assert (
        fetch.fetch_gradient([origin.url], generation=1, step=4, into=memoryview(into), wait_s=20).nbytes == 8
    )
    assert into == b"q" * 8
    fetch.close()


# --- the queue of ranges, in virtual time ---------------------------------------------------------


def test_no_more_streams_than_processors_and_one_per_source_at_least() -> None:
    assert [streams_per_source(2, sources, 2) for sources in (1, 2, 3)] == [2, 1, 1]
    assert [streams_per_source(2, sources, 8) for sources in (1, 4, 5, 9)] == [2, 2, 1, 1]
    assert streams_per_source(1, 1, 8) == 1


@pytest.mark.parametrize(
    ("blocks", "streams", "counts"), [(5, 2, [3, 2]), (5, 3, [2, 2, 1]), (9, 3, [3, 3, 3])]
)
def test_a_small_state_is_one_range_per_stream(blocks: int, streams: int, counts: list[int]) -> None:
    queue = RangeQueue([False] * blocks, 16, streams, {"a"}, lambda: 0.0)
    claims = [queue.take("a", lambda: None) for _ in counts]
    assert [claim.block_range.count for claim in claims if claim is not None] == counts


def test_ranges_are_reclaimed_from_the_slow_and_kept_from_the_failed() -> None:
    now = [0.0]
    queue = RangeQueue([False] * 4, 2, 1, {"slow", "fast"}, lambda: now[0])
    ended = threading.Event()
    slow = queue.take("slow", ended.set)
    fast = queue.take("fast", lambda: None)
    assert (list(slow.block_range.blocks), list(fast.block_range.blocks)) == ([0, 1], [2, 3])
    now[0] += 0.1
    queue.finished(2)
    queue.finished(3)
    queue.release(fast, failed=False)
    found: list[Any] = []
    idle = threading.Thread(target=lambda: found.append(queue.take("fast", lambda: None)))
    idle.start()
    queue.finished(0)
    now[0] += 100.0
    assert ended.wait(10)
    assert slow.reclaimed
    queue.release(slow, failed=True)
    idle.join(10)
    assert list(found[0].block_range.blocks) == [1]  # block 0 was verified and is not fetched again
    queue.finished(1)
    assert queue.complete
    assert queue.take("slow", lambda: None) is None


@pytest.mark.parametrize("seed", range(100))
def test_every_block_is_finished_whatever_fails(seed: int) -> None:
    chance = random.Random(seed)
    fetched = [chance.random() < 0.3 for _ in range(chance.randint(1, 20))]
    queue = RangeQueue(fetched, chance.randint(1, 6), chance.randint(1, 4), {"a", "b"}, lambda: 0.0)
    while not queue.complete:
        with queue._changed:
            found = queue._pick(source := chance.choice("ab"))
        if found is None:
            continue
        assert not any(fetched[block] for block in found.blocks)
        good = chance.randint(0, found.count)
        for block in found.blocks[:good]:
            fetched[block] = True
            queue.finished(block)
        queue.release(RangeClaim(found, source, 0.0, lambda: None), failed=good < found.count)
    assert all(fetched)
