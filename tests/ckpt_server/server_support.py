"""Helpers of the checkpoint server's tests: files to publish, a trainer process, waiting for a condition."""

import contextlib
import itertools
import json
import os
import random
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if str(TESTS := Path(__file__).resolve().parents[1]) not in sys.path:  # where a script imports this
    sys.path.insert(0, str(TESTS))

from forked_processes import ADDRESS, ForkedProcess, address

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.format.manifest import BLOCK_BYTES, block_digest, file_digest, make_manifest
from fabric.ckpt_server.format.safetensors_file import build_preamble
from fabric.ckpt_server.server.local_ranks import LocalRank, LocalRanks
from fabric.ckpt_server.wire.gradient_index import PublishedGradient
from fabric.ckpt_server.wire.server_settings import ServerSettings
from fabric.model import SnapshotRef

ROOT = TESTS.parent
TOKEN = "a-token-for-tests"
META = {"loss": 1.5}
DEADLINE_S = 30.0


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Poll until ``condition`` is true and return its value; fail at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.005)
    return value


def snapshot_file(nbytes: int, seed: int = 0) -> bytes:
    """A snapshot file with about ``nbytes`` of random data in two tensors."""
    first = nbytes // 3
    sizes = (first, nbytes - first)
    preamble = build_preamble([(n, "U8", (s,), s) for n, s in zip("ab", sizes, strict=True)], "{}")
    return preamble + random.Random(seed).randbytes(nbytes)


def manifest_of(file: bytes, step: int, generation: int = 1, job: str = "job") -> dict[str, Any]:
    view = memoryview(file)
    blocks = [block_digest(view[i : i + BLOCK_BYTES]) for i in range(0, len(file), BLOCK_BYTES)]
    state = SnapshotRef(generation, step, file_digest(view))
    return make_manifest(state, len(file), blocks, job=job, replica="r0", created=1.5e9)


def publish(handle: ServerHandle, slot: int, file: bytes, step: int, generation: int = 1) -> None:
    """Publish ``file`` as a trainer does."""
    handle.begin("snapshot", slot)
    handle.allocate("snapshot", slot, len(file))[:] = file
    handle.publish_snapshot(slot, manifest_of(file, step, generation))


def publish_gradient(
    handle: ServerHandle, slot: int, data: bytes, step: int, generation: int = 1, **others: Any
) -> None:
    handle.begin("gradient", slot)
    handle.allocate("gradient", slot, max(len(data), 1))[: len(data)] = data
    then_begin, meta = others.pop("then_begin", -1), others.pop("meta", META)
    gradient = description(step, len(data), generation=generation, **others)
    handle.publish_gradient(slot, gradient, meta, then_begin=then_begin)


def description(step: int, nbytes: int, **others: Any) -> PublishedGradient:
    """A gradient as a trainer describes it; ``others`` replace its fields."""
    fields = {"generation": 1, "epoch": 7, "weight": 48.0, "layout": "feed", "digest": f"{step:032x}"}
    return PublishedGradient(step=step, nbytes=nbytes, **{**fields, **others})


def held_ranks(folder: Path, *numbers: int) -> LocalRanks:
    """The ranks of a server in this process, which no task keeps; rank 0 where none is named."""
    settings = ServerSettings(job="job", replica="r0", run_dir=folder)
    ranks = LocalRanks(settings, "http://x:1")
    for number in numbers or (0,):
        ranks.held[number] = LocalRank(settings, number, ranks.url, ranks.changed)
    return ranks


def start_server(run_dir: Path, incarnation: int = 1, **options: Any) -> ServerHandle:
    """Attach to the server in ``run_dir``, or start one; ``options`` are those of its ``ServerSettings``."""
    values = {"job": "job", "replica": "r0", "orphan_s": 60.0, **options}
    return ServerHandle(ServerSettings(run_dir=run_dir, **values), incarnation)


class Answer:
    """One HTTP answer, read to its end."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        body = self.json
        assert isinstance(body["error"], str) and "Traceback" not in body["error"]
        return body["error"]


def connect(url: str) -> HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    return HTTPConnection(parts.hostname, parts.port, timeout=DEADLINE_S)


def fetch(url: str, path: str, method: str = "GET", **headers: str) -> Answer:
    """Send one request; names of header arguments have underscores for dashes."""
    connection = connect(url)
    with contextlib.closing(connection):
        path = urlsplit(url).path + path
        connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read())


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not count as running."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@contextmanager
def no_more_descriptors(left: int = 0, pid: int = 0) -> Iterator[int]:
    """Let process ``pid`` (0: this process) open only ``left`` more files; yield the lowest free
    descriptor.
    """
    taken = {int(name) for name in os.listdir(f"/proc/{pid or 'self'}/fd")}  # noqa: PTH208 - names, not paths
    lowest = next(number for number in itertools.count() if number not in taken)
    if not pid:
        os.close(lowest := os.dup(0))  # listing the descriptors took one descriptor
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest + left, before[1]))
    try:
        yield lowest
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def end(pid: int) -> None:
    """Kill one process that a test started; wait until all its threads have ended, and it holds no file."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: select.select([process], [], [], 0)[0], f"the end of {pid}")
    os.close(process)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


_TRAINER = """
import json, os, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
import forked_processes
from fabric.errors import FabricError
from server_support import start_server, publish, publish_gradient, snapshot_file

def say(**body):
    print(json.dumps(body), flush=True)

forked_processes.fork_checkpoint_servers(os.environ[forked_processes.ADDRESS])
found = json.loads(sys.argv[1])
for name in found.keys() & {"run_dir", "token_file"}:
    found[name] = Path(found[name])
found["lighthouse"] = tuple(found.get("lighthouse", ()))
try:
    handle = start_server(**found)
except FabricError as error:
    say(refused=type(error).__name__, error=str(error))
    sys.exit(3)
say(url=handle.url, pid=handle.pid, snapshots=[s.step for s in handle.snapshots])
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "publish":
        publish(handle, request["slot"], snapshot_file(request["nbytes"], request["step"]), request["step"])
    elif request["do"] == "gradient":
        publish_gradient(handle, request["slot"], bytes(request["nbytes"]), request["step"])
    elif request["do"] == "begin":
        handle.begin("snapshot", request["slot"])
    elif request["do"] == "close":
        handle.close()
    say(done=request["do"])
"""


class TrainerProcess:
    """A real trainer process, forked, that obeys orders from a pipe."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        options = {"run_dir": run_dir, **options}
        arguments = {k: str(v) if isinstance(v, Path) else v for k, v in options.items()}
        folders = [str(x) for x in (ROOT, ROOT / "tests", Path(__file__).parent)]
        (given_orders, orders), (answers, given_answers) = os.pipe(), os.pipe()
        self._orders, self._answers = os.fdopen(orders, "w"), os.fdopen(answers)
        self._process = ForkedProcess(
            address(),
            ["-c", _TRAINER, json.dumps(arguments), *folders],
            {0: given_orders, 1: given_answers, 2: 2},
            {**os.environ, ADDRESS: address()},
            str(Path.cwd()),
        )
        os.close(given_orders)
        os.close(given_answers)
        self.pid = self._process.pid
        self.hello = self._hear()

    def _hear(self) -> dict[str, Any]:
        line = self._answers.readline()
        assert line, f"the trainer ended with {self._process.wait()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def do(self, name: str, **request: Any) -> None:
        self._orders.write(json.dumps({"do": name, **request}) + "\n")
        self._orders.flush()
        assert self._hear() == {"done": name}

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._orders, self._answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextmanager
def trainer_process(run_dir: Path, **options: Any) -> Iterator[TrainerProcess]:
    trainer = TrainerProcess(run_dir, **options)
    try:
        yield trainer
    finally:
        trainer.end()
