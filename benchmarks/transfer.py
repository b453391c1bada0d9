"""A state over the network: our fetching client against raw TCP and against torchft's HTTPTransport.

    python benchmarks/transfer.py

The state is a snapshot file of mixed tensors (matrices of 8 and 16 MB in float32 and bfloat16, biases of 4
KB, scalars), all on loopback. A measure is the time until every tensor is usable in the receiver's memory.

- one, three: our client with its default settings from one checkpoint server and from three: manifest,
  starting the streams, verification of every block, and opening every tensor are in the time. Like the raw
  ones its connections are open, for a fetcher keeps them, and the rounds before the first one counted dial;
- same_host: our client from one server on its own host, as it does there: out of that server's memory,
  verified as well. TCP has no part in it, so it counts in no ratio (GB/s under a key of its own);
- raw: two TCP connections that are open, ``recv_into`` straight to the place, every 4 MiB block digested;
- bare: the same without digests;
- readers: eight readers at one server that has eight ranks, over eight servers of one rank each (bytes/s);
- torchft: its HTTPTransport as it comes, in one piece and into memory that it allocates;
- torchft_chunks: with the number of chunks that was the fastest in a try, otherwise as it comes;
- torchft_best: the same with an allocator that keeps what it freed, so that its memory too is present
  (pre-faulted), as it is for all other sides. It has no such setting: this is a change of its process.

The result of torchft counts as usable: nothing is copied into live tensors. A ratio is the other side's time
over ours, and of one source and three the worse counts. Every figure is printed with the processor time of
all processes of that side, which on a busy machine says more than the clock. Blocks are made wrong before
every round and checked after it, outside of the time. The three checkpoint servers have one memory between
them. Memory is the peak of private memory
(RssAnon) above that of the idle process: shared memory, the state's and the destination's, is printed apart.
"""

import argparse
import contextlib
import importlib.util
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import common
import numpy as np
from transfer_workers import BLOCK, GENERATION, KEEP_HEAP, STEP, TransferWorker

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.format.manifest import block_digest, file_digest, make_manifest
from fabric.ckpt_server.format.safetensors_file import (
    ELEMENT_BYTES,
    TensorEntry,
    build_preamble,
    canonical_json,
    file_order,
)
from fabric.ckpt_server.wire.server_settings import ServerSettings
from fabric.model import SnapshotRef

SIZES = {"256MB": 256 << 20, "1GB": 1 << 30, "4GB": 4 << 30}
ROUNDS = {"256MB": 9, "1GB": 9, "4GB": 3}
WARM_UP = {"256MB": 2, "1GB": 2, "4GB": 1}
PEER_SIZES = ("1GB", "4GB")
SMALL_TENSORS, SMALL_ROUNDS = 5000, 21
STREAMS = 2  # of raw TCP
CHUNKS = (0, 2, 4, 8)  # numbers of torchft's chunks; torchft's manager uses 0
TRIES = 1
OURS = ("one", "three")
NEEDED = {"readers": 0.95, "vs_raw_tcp": 0.9, "vs_bare_tcp": 0.8, "vs_torchft": 3.0, "vs_torchft_best": 2.0}
PEER_OF = {
    "vs_raw_tcp": "raw",
    "vs_bare_tcp": "bare",
    "vs_torchft": "torchft",
    "vs_torchft_chunks": "torchft_chunks",
    "vs_torchft_best": "torchft_best",
}
SMALL_S, EXTRA_MB = 0.030, 64.0
READERS, READ_SIZE, READ_ROUNDS = 8, "64MB", 15
# The memory that a run needs besides the state and its destination.
SPARE_BYTES = 2 << 30

Spent = tuple[float, float]  # seconds of the clock, and processor seconds of the receiver


def mixed(nbytes: int) -> list[TensorEntry]:
    """The tensors of a model with optimizer state, ``nbytes`` in all."""
    layer = [
        ("F32", (2048, 2048)),
        ("F32", (2048, 1024)),
        ("BF16", (4096, 1024)),
        ("BF16", (2048, 4096)),
        ("F32", (1024,)),
        ("BF16", (2048,)),
        ("I64", (1,)),
    ]
    entries: list[TensorEntry] = []
    left = nbytes
    while left:
        for dtype, shape in layer:
            size = ELEMENT_BYTES[dtype] * int(np.prod(shape))
            name = f"layer{len(entries):05d}.weight"
            whole = TensorEntry(name, dtype, shape, size)
            entries.append(whole if size <= left else TensorEntry(name, "U8", (left,), left))
            left -= entries[-1].nbytes
            if not left:
                break
    return sorted(entries, key=lambda entry: file_order(entry[0], entry[1]))


def small(count: int) -> list[TensorEntry]:
    """``count`` tensors of 4 KB."""
    return [TensorEntry(f"layer{i:05d}.weight", "F32", (1024,), 4096) for i in range(count)]


class StateFile:
    """A snapshot file in a memfd, and its manifest in a file."""

    def __init__(self, entries: list[TensorEntry], folder: str) -> None:
        preamble = build_preamble(entries, canonical_json({"format": 1, "step": STEP, "state": {}}))
        self.tensors, self.data_bytes = len(entries), sum(entry.nbytes for entry in entries)
        self.nbytes = len(preamble) + self.data_bytes
        self.fd = os.memfd_create("transfer-state")
        os.posix_fallocate(self.fd, 0, self.nbytes)
        with mmap.mmap(self.fd, self.nbytes) as memory, memoryview(memory) as view:
            self._fill(view, preamble)
            blocks = [block_digest(view[i : i + BLOCK]) for i in range(0, self.nbytes, BLOCK)]
            ref = SnapshotRef(GENERATION, STEP, file_digest(view))
            manifest = make_manifest(ref, self.nbytes, blocks, job="job", replica="r0", created=1.5e9)
        self.folder = Path(folder)
        self.manifest = str(self.folder / f"manifest-{self.nbytes}.json")
        Path(self.manifest).write_text(json.dumps(manifest))

    @staticmethod
    def _fill(view: memoryview, preamble: bytes) -> None:
        """Fill the memory with random bytes, every block differently."""
        noise = np.random.default_rng(7).integers(0, 2**64, BLOCK // 8, np.uint64)
        for number, begin in enumerate(range(0, len(view), BLOCK)):
            part = view[begin : begin + BLOCK]
            part[:] = (
                (noise ^ np.uint64(number * 0x9E3779B97F4A7C15 % 2**64)).view(np.uint8).data[: len(part)]
            )
            part.release()
        view[: len(preamble)] = preamble

    def close(self) -> None:
        os.close(self.fd)


@dataclass
class Measures:
    """By side, per round: seconds, and processor seconds of all processes that took part."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, list[float]] = field(default_factory=dict)
    chunks: tuple[int, int] = (0, 0)
    client_rss: int = 0
    server_rss: int = 0

    def ratio(self, peer: str, ours: str) -> float:
        return common.paired(self.seconds[peer], self.seconds[ours])

    def worse(self, peer: str) -> float:
        return min(self.ratio(peer, ours) for ours in OURS)


class TransferFleet:
    """All processes that hold or take one state; ``peer``: whether torchft is among them."""

    def __init__(self, state: StateFile, peer: bool) -> None:
        self._stack = contextlib.ExitStack()
        self._state = state
        self.sources = [self._source(state, number) for number in range(3)]
        self.receiver = self._start("receiver", [state.nbytes, state.manifest, state.tensors, STREAMS], [])
        self._sender = self._start("sender", [state.fd, state.nbytes], [state.fd])
        self._chunks = (0, 0)
        # the sender, a plain receiver, and a receiver that keeps its memory
        self._torchft: list[TransferWorker] = []
        if peer:
            self._torchft.append(self._start("torchft_sender", [state.fd, state.nbytes, CHUNKS], [state.fd]))
            for environment in ({}, KEEP_HEAP):
                what = [CHUNKS, state.tensors, state.data_bytes]
                self._torchft.append(self._start("torchft_receiver", what, [], **environment))

    def _source(self, state: StateFile, number: int) -> TransferWorker:
        """Start a checkpoint server, and publish the state to it as a trainer does."""
        run_dir = state.folder / f"source{state.nbytes}.{number}"
        worker = self._start("source", [state.fd, str(run_dir)], [state.fd])
        handle = ServerHandle(ServerSettings("job", "r0", run_dir), 1)
        self._stack.callback(handle.close)
        handle.begin("snapshot", 0)
        handle.allocate("snapshot", 0, state.nbytes)
        handle.publish_snapshot(0, json.loads(Path(state.manifest).read_text()))
        return worker

    def _start(
        self, role: str, arguments: list[object], fds: list[int], **environment: str
    ) -> TransferWorker:
        worker = TransferWorker(role, arguments, fds, **environment)
        self._stack.callback(worker.close)
        return worker

    def ours(self, count: int, same_host: bool = False) -> Spent:
        return self.receiver.ask("ours", [source.hello["url"] for source in self.sources[:count]], same_host)

    def take(self, receiving: TransferWorker, num_chunks: int) -> Spent:
        """One transfer by torchft."""
        return receiving.ask("take", num_chunks, self._torchft[0].hello[str(num_chunks)])

    def best_chunks(self) -> tuple[int, int]:
        """The numbers of chunks that torchft is fastest with, as it comes and with memory that it kept."""
        best = []
        for receiving in self._torchft[1:]:
            times = {}
            for num_chunks in CHUNKS:
                self.take(receiving, num_chunks)
                times[num_chunks] = min(self.take(receiving, num_chunks)[0] for _ in range(TRIES))
            best.append(min(times, key=lambda n: times[n]))
        self._chunks = best[0], best[1]
        return self._chunks

    def sides(self) -> dict[str, tuple[Callable[[], Spent], list[TransferWorker]]]:
        """One measure, and the sending processes; a receiver reports its own time."""
        raw = [self._sender]
        sides: dict[str, tuple[Callable[[], Spent], list[TransferWorker]]] = {
            "one": (lambda: self.ours(1), self.sources[:1]),
            "three": (lambda: self.ours(3), self.sources),
            "same_host": (lambda: self.ours(1, same_host=True), self.sources[:1]),
            "raw": (lambda: self.receiver.ask("raw", self._sender.hello, True), raw),
            "bare": (lambda: self.receiver.ask("raw", self._sender.hello, False), raw),
        }
        if self._torchft:
            sending, fresh, keeping = self._torchft
            sides["torchft"] = (lambda: self.take(fresh, 0), [sending])
            sides["torchft_chunks"] = (lambda: self.take(fresh, self._chunks[0]), [sending])
            sides["torchft_best"] = (lambda: self.take(keeping, self._chunks[1]), [sending])
        return sides

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def peaks(workers: list[TransferWorker]) -> Iterator[dict[int, int]]:
    """By process: the largest private memory seen while the block lasts."""
    highest = {worker.pid: worker.rss_anon for worker in workers}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            for worker in workers:
                highest[worker.pid] = max(highest[worker.pid], worker.rss_anon)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield highest
    finally:
        over.set()
        watcher.join()


def measure(size: str, folder: str, rounds: int, peer: bool) -> Measures:
    found = Measures()
    state = StateFile(mixed(nbytes_of(size)), folder)
    with contextlib.closing(state), contextlib.closing(TransferFleet(state, peer)) as fleet:
        workers = [fleet.receiver, *fleet.sources]
        idle = {worker.pid: worker.rss_anon for worker in workers}
        # outside the timed rounds, because watching the memory would disturb them
        with peaks(workers) as highest:
            for count in (1, 3):
                fleet.ours(count)
        extra = {pid: highest[pid] - idle[pid] for pid in idle}
        found.client_rss = extra.pop(fleet.receiver.pid)
        found.server_rss = max(extra.values())
        if peer:
            found.chunks = fleet.best_chunks()
        sides = fleet.sides()
        found.processor = {side: [] for side in sides}

        def run(side: str) -> float:
            do, giving = sides[side]
            before = sum(worker.processor_s for worker in giving)
            seconds, processor = do()
            given = sum(worker.processor_s for worker in giving) - before
            found.processor[side].append(given + processor)
            return seconds

        timed = {side: (lambda side=side: run(side)) for side in sides}
        found.seconds = common.interleave(timed, rounds, WARM_UP.get(size, 1))
        found.processor = {side: values[-rounds:] for side, values in found.processor.items()}
    return found


def measure_small(folder: str) -> dict[str, list[float]]:
    """Seconds for 5,000 tensors of 4 KB, by number of sources."""
    state = StateFile(small(SMALL_TENSORS), folder)
    with contextlib.closing(state), contextlib.closing(TransferFleet(state, False)) as fleet:
        sides = {"one": lambda: fleet.ours(1)[0], "three": lambda: fleet.ours(3)[0]}
        return common.interleave(sides, SMALL_ROUNDS)


def measure_readers(folder: str) -> dict[str, list[float]]:
    """Seconds until the last of READERS readers, each of a rank of its own, has its state."""
    state = StateFile(mixed(nbytes_of(READ_SIZE)), folder)
    with contextlib.closing(state), contextlib.ExitStack() as stack:

        def start(role: str, arguments: list[object], fds: list[int]) -> TransferWorker:
            return stack.enter_context(contextlib.closing(TransferWorker(role, arguments, fds)))

        def publish(run_dir: Path, rank: int) -> str:
            handle = ServerHandle(ServerSettings("job", "r0", run_dir, rank=rank), 1)
            stack.callback(handle.close)
            handle.begin("snapshot", 0)
            handle.allocate("snapshot", 0, state.nbytes)
            handle.publish_snapshot(0, json.loads(Path(state.manifest).read_text()))
            return handle.url

        folders = [state.folder / f"reading{number}" for number in range(READERS + 1)]
        for run_dir in folders:
            start("source", [state.fd, str(run_dir)], [state.fd])
        urls = {
            "one server": [publish(folders[0], rank) for rank in range(READERS)],
            "eight servers": [publish(run_dir, 0) for run_dir in folders[1:]],
        }
        what = [state.nbytes, state.manifest, state.tensors, STREAMS]
        readers = [start("receiver", what, []) for _ in range(READERS)]
        pool = stack.enter_context(ThreadPoolExecutor(READERS))

        def read(side: str) -> float:
            pairs = zip(readers, urls[side], strict=True)
            return max(pool.map(lambda pair: pair[0].ask("ours", [pair[1]], False)[0], pairs))

        return common.interleave({side: partial(read, side) for side in urls}, READ_ROUNDS)


def nbytes_of(size: str) -> int:
    """Return the bytes of a size in words, such as 16MB."""
    return SIZES.get(size) or int(size.removesuffix("MB")) * common.MB


def has_room(size: str, peer: bool) -> bool:
    """Whether the state, its destination and torchft's fit into what memory is left."""
    needed = nbytes_of(size) * (4 if peer else 2) + SPARE_BYTES
    available = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    if available >= needed:
        return True
    common.say(
        f"\n{size} is left out: it needs {needed / 2**30:.0f} GiB and {available / 2**30:.1f} are free"
    )
    return False


def report(found: dict[str, Measures]) -> dict[str, dict[str, float]]:
    rows = []
    for size, measures in found.items():
        for side, seconds in measures.seconds.items():
            chunks = dict(zip(("torchft_chunks", "torchft_best"), measures.chunks, strict=True)).get(side)
            name = side if chunks is None else f"{side} ({chunks})"
            gb_per_s = nbytes_of(size) / statistics.median(seconds) / 1e9
            processor = statistics.median(measures.processor[side]) / nbytes_of(size) * 1e9
            cells = [common.describe(seconds), f"{gb_per_s:.2f}", f"{processor:.2f}", len(seconds)]
            rows.append([f"{size} {name}", *cells])
    columns = ["state, side", "time: median (lowest-highest)", "GB/s", "processor s/GB", "rounds"]
    common.table("Until every tensor is usable", columns, rows)
    ratios: dict[str, dict[str, float]] = {}
    rows = []
    for key, peer in PEER_OF.items():
        for size, measures in found.items():
            if peer in measures.seconds:
                ratios.setdefault(key, {})[size] = measures.worse(peer)
                both = [f"{measures.ratio(peer, ours):.2f}" for ours in OURS]
                spent = [
                    f"{common.paired(measures.processor[peer], measures.processor[o]):.2f}" for o in OURS
                ]
                rows.append([f"{key} {size}", *both, *spent])
    columns = ["times as fast", *OURS, *(f"{side}: processor" for side in OURS)]
    common.table("The other side's time over ours, median of paired ratios", columns, rows)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description="state transfer against raw TCP and torchft")
    parser.add_argument("--sizes", default=",".join(SIZES), help="for a quick look")
    parser.add_argument("--rounds", type=int, default=0, help="for a quick look; 0: as many as needed")
    arguments = parser.parse_args()
    common.need("torch", "every side")
    common.begin()
    peer = importlib.util.find_spec("torchft") is not None
    if not peer:
        common.say(
            "torchft is not installed: no figures of it (pip install torchft, in an environment of its own)"
        )
    began = time.monotonic()
    found: dict[str, Measures] = {}
    with tempfile.TemporaryDirectory(prefix="transfer-") as folder:
        small_tensors = measure_small(folder)
        readers = measure_readers(folder)
        for size in arguments.sizes.split(","):
            wanted = peer and size in PEER_SIZES
            if has_room(size, wanted):
                found[size] = measure(size, folder, arguments.rounds or ROUNDS.get(size, 1), wanted)
                common.say(f"{size} measured after {time.monotonic() - began:.0f} s")
    ratios = report(found)
    rows = [[side, common.describe(seconds)] for side, seconds in small_tensors.items()]
    common.table(f"{SMALL_TENSORS:,} tensors of 4 KB, {SMALL_ROUNDS} rounds", ["sources", "time"], rows)
    rows = [[side, common.describe(seconds)] for side, seconds in readers.items()]
    common.table(f"{READERS} readers of {READ_SIZE} each, {READ_ROUNDS} rounds", ["sources", "time"], rows)
    rows = [
        [size, f"{m.client_rss / 2**20:.1f}", f"{m.server_rss / 2**20:.1f}", f"{nbytes_of(size) / 2**20:.0f}"]
        for size, m in found.items()
    ]
    columns = ["private MB above idle", "client", "server", "shared: the state, and again its destination"]
    common.table("Memory", columns, rows)
    ratios["readers"] = {READ_SIZE: common.paired(readers["eight servers"], readers["one server"])}
    judge(ratios, small_tensors, found)


def judge(
    ratios: dict[str, dict[str, float]], small_tensors: dict[str, list[float]], found: dict[str, Measures]
) -> None:
    small_s = max(statistics.median(seconds) for seconds in small_tensors.values())
    client = max((m.client_rss for m in found.values()), default=0) / 2**20
    server = max((m.server_rss for m in found.values()), default=0) / 2**20
    common.say("")
    for key, by_size in ratios.items():
        for size, value in by_size.items():
            if key in NEEDED:
                common.verdict(f"{key} {size}", value, at_least=NEEDED[key])
    common.verdict("small_tensors_s", small_s, at_most=SMALL_S)
    common.verdict("client_extra_rss_mb", client, at_most=EXTRA_MB)
    common.verdict("server_extra_rss_mb", server, at_most=EXTRA_MB)
    others = {
        "small_tensors_s": round(small_s, 5),
        "client_extra_rss_mb": client,
        "server_extra_rss_mb": server,
        "same_host": {
            size: round(nbytes_of(size) / statistics.median(m.seconds["same_host"]) / 1e9, 2)
            for size, m in found.items()
        },
    }
    common.finish({**ratios, **others})


if __name__ == "__main__":
    main()
