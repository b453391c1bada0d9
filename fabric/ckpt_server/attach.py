"""The trainer's handle on its checkpoint server: find or start the server, share memory, publish.

All calls block, under one lock, with a time limit each; any thread may make them. When the channel is closed,
every call raises ServerLost until ``ensure`` has attached again: to the same server if it lives, else to a
new server. A server must answer the requests of rounds and snapshots within a second. While a stopped or
hanging server owes an answer, every other call raises ServerLost at once. After the answer, calls work again.
"""

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import asdict, replace

from fabric.ckpt_server.wire import gradient_index
from fabric.ckpt_server.wire.channel_protocol import (
    LOCK_NAME,
    LOG_NAME,
    SOCKET_NAME,
    START_LOCK_NAME,
    DurableJob,
    RequestChannel,
    close_all,
)
from fabric.ckpt_server.wire.gradient_index import GradientIndex, PublishedGradient
from fabric.ckpt_server.wire.server_settings import ServerSettings
from fabric.errors import ConfigError, ProtocolError, Refused, ServerLost
from fabric.model import Int64, JobEnd, SnapshotRef, Value
from fabric.protocol.messages.wire import decode_as
from fabric.runtime.private_folder import make_private, open_private, socket_path
from fabric.runtime.process_environment import (
    LAUNCH_MARK,
    outliving_environment,
    process_environment,
    start_helper,
)

# Starts a checkpoint server from its trainer, in a session of its own, so that it outlives the trainer.
#
# The new process reports over a pipe when trainers can attach, or why it cannot serve. Its output goes to a
# log in the run folder. All ranks of a replica on this host use one server, and may want to start it at the
# same time. A lock lets one of them start it, and the other ones attach to it.


_MAX_REPORT_BYTES = 64 * 1024
_LOG_TAIL_BYTES = 2000

# The servers that this process started; ``reap`` waits for the dead ones, so that none stays a zombie.
_started: dict[int, "subprocess.Popen[bytes]"] = {}


def is_served(run_dir: Path) -> bool:
    """Whether a process holds the lock of ``run_dir``: a server that starts, serves or ends."""
    try:
        with os.fdopen(open_private(run_dir / LOCK_NAME, os.O_RDONLY), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def start(settings: ServerSettings, deadline: float) -> bool:
    """Start a server and wait until it serves, or until monotonic ``deadline``.

    Returns False where another process starts one, or has started one. Raises ConfigError, Refused (with the
    new server's sentence) or ServerLost (the new server died, or took too long).
    """
    make_private(settings.run_dir)
    with os.fdopen(open_private(settings.run_dir / START_LOCK_NAME, os.O_RDWR | os.O_CREAT), "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return not is_served(settings.run_dir) and _start(settings, deadline)


def _start(settings: ServerSettings, deadline: float) -> bool:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        try:
            with os.fdopen(open_private(settings.run_dir / LOG_NAME, flags), "ab") as output:
                process = start_helper(
                    "fabric.ckpt_server",
                    *settings.arguments(),
                    f"--ready-fd={writer}",
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(writer,),
                    # The server outlives its trainer and its launcher. The server's environment lacks the
                    # launcher's mark, because a launcher ends all processes with its mark.
                    env=outliving_environment(),
                )
        finally:
            os.close(writer)
        _started[process.pid] = process
        report = _read_report(pipe.fileno(), deadline)
    if report is None:
        process.kill()
        process.wait()
        raise ServerLost(
            f"the checkpoint server of {settings.replica} did not start in time{_tail(settings.run_dir)}"
        )
    return _judge(report, process, settings)


def reap() -> None:
    """Wait for our servers that have died, so that none is left a zombie."""
    for pid, process in tuple(_started.items()):
        if process.poll() is not None:
            _started.pop(pid, None)


def _read_report(pipe: int, deadline: float) -> bytes | None:
    """Return the new process's report, up to the end of its line or of the pipe; None at the deadline."""
    report = b""
    while not report.endswith(b"\n") and len(report) < _MAX_REPORT_BYTES:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
            return None
        data = os.read(pipe, _MAX_REPORT_BYTES)
        if not data:
            break
        report += data
    return report


def _judge(report: bytes, process: "subprocess.Popen[bytes]", settings: ServerSettings) -> bool:
    body: object = None
    with contextlib.suppress(ValueError):
        body = json.loads(report)
    if isinstance(body, dict) and body.get("ok") is True:
        return True
    process.wait()
    _started.pop(process.pid, None)
    if isinstance(body, dict) and body.get("busy") is True:
        return False
    if isinstance(body, dict) and isinstance(body.get("error"), str):
        raise Refused(f"the checkpoint server of {settings.replica} cannot serve: {body['error']}")
    raise ServerLost(
        f"the checkpoint server of {settings.replica} ended as it started, exit code {process.returncode}"
        f"{_tail(settings.run_dir)}"
    )


def _tail(run_dir: Path) -> str:
    path = run_dir / LOG_NAME
    try:
        with os.fdopen(open_private(path, os.O_RDONLY), "rb") as log:
            log.seek(max(os.fstat(log.fileno()).st_size - _LOG_TAIL_BYTES, 0))
            lines = log.read().decode(errors="replace").strip().splitlines()
    except (OSError, ConfigError):
        lines = []
    return f": its log {path} ends with: {lines[-1]}" if lines else f": see its log {path}"


ATTACH_S = 20.0
_ANSWER_S = 30.0
# The longest time that a round or a snapshot waits for the server, which answers within a millisecond.
_PROMPT_S = 1.0
_PUBLISH_S = 5.0  # for requests on which no round waits, such as publishing a large snapshot
# Even on the slowest machines the kernel clears more bytes of shared memory per second than this.
_CLEAR_BYTES_PER_S = 100e6
_LOOK_AGAIN_S = 0.02
_FAULT_BYTES = 64 * 1024 * 1024
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None)
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class _AttachReply(Value):
    """The server's answer to attach."""

    url: str
    pid: Int64
    instance: str
    snapshots: tuple[SnapshotRef, ...] = ()
    slots: tuple[Int64, ...] = ()
    parts: tuple[Int64, ...] = ()
    sizes: tuple[Int64, ...] = ()
    rank: Int64 = 0


class ServerHandle:
    """One trainer's attachment to the server in the folder of ``settings``; starts one where there is none.

    Raises Refused (another trainer is attached, the server cannot serve), ConfigError (the folder cannot be
    used), ServerLost (nothing within ATTACH_S).

    Other processes read at ``url``; ``pid`` is the server's process. ``snapshots``: the snapshots that the
    server held when this trainer attached, oldest first; ``slots``: the slot of each; ``parts``: the number
    of ranks of each; ``sizes``: the bytes of each.
    """

    url: str
    pid: int
    snapshots: tuple[SnapshotRef, ...]
    slots: tuple[int, ...]
    parts: tuple[int, ...]
    sizes: tuple[int, ...]

    def __init__(self, settings: ServerSettings, incarnation: int) -> None:
        self._settings = replace(settings, run_dir=settings.run_dir.absolute())
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._attaching = False
        self._maps: dict[tuple[str, int], memoryview] = {}
        self._descriptors: dict[tuple[str, int], int] = {}
        self._gradient_index: GradientIndex | None = None
        self._line, welcome = self._attach(time.monotonic() + ATTACH_S)
        self._adopt_reply(welcome)

    def allocate(self, kind: str, slot: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of writable memory shared with the server, with every page allocated.

        ``kind`` is ``snapshot`` or ``gradient``. A slot keeps its memory while it is large enough; the memory
        grows in place. Raises Refused where the host has not that much memory.
        """
        with self._lock:
            mapped = self._maps.get((kind, slot))
            if mapped is None or len(mapped) < nbytes:
                self._demand_answer()
                body = {"op": "allocate", "kind": kind, "slot": slot, "nbytes": nbytes}
                timeout_s = _ANSWER_S + max(nbytes, 0) / _CLEAR_BYTES_PER_S
                answer, descriptors = self._line.ask(body, timeout_s)
                try:
                    mapped = self._maps[kind, slot] = _map(descriptors, answer.get("nbytes"), nbytes)
                    close_all([self._descriptors.pop((kind, slot), -1)])
                    self._descriptors[kind, slot] = descriptors.pop()
                finally:
                    close_all(descriptors)
            return mapped[:nbytes]

    def holds(self, kind: str, slot: int, nbytes: int) -> bool:
        """Whether ``allocate`` would return at once. Sends no request, and waits for no other thread."""
        mapped = self._maps.get((kind, slot))
        return mapped is not None and len(mapped) >= nbytes

    def allocate_gradient_index(self) -> None:
        """Allocate the memory of the gradient index, once. Raises as ``allocate`` does."""
        if self._gradient_index is None:
            self._gradient_index = GradientIndex(
                self.allocate(gradient_index.KIND, 0, gradient_index.TOTAL_BYTES)
            )

    def descriptor(self, kind: str, slot: int) -> int:
        """Return the memfd of allocated memory, sealed against shrinking; the handle keeps owning it."""
        with self._lock:
            return self._descriptors[kind, slot]

    def begin(self, kind: str, slot: int, *, unless_read: bool = False) -> bool:
        """Withdraw the slot, so that it may be written; after the return no reader uses it.

        With ``unless_read``: while a reader uses the slot, withdraw nothing and return False.
        """
        if kind == "gradient" and self._gradient_index is not None:
            self._gradient_index.withdraw(slot)
        body = {"op": "begin", "kind": kind, "slot": slot, "unless_read": unless_read}
        answer = self._ask(body, _PROMPT_S)
        return answer.get("busy") is not True

    def publish_snapshot(self, slot: int, manifest: Mapping[str, object]) -> None:
        """Serve the slot's bytes as the snapshot of ``manifest``. Raises Refused where the two do not
        match."""
        self._ask({"op": "publish_snapshot", "slot": slot, "manifest": dict(manifest)}, _PUBLISH_S)

    def publish_gradient(
        self, slot: int, gradient: PublishedGradient, meta: Mapping[str, object], *, then_begin: int = -1
    ) -> None:
        """Serve the slot's first bytes as ``gradient``, with ``meta`` in a header for readers.

        ``then_begin``: the gradient slot to begin in the same request, as ``begin`` does (negative: none).
        """
        self._ask(
            {
                "op": "publish_gradient",
                "slot": slot,
                **asdict(gradient),
                "meta": dict(meta),
                "then_begin": then_begin,
            },
            _PROMPT_S,
        )

    def publish_via_shm(self, slot: int, gradient: PublishedGradient, meta: Mapping[str, object]) -> bool:
        """Publish as ``publish_gradient`` does, by an entry in shared memory that wakes no process.

        Returns False where the entry does not fit or the index has no memory. Raises ServerLost where the
        server is gone. One thread at a time.
        """
        if self._gradient_index is None:
            return False
        # While another thread waits for the server's answer, input on the channel is that answer. That thread
        # notices a lost server, too.
        if self._lock.acquire(blocking=False):
            try:
                self._line.settle()
                if not self._line.is_open:
                    raise ServerLost("the checkpoint server is gone: attach again, or see its log")
            finally:
                self._lock.release()
        try:
            text = _JSON.encode({**asdict(gradient), "meta": meta})
        except ValueError:  # a number is not finite: ``publish_gradient`` raises the error about this number
            return False
        return self._gradient_index.write(slot, text.encode())

    def withdraw_via_shm(self, slot: int) -> bool:
        """Take the slot's entry back; return whether the slot may be written now, without ``begin``."""
        return self._gradient_index is not None and self._gradient_index.withdraw(slot)

    def persist(self, job: DurableJob) -> None:
        """Ask the server to write its snapshot of ``job.step`` to durable storage; do not wait for it.

        Raises Refused where the server does not hold the step.
        """
        self._ask({**asdict(job), "op": "persist"}, _PUBLISH_S)

    def durable_outcome(self) -> dict[str, Any]:
        """Return whether a writer runs, the newest checkpoint, and why the last one was not written."""
        return self._ask({"op": "durable"})

    def void(self) -> None:
        """Withdraw everything that was published: the state behind it is declared invalid."""
        self._ask({"op": "void"})

    def finish(self, linger_s: float = 5.0, ended: JobEnd | None = None) -> None:
        """End the server ``linger_s`` from now, because the job is done.

        ``ended``: the end of the job; the server reports it to the next lighthouse it reaches, then ends.
        """
        word = None if ended is None else to_builtins(ended)
        self._ask({"op": "finish", "linger_s": linger_s, "ended": word}, _PUBLISH_S)

    def gone(self) -> None:
        """Let the server report this process as dead now, before it ends, because it has left the job."""
        self._ask({"op": "gone"}, _PROMPT_S)

    def close(self) -> None:
        """Detach. The server keeps running and serving. Memory that is still used stays mapped."""
        with self._lock:
            self._line.close()
            self._let_maps_go()
            reap()

    def ensure(self) -> bool:
        """Attach again if the channel is closed, starting a new server if the old one is dead.

        Returns True when the server is a new process: it has no published content, and every slot must be
        allocated again. Does nothing for a server that hangs. Raises as the constructor does.
        """
        with self._lock:
            self._line.settle()
            if self._line.is_open:
                return False
            self._line.close()
            reap()
            before = self._instance
            self._attaching = True
            try:
                self._line, welcome = self._attach(time.monotonic() + ATTACH_S)
            finally:
                self._attaching = False
            self._adopt_reply(welcome)
            if self._instance == before:
                return False
            self._let_maps_go()
            self._gradient_index = None
            return True

    @property
    def hangs(self) -> bool:
        """Whether the server owes an answer. It may answer at any time, so published memory stays in use."""
        return self._line.hangs

    def _ask(self, body: Mapping[str, object], timeout_s: float = _ANSWER_S) -> dict[str, Any]:
        if self._attaching:
            raise ServerLost(f"the checkpoint server of {self._settings.replica} is being started again")
        with self._lock:
            answer, descriptors = self._line.ask(body, timeout_s)
            close_all(descriptors)
            return answer

    def _demand_answer(self) -> None:
        """Raise ServerLost where the server does not answer promptly: the request after this may take
        long."""
        with contextlib.suppress(Refused):  # a server of an older version answers by a refusal
            self._line.ask({"op": "ping"}, _PUBLISH_S)

    def _let_maps_go(self) -> None:
        self._maps.clear()
        close_all(list(self._descriptors.values()))
        self._descriptors.clear()

    def _adopt_reply(self, welcome: _AttachReply) -> None:
        self.url, self.pid, self.snapshots = welcome.url, welcome.pid, welcome.snapshots
        self.slots, self._instance = welcome.slots, welcome.instance
        self.parts, self.sizes = welcome.parts, welcome.sizes

    def held_by(self, ranks: int) -> tuple[SnapshotRef, ...]:
        """Return the snapshots in ``snapshots`` that a replica of ``ranks`` ranks has taken."""
        if not self.parts:  # a server of an older version, which sends no parts
            return self.snapshots
        return tuple(r for r, n in zip(self.snapshots, self.parts, strict=True) if n == ranks)

    def _attach(self, deadline: float) -> tuple[RequestChannel, _AttachReply]:
        """Connect and introduce ourselves, starting a server where there is none."""
        while True:
            try:
                return self._connect(deadline)
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError, ServerLost) as error:
                # The connect call blocked: the server's queue of connections to accept is full.
                if time.monotonic() >= deadline:
                    raise ServerLost(
                        f"the checkpoint server in {self._settings.run_dir} could not be attached to within"
                        f" {ATTACH_S:g} s ({error}): see its log there"
                    ) from error
            except OSError as error:
                raise ConfigError(
                    f"the folder {self._settings.run_dir} cannot be used ({error}): "
                    "name one that belongs to this user"
                ) from error
            if not start(self._settings, deadline):
                # A server in that folder is just starting or ending: the caller tries again soon.
                time.sleep(_LOOK_AGAIN_S)

    def _connect(self, deadline: float) -> tuple[RequestChannel, _AttachReply]:
        settings, timeout_s = self._settings, max(deadline - time.monotonic(), _LOOK_AGAIN_S)
        with socket_path(settings.run_dir, SOCKET_NAME) as path:
            line = RequestChannel(path, f"the checkpoint server of {settings.replica}", timeout_s)
        try:
            body = {
                "op": "attach",
                "pid": os.getpid(),
                "incarnation": self._incarnation,
                "replica": settings.replica,
                "job": settings.job,
                "rank": settings.rank,
                "launch_mark": process_environment().get(LAUNCH_MARK, ""),
            }
            answer, _ = line.ask(body, timeout_s)
            reply = decode_as(_AttachReply, answer, "attach")
            if reply.rank != settings.rank:
                raise Refused(
                    f"the checkpoint server in {settings.run_dir} (process {reply.pid}) is of an older"
                    " version, which serves rank 0 alone: end it, and start this replica again"
                )
            return line, reply
        except BaseException:
            line.close()
            raise


def _map(descriptors: list[int], capacity: object, nbytes: int) -> memoryview:
    """Return writable memory behind the one descriptor, all of its pages present in this process."""
    if len(descriptors) != 1 or type(capacity) is not int or capacity < nbytes:
        raise ProtocolError("the checkpoint server handed over no memory of the size that was asked for")
    try:
        mapped = mmap.mmap(descriptors[0], capacity, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise Refused(
            f"{capacity} bytes of shared memory cannot be mapped ({error}): raise the limit on address space"
        ) from error
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    for begin in range(0, capacity, _FAULT_BYTES):
        size = min(_FAULT_BYTES, capacity - begin)
        # mmap's own method holds the interpreter's lock, and the trainer's step would wait. Kernels before
        # 5.14 refuse this call; the error is ignored, because they allocate pages at the first write.
        _libc.madvise(ctypes.c_void_p(address + begin), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)
    return memoryview(mapped)
