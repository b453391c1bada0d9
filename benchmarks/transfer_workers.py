"""The processes of ``transfer.py``: holders of a state and takers, told what to do line by line.

Started as ``python transfer_workers.py ROLE ARGUMENTS``; a request is a JSON list on standard input, an
answer a JSON value on standard output. The state lies in one memfd that every holder maps: it is paid for
once.
"""

import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import xxhash

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BLOCK = 4 << 20
STEP, GENERATION = 1, 1
_ASK = struct.Struct("<QQ")
_TORCHFT_TIMEOUT = timedelta(seconds=120)
# With this environment a process gives no memory back to the kernel, so torchft receives into present pages.
KEEP_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 46), "MALLOC_ARENA_MAX": "1"}


class TransferWorker:
    """One of those processes, seen from outside."""

    def __init__(self, role: str, arguments: list[object], fds: list[int], **environment: str) -> None:
        self._role = role
        self._process = subprocess.Popen(
            [sys.executable, __file__, role, json.dumps(arguments)],
            pass_fds=fds,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.hello = self._hear()

    def ask(self, *request: object) -> Any:
        """Send a request to the worker; return its answer. End the benchmark if the worker failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self._role} ended early: see its error above")
        return json.loads(line)

    @property
    def processor_s(self) -> float:
        """Processor time of the whole process so far, threads that have ended included."""
        return time.clock_gettime((~self.pid << 3) | 2)  # the processor clock of the other process

    @property
    def rss_anon(self) -> int:
        """Bytes of private memory that are resident now."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.kill()
        self._process.wait()


class Stopwatch:
    """Measures the time of the clock and the processor time of this process."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._began[0], time.process_time() - self._began[1]


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def obey(actions: dict[str, Callable[..., object]]) -> None:
    """Answer requests until standard input ends."""
    for line in sys.stdin:
        action, *arguments = json.loads(line)
        say(actions[action](*arguments))


def mapped(fd: int, nbytes: int) -> memoryview:
    """Shared memory, every page of it present in this process."""
    return memoryview(mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE))


def tensors_of(file: memoryview) -> dict[str, Any]:
    """Every tensor of a snapshot file, in place."""
    from fabric.ckpt_server.format.safetensors_file import read_preamble
    from fabric.ckpt_server.state.training_state import tensors_of as open_tensors

    return open_tensors(file, read_preamble(file).tensors)


def source(fd: int, run_dir: str) -> None:
    """Run a real checkpoint server whose slots are memory that existed before."""
    import uvloop

    from fabric.ckpt_server.server import slots
    from fabric.ckpt_server.server.process import run
    from fabric.ckpt_server.wire.server_settings import ServerSettings

    class SharedMemfd(slots.Memfd):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            os.dup2(fd, self.fd)

    slots.Memfd = SharedMemfd  # type: ignore[misc]
    settings = ServerSettings(job="job", replica="r0", run_dir=Path(run_dir), orphan_s=3600.0)
    uvloop.run(run(settings, ready_fd=os.dup(sys.stdout.fileno())))


def sender(fd: int, nbytes: int) -> None:
    """The other end of raw TCP: each connection asks for a range and gets it, again and again."""
    view = mapped(fd, nbytes)
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while ask := connection.recv(_ASK.size, socket.MSG_WAITALL):
            begin, end = _ASK.unpack(ask)
            connection.sendall(view[begin:end])

    say(listening.getsockname()[1])
    while True:
        threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()


class Receiver:
    """Takes a state into memory of its own that is present before the first byte comes."""

    def __init__(self, nbytes: int, manifest: str, tensors: int, streams: int) -> None:
        from fabric.ckpt_server.fetch.fetcher import StateFetcher

        self._manifest = json.loads(Path(manifest).read_text())
        self._tensors = tensors
        fd = os.memfd_create("transfer-destination")
        os.posix_fallocate(fd, 0, nbytes)
        self._target = mapped(fd, nbytes)
        self._fetcher = StateFetcher()
        self._raw: list[socket.socket] = []
        self._streams = streams
        self._pool = ThreadPoolExecutor(streams)

    def ours(self, urls: list[str], same_host: bool) -> tuple[float, float]:
        """Seconds until every tensor is there, verified, and processor seconds of this process; over TCP, or
        out of the server's memory."""
        from fabric.model import SnapshotRef

        self._spoil()
        self._fetcher.same_host = same_host
        state = SnapshotRef(GENERATION, STEP, self._manifest["digest"])
        watch = Stopwatch()
        fetched = self._fetcher.fetch_state(urls, state, lambda nbytes: self._target[:nbytes])
        tensors = tensors_of(self._target)
        spent = watch.read()
        assert not fetched.warnings, fetched.warnings
        assert len(tensors) == self._tensors
        self._check()
        return spent

    def raw(self, port: int, verify: bool) -> tuple[float, float]:
        """The same over two connections that are open, each for one half of the blocks."""
        while len(self._raw) < self._streams:
            self._raw.append(socket.create_connection(("127.0.0.1", port)))
            self._raw[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._spoil()
        blocks = len(self._manifest["blocks"])
        cuts = [blocks * i // self._streams for i in range(self._streams + 1)]
        watch = Stopwatch()
        parts = zip(self._raw, cuts, cuts[1:], strict=False)
        for future in [self._pool.submit(self._stream, s, a, b, verify) for s, a, b in parts]:
            future.result()
        spent = watch.read()
        self._check()
        return spent

    def _stream(self, connection: socket.socket, first: int, last: int, verify: bool) -> None:
        nbytes = len(self._target)
        connection.sendall(_ASK.pack(first * BLOCK, min(last * BLOCK, nbytes)))
        for block in range(first, last):
            part = self._target[block * BLOCK : min((block + 1) * BLOCK, nbytes)]
            filled = 0
            while filled < len(part):
                filled += connection.recv_into(part[filled:])
            if verify and xxhash.xxh3_64_hexdigest(part) != self._manifest["blocks"][block]:
                raise AssertionError(f"block {block} is wrong")

    def _spoil(self) -> None:
        """Damage every block, so that a correct block later must have arrived since."""
        for begin in range(0, len(self._target), BLOCK):
            self._target[begin] ^= 0xFF

    def _check(self) -> None:
        for block, digest in enumerate(self._manifest["blocks"]):
            part = self._target[block * BLOCK : (block + 1) * BLOCK]
            assert xxhash.xxh3_64_hexdigest(part) == digest, f"block {block} is wrong"


def receiver(nbytes: int, manifest: str, tensors: int, streams: int) -> None:
    """Takes the state by our client or over raw TCP."""
    import torch

    torch.set_num_threads(1)
    taking = Receiver(nbytes, manifest, tensors, streams)
    say("ready")
    obey({"ours": taking.ours, "raw": taking.raw})


def _transport(num_chunks: int) -> Any:
    from torchft.checkpointing.http_transport import HTTPTransport

    return HTTPTransport(timeout=_TORCHFT_TIMEOUT, num_chunks=num_chunks)


def torchft_sender(fd: int, nbytes: int, settings: list[int]) -> None:
    """torchft's transport with the same tensors, one server per number of chunks."""
    import torch

    torch.set_num_threads(1)
    # the default writes a line per request to standard error
    BaseHTTPRequestHandler.log_message = lambda *_: None  # type: ignore[method-assign]
    state = tensors_of(mapped(fd, nbytes))
    addresses = {}
    for num_chunks in settings:
        transport = _transport(num_chunks)
        transport.send_checkpoint([1], STEP, state, _TORCHFT_TIMEOUT)
        host = transport.metadata().split("//")[1].split(":")[0]
        addresses[num_chunks] = transport.metadata().replace(host, "localhost", 1)
    say(addresses)
    obey({})


def torchft_receiver(settings: list[int], tensors: int, nbytes: int) -> None:
    """Takes the state by torchft's transport."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transports = {num_chunks: _transport(num_chunks) for num_chunks in settings}

    def take(num_chunks: int, metadata: str) -> tuple[float, float]:
        watch = Stopwatch()
        state = transports[num_chunks].recv_checkpoint(0, metadata, STEP, _TORCHFT_TIMEOUT)
        spent = watch.read()
        assert len(state) == tensors and sum(x.nbytes for x in state.values()) == nbytes
        return spent

    say("ready")
    obey({"take": take})


ROLES: dict[str, Callable[..., None]] = {
    "source": source,
    "sender": sender,
    "receiver": receiver,
    "torchft_sender": torchft_sender,
    "torchft_receiver": torchft_receiver,
}


if __name__ == "__main__":
    ROLES[sys.argv[1]](*json.loads(sys.argv[2]))
