"""One byte of a transfer is flipped, at a thousand places, headers included: no wrong byte is accepted.

Each case fetches a state or a gradient from a real server through a proxy that changes one byte of one
direction. The fetch must fail with a sentence, or give the same bytes and description as without the flip. A
flip in a body must always be noticed; a flip in a header may hit a field that no reader uses, such as the
date.
"""

import contextlib
import random
import re
import selectors
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from server_support import manifest_of, publish, snapshot_file

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.fetch import multi_source
from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.ckpt_server.format.manifest import bytes_digest
from fabric.ckpt_server.wire.gradient_index import PublishedGradient
from fabric.errors import FabricError
from fabric.model import SnapshotRef

STEP = 7000
FILE = snapshot_file(3000)
GRADIENT = random.Random(2).randbytes(2000)
UP, DOWN = 0, 1
FLIPS = {"state": 480, "compressed state": 240, "gradient": 280}
WORKERS = 4
PATIENCE_S = 0.4  # a flipped length makes the reader wait for bytes that never come


class FlippingProxy:
    """Forwards bytes to ``target`` for one fetch, and changes byte ``offset`` of direction ``way``.

    Each fetch has its own proxy, so that late bytes of an earlier fetch do not count.
    """

    def __init__(self, target: tuple[str, int], way: int = UP, offset: int = -1, mask: int = 0) -> None:
        self.record: tuple[bytearray, bytearray] = bytearray(), bytearray()
        self.flipped = False
        self._target = target
        self._place = (way, offset, mask)
        self._selector = selectors.DefaultSelector()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._wake, self._woken = socket.socketpair()
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "FlippingProxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        pairs: dict[socket.socket, tuple[socket.socket, int]] = {}
        while True:
            for key, _ in self._selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._woken:
                    for one in (*pairs, self._server, self._woken):
                        one.close()
                    self._selector.close()
                    return
                if sock is self._server:
                    near, _ = self._server.accept()
                    far = socket.create_connection(self._target)
                    pairs |= {near: (far, UP), far: (near, DOWN)}
                    for one in (near, far):
                        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        self._selector.register(one, selectors.EVENT_READ)
                elif sock in pairs and not self._pump(sock, *pairs[sock]):
                    other, _ = pairs.pop(sock)
                    pairs.pop(other)
                    for one in (sock, other):
                        self._selector.unregister(one)
                        one.close()

    def _pump(self, source: socket.socket, sink: socket.socket, way: int) -> bool:
        """Forward one piece; return whether the connection goes on."""
        with contextlib.suppress(OSError):
            data = bytearray(source.recv(1 << 16))
            seen, (armed, offset, mask) = self.record[way], self._place
            at = offset - len(seen)
            seen += data
            if way == armed and 0 <= at < len(data) and not self.flipped:
                data[at] ^= mask
                self.flipped = True
            sink.sendall(data)
            return bool(data)
        return False


@dataclass(frozen=True)
class Outcome:
    """The result of a fetch: bytes and their description, or an error."""

    data: bytes = b""
    told: object = None
    error: str = ""
    warned: bool = False


def fetch_state(fetcher: StateFetcher, url: str) -> Outcome:
    target = bytearray(len(FILE))
    state = SnapshotRef(1, STEP, manifest_of(FILE, STEP)["digest"])

    def allocate(nbytes: int) -> memoryview:
        assert nbytes == len(FILE), "memory was taken for a size that nobody promised"
        return memoryview(target)

    try:
        fetched = fetcher.fetch_state([url], state, allocate)
    except FabricError as error:
        return Outcome(error=str(error))
    return Outcome(bytes(target), fetched.manifest, warned=bool(fetched.warnings))


def fetch_gradient(fetcher: StateFetcher, url: str) -> Outcome:
    into = bytearray(len(GRADIENT) + 10)
    try:
        meta = fetcher.fetch_gradient([url], generation=1, step=STEP, into=memoryview(into))
    except FabricError as error:
        return Outcome(error=str(error))
    finally:
        fetcher.close()
    told = {name: getattr(meta, name) for name in meta.__slots__ if name != "source"}
    return Outcome(bytes(into[: meta.nbytes]), told)


FETCH = {"state": fetch_state, "compressed state": fetch_state, "gradient": fetch_gradient}


def fetcher(patience_s: float) -> StateFetcher:
    return StateFetcher("a-token", streams_per_source=1, timeout_s=patience_s)


def in_headers(stream: bytes) -> list[bool]:
    """Return for every byte of one direction whether it belongs to an HTTP head or a chunk's frame."""
    found: list[bool] = []
    while stream:
        head, _, stream = stream.partition(b"\r\n\r\n")
        found += [True] * (len(head) + 4)
        length = re.search(rb"\r\ncontent-length: (\d+)", head.lower())
        if length is not None:
            found += [False] * int(length[1])
            stream = stream[int(length[1]) :]
        while b"\r\ntransfer-encoding: chunked" in head.lower():
            size, _, stream = stream.partition(b"\r\n")
            nbytes = int(size, 16)
            found += [True] * (len(size) + 2) + [False] * nbytes + [True] * 2
            stream = stream[nbytes + 2 :]
            if not nbytes:
                break
    return found


@pytest.fixture(scope="module")
def target(served: ServerHandle) -> tuple[str, int]:
    """The address of the checkpoint server that has the fetched content."""
    publish(served, 1, FILE, STEP)
    served.begin("gradient", 1)
    served.allocate("gradient", 1, len(GRADIENT))[:] = GRADIENT
    digest = bytes_digest(memoryview(GRADIENT))
    gradient = PublishedGradient(1, STEP, 3, len(GRADIENT), digest, 24.0, "233e24dcf2bb7284")
    meta = {"contributions": {"r0": [0, 1], "r1": [2, 3]}, "metrics": {"loss": 382.25}}
    served.publish_gradient(1, gradient, meta)
    host, port = served.url.removeprefix("http://").split(":")
    return host, int(port)


@pytest.mark.parametrize("kind", FLIPS)
def test_no_flipped_byte_in_transit_is_accepted(target, kind, monkeypatch):
    if kind == "compressed state":  # compress from the first range on
        for name in ("_FIRST_PLAIN", "_MIN_BYTES", "GAIN"):
            monkeypatch.setattr(multi_source, name, 0)
        monkeypatch.setattr(multi_source, "FAST_BYTES_S", 1e15)
    with FlippingProxy(target) as proxy:
        clean = FETCH[kind](fetcher(30.0), proxy.url)
    assert clean.told and not clean.error and not clean.warned
    heads = [in_headers(bytes(stream)) for stream in proxy.record]
    lengths = [len(head) for head in heads]
    assert lengths == [len(stream) for stream in proxy.record] and False in heads[DOWN]

    def flip_one(chance: random.Random) -> str:
        at = chance.randrange(sum(lengths))
        way, offset = (UP, at) if at < lengths[UP] else (DOWN, at - lengths[UP])
        mask = 1 << chance.randrange(8)
        with FlippingProxy(target, way, offset, mask) as proxy:
            outcome = FETCH[kind](fetcher(PATIENCE_S), proxy.url)
        where = (kind, ("up", "down")[way], offset, mask)
        if outcome.error:
            assert outcome.data == b"", where
            # an unflipped body means that the host was slower than PATIENCE_S
            return "refused" if proxy.flipped else ""
        assert proxy.flipped, where
        assert outcome.data == clean.data, where
        assert outcome.told == clean.told, where
        if outcome.warned or len(proxy.record[UP]) > lengths[UP]:
            return "fetched again"
        # Some bits of a zstd frame have no meaning.
        assert heads[way][offset] or kind == "compressed state", f"{where}: a flip in a body went unnoticed"
        return "without effect"

    def run(worker: int) -> Counter[str]:
        found: Counter[str] = Counter()
        chance = random.Random(f"flips of {kind} by {worker}")
        while found.total() < FLIPS[kind] // WORKERS:
            what = flip_one(chance)
            if what:
                found[what] += 1
        return found

    with ThreadPoolExecutor(WORKERS) as pool:
        counted = sum(pool.map(run, range(WORKERS)), Counter())
    print(f"{kind}: {dict(counted)}")
    assert counted.total() == FLIPS[kind]
    assert counted["without effect"] < FLIPS[kind] / 4, "most of what travels matters to somebody"
