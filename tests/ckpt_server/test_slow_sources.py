"""Sources that are silent, slow or hard to reach delay a fetch only for a bounded time."""

import contextlib
import json
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from ckpt_server.test_fetch import BLOCK, Memory, Origin, fetcher, origins, ref, with_gradient  # noqa: F401

from fabric.ckpt_server import reading
from fabric.ckpt_server.fetch import fetcher as fetcher_module
from fabric.ckpt_server.fetch import http_source, multi_source
from fabric.ckpt_server.fetch.http_source import HttpAccess, HttpAddress, HttpConnection
from fabric.ckpt_server.fetch.multi_source import RangeQueue
from fabric.ckpt_server.format.manifest import BlockDigests, digest_of_blocks, make_manifest
from fabric.client import restore_values
from fabric.errors import StateError, Unreachable
from fabric.integrations.torchft import HTTPTransport
from fabric.model import SnapshotRef
from fabric.runtime.http.token_file import TokenFile

FOREVER_S = 600.0


@pytest.fixture
def hurried(monkeypatch):
    """Shorten the time for a source while other sources exist, so that the test is short."""
    monkeypatch.setattr(fetcher_module, "_TURN_S", 0.05)
    monkeypatch.setattr(fetcher_module, "_LATE_S", 0.05)
    return fetcher(timeout_s=FOREVER_S)


def nothing(origin: Origin, request) -> None:
    """Send no byte, not even a status line."""
    origin.go.wait(60)


def a_byte_at_a_time(origin: Origin, request) -> None:
    head = b"HTTP/1.1 200 OK\r\nX-Fabric-Step: 4\r\nX-Padding: " + b"a" * 60000
    for at in range(len(head)):
        request.wfile.write(head[at : at + 1])
        if origin.go.wait(0.005):
            return


def only_continue(origin: Origin, request) -> None:
    while not origin.go.wait(0.001):
        request.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def a_trickling_body(origin: Origin, request) -> None:
    body, headers = origin.gradients[4]
    request.send_response(200)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        request.send_header(name, value)
    request.end_headers()
    for at in range(len(body)):
        request.wfile.write(body[at : at + 1])
        if origin.go.wait(0.005):
            return


@pytest.mark.parametrize("slowly", [nothing, a_byte_at_a_time, only_continue, a_trickling_body])
def test_a_gradient_comes_from_the_next_source_and_the_slow_one_is_asked_last(origins, hurried, slowly):  # noqa: F811
    slow, good = origins(2)
    body = b"z" * 5000
    for origin in (slow, good):
        for step in (4, 5):
            with_gradient(origin, step, body)
    slow.gradient = lambda request: slowly(slow, request)
    into = memoryview(bytearray(len(body)))
    urls = [slow.url, good.url]
    for step in (4, 5):
        found = hurried.fetch_gradient(urls, generation=1, step=step, into=into, wait_s=FOREVER_S)
        assert found.source == good.url and into == body
    assert [len(slow.asked), len(good.asked)] == [1, 2]
    # If no other source has the gradient, the fetcher still asks the slow source.
    del good.gradients[4]
    slow.gradient = lambda request: Origin.gradient(slow, request)
    assert hurried.fetch_gradient(urls, generation=1, step=4, into=into).source == slow.url
    hurried.close()


def test_a_source_that_does_not_have_it_yet_is_not_slow(origins, hurried, monkeypatch):  # noqa: F811
    monkeypatch.setattr(fetcher_module, "_LATE_S", FOREVER_S)
    first, second = origins(2)
    for origin in (first, second):
        with_gradient(origin, 9, b"x")
    asked = []

    def publish_later(request) -> None:
        asked.append(request.path)
        if len(asked) == 3:
            with_gradient(first, 4, b"y" * 8)
        Origin.gradient(first, request)

    first.gradient = publish_later
    del first.gradients[9]
    del second.gradients[9]
    into = memoryview(bytearray(8))
    found = hurried.fetch_gradient([first.url, second.url], generation=1, step=4, into=into, wait_s=FOREVER_S)
    assert found.source == first.url and not hurried._late
    hurried.close()


def test_a_manifest_that_trickles_is_given_up(origins):  # noqa: F811
    (only,) = origins(1)
    answered = only.answer

    def trickle(request) -> None:
        if "/manifest" in request.path:
            only_continue(only, request)
        else:
            answered(request)

    only.answer = trickle
    with pytest.raises(StateError, match="it stopped sending"):
        fetcher(timeout_s=0.1).fetch_state([only.url], ref(only), Memory())


def test_data_that_trickle_are_given_up_where_no_other_source_has_them(origins, monkeypatch):  # noqa: F811
    monkeypatch.setattr(multi_source, "LEAST_BYTES_PER_S", 1e6)
    (only,) = origins(1)

    def trickle(request) -> None:
        request.send_response(206)
        begin, last = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
        request.send_header("Content-Length", str(last + 1 - begin))
        request.send_header("Content-Range", f"bytes {begin}-{last}/{len(only.file)}")
        request.end_headers()
        for at in range(begin, last + 1):
            request.wfile.write(only.file[at : at + 1])
            if only.go.wait(0.05):
                return

    only.data = trickle
    with pytest.raises(StateError, match="No source could deliver step 5"):
        fetcher(timeout_s=0.3).fetch_state([only.url], ref(only), Memory())


def test_a_range_that_makes_no_progress_is_given_up_and_one_that_does_is_not():
    now, ended = [0.0], []
    queue = RangeQueue([False] * 4, 2, 2, {"a", "b"}, lambda: now[0])
    queue.take("a", lambda: ended.append("a"))
    queue.take("b", lambda: ended.append("b"))
    for step in range(1, 3):
        now[0] += 20.0
        queue.finished(step - 1)
        queue.end_stuck(30.0)
    assert ended == ["b"]


@pytest.fixture
def full_door():
    """A listener with a full queue: a client's dial waits in the kernel without an answer."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        fill(stack, listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def fill(stack: contextlib.ExitStack, where: tuple[str, int]) -> None:
    while True:
        caller = stack.enter_context(socket.socket())
        caller.settimeout(0.2)
        try:
            caller.connect(where)
        except TimeoutError:
            return


@pytest.mark.parametrize("when", ["while it dials", "before"])
def test_a_stream_that_is_to_give_up_does_so_while_it_is_still_dialled(full_door, monkeypatch, when):
    monkeypatch.setattr(http_source, "CONNECT_S", FOREVER_S)
    connection = HttpConnection(HttpAddress.parse(full_door), HttpAccess(TokenFile.of(""), FOREVER_S, None))
    raised = []

    def get() -> None:
        try:
            connection.get("/")
        except OSError as error:
            raised.append(error)

    if when == "before":
        connection.abort()
    stream = threading.Thread(target=get, daemon=True)
    stream.start()
    while when != "before" and connection._dialled is None and stream.is_alive():
        pass
    connection.abort()
    stream.join(timeout=30)
    assert raised and not stream.is_alive()
    connection.close()


def test_a_dead_first_address_of_a_name_does_not_delay_a_fetch(origins, full_door, monkeypatch):  # noqa: F811
    """A replica that came back waited 5 s for each connection, and never caught up with the others."""
    (only,) = origins(1)
    real, dead = socket.getaddrinfo, ("127.0.0.1", urlsplit(full_door).port)
    addresses = [dead, only.server.server_address]

    def look_up(host, *arguments, flags=0, **options):
        if host != "two-addresses" or flags & socket.AI_NUMERICHOST:
            return real(host, *arguments, flags=flags, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]

    monkeypatch.setattr(http_source, "CONNECT_S", FOREVER_S)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    memory = Memory()
    given = ["http://two-addresses:1"], ref(only), memory
    fetch = threading.Thread(target=fetcher(timeout_s=FOREVER_S).fetch_state, args=given, daemon=True)
    fetch.start()
    fetch.join(timeout=30)
    assert not fetch.is_alive() and memory.buffer == only.file


def test_a_state_comes_from_the_source_that_can_be_reached(origins, monkeypatch):  # noqa: F811
    """When the fetch begins, one of two servers with the state can no longer be dialled."""
    monkeypatch.setattr(http_source, "CONNECT_S", FOREVER_S)
    far, near = origins(2)
    memory, stack = Memory(), contextlib.ExitStack()

    def allocate(nbytes: int) -> memoryview:
        far.server.shutdown()
        fill(stack, far.server.server_address)
        for connection in list(far.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        return memory(nbytes)

    with stack:
        done = fetcher(timeout_s=FOREVER_S).fetch_state([far.url, near.url], ref(near), allocate)
    assert memory.buffer == near.file and set(done.sources) == {far.url, near.url}
    assert done.sources[near.url] == len(near.file)


def test_a_manifest_that_is_mostly_empty_lists_is_refused_before_it_is_parsed(origins, monkeypatch):  # noqa: F811
    (only,) = origins(1)
    only.manifest = {**only.manifest, "more": [[]] * 10_000}
    parsed = []
    monkeypatch.setattr(http_source.json, "loads", parsed.append)
    with pytest.raises(StateError, match="made of too many lists and objects"):
        fetcher().fetch_state([only.url], ref(only), Memory())
    assert not parsed


class Trickler(BaseHTTPRequestHandler):
    """A checkpoint server that sends one byte of an endless body at a time, at ``slow`` or below it."""

    slow = ""

    def do_GET(self) -> None:
        self.send_response(206 if "/data" in self.path else 200)
        manifest = json.dumps(self.server.manifest).encode()
        is_slow = self.slow in self.path
        body = b"[" * 10_000_000 if is_slow else manifest
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not is_slow:
            self.wfile.write(body)
            return
        with suppress(OSError):
            while True:
                self.wfile.write(b" ")
                if self.server.go.wait(0.01):
                    return

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(params=["/manifest", "/data"])
def trickler(request):
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Slow", (Trickler,), {"slow": request.param}))
    server.go = threading.Event()
    digests = BlockDigests()
    digests.update(memoryview(b"x" * 1000))
    digest = digest_of_blocks(1000, digests.blocks())
    snapshot = SnapshotRef(1, 5, digest)
    server.manifest = make_manifest(snapshot, 1000, digests.blocks(), job="j", replica="r0", created=1.0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.go.set()
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_a_state_that_trickles_is_given_up_by_everything_that_reads_one(trickler, monkeypatch):
    """A source of a byte a second held restore_values, and pull, inspect and diff, for ever."""
    monkeypatch.setattr(http_source, "LEAST_BYTES_PER_S", 1e9)
    monkeypatch.setattr(reading, "_TIMEOUT_S", 0.2)
    with pytest.raises(Unreachable):
        restore_values(trickler)
    with pytest.raises(Unreachable):
        HTTPTransport().recv_checkpoint(0, trickler, 5, timedelta(seconds=60))


def test_a_received_checkpoint_takes_no_longer_than_its_timeout(trickler):
    with pytest.raises(Unreachable):
        HTTPTransport().recv_checkpoint(0, trickler, 5, timedelta(seconds=0.2))
