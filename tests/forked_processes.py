"""Starts Python programs quickly: a zygote imports their modules once, then forks a real process per request.

A lighthouse or a checkpoint server then costs a third, and a program that imports torch a tenth, of one that
imports its modules again. The tests of ``fabric launch``, ``fabric local`` and the drill,
``ckpt_server/test_server_process.py`` and ``cli/test_run.py`` also start these programs by ``exec``, and
``ckpt_server/test_durable_jobs.py`` the writer of a durable checkpoint.

A request comes over a Unix socket with the descriptors that the new process gets. The answers on the same
connection are the process id, and at the end the status of ``waitpid``. The new process shows its own words
in ``/proc/PID/cmdline``, as after ``exec``.
"""

import asyncio
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType, SimpleNamespace
from typing import BinaryIO

SERVERS = (
    "fabric.ckpt_server.__main__",
    "fabric.cli.main",
    "fabric.cli.lighthouse",
    "fabric.cli.status",
    "fabric.cli.operate",
    "fabric.cli.doctor",
    "fabric.cli.status",
    "fabric.cli.demo.command",
)
TORCH = ("torch._dynamo", "fabric.client.attach", "fabric.cli.run")
WRITER = ("fabric.ckpt_server.durable.dcp", "fabric.ckpt_server.durable.__main__")
ADDRESS = "TEST_SERVER_ZYGOTE"  # the variable with the zygote's address, for the trainers of a job
WRITERS = "TEST_WRITER_ZYGOTE"  # likewise, for the checkpoint servers of a job with durable checkpoints
CHECKOUT = str(Path(__file__).resolve().parents[1])
_LIMIT_S = 300.0
_ROOM = "x" * 8192  # an argument whose place takes the words of a forked process
_MAX_BYTES = 1 << 17
_MAX_DESCRIPTORS = 8


class ForkedProcess:
    """A process of the zygote, with the methods of ``subprocess.Popen`` that tests and trainers use."""

    def __init__(
        self,
        zygote: str,
        words: Sequence[str],
        descriptors: dict[int, int],
        environment: dict[str, str],
        cwd: str = "",
        session: bool = False,
    ) -> None:
        """``words``: ``-m`` and a module or ``-c`` and a program, then arguments. ``descriptors`` are by
        their number in the new process."""
        request = {"words": list(words), "environment": environment, "cwd": cwd, "session": session}
        request["descriptors"] = list(descriptors)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect("\0" + zygote)
        socket.send_fds(self._connection, [json.dumps(request).encode()], list(descriptors.values()))
        self.pid: int = self._receive()["pid"]
        self.returncode: int | None = None

    def _receive(self) -> dict[str, int]:
        data = self._connection.recv(_MAX_BYTES)
        assert data, "the zygote of the servers has died"
        return json.loads(data)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(self._receive()["status"])
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def fork_checkpoint_servers(zygote: str) -> None:
    """From now on the zygote at this address starts the checkpoint servers of this process."""
    launch = importlib.import_module("fabric.ckpt_server.attach.server_handle")

    def start(command, *, stdout, pass_fds, env, cwd, start_new_session, **_: object) -> ForkedProcess:
        assert command[:2] == [sys.executable, "-m"] and start_new_session, command
        with Path(os.devnull).open("rb") as nothing:
            given = {0: nothing.fileno(), 1: stdout.fileno(), 2: stdout.fileno(), **{x: x for x in pass_fds}}
            return ForkedProcess(zygote, command[1:], given, env, str(cwd), session=True)

    launch.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)


def fork_durable_writers(zygote: str) -> None:
    """From now on the zygote at this address starts the writers of this checkpoint server."""

    async def start(_, *words: str, stdin, stdout, pass_fds, limit, cwd) -> SimpleNamespace:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit)
        given_in, own_in = os.pipe()
        own_out, given_out = os.pipe()
        given = {0: given_in, 1: given_out, 2: 2, **{x: x for x in pass_fds}}
        process = ForkedProcess(zygote, words, given, dict(os.environ), str(cwd))
        os.close(given_in), os.close(given_out)
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(own_out, "rb", 0)
        )
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(own_in, "wb", 0)
        )

        # One thread waits, however often a cancelled caller asks: the status comes once.
        ended = loop.run_in_executor(None, process.wait)

        async def wait() -> int:
            code = await asyncio.shield(ended)
            transport.close()
            return code

        def kill() -> None:
            if process.returncode is None:
                os.kill(process.pid, signal.SIGKILL)

        own = asyncio.StreamWriter(transport, protocol, None, loop)
        return SimpleNamespace(stdin=own, stdout=reader, wait=wait, kill=kill)

    jobs = importlib.import_module("fabric.ckpt_server.server.durable_jobs")
    jobs.asyncio = SimpleNamespace(**{**vars(asyncio), "create_subprocess_exec": start})


def address(imports: Sequence[str] = SERVERS) -> str:
    """Return the address of this session's zygote with these modules. The zygote ends with this process."""
    return _address(imports)


@functools.cache
def _address(imports: Sequence[str]) -> str:
    name = f"fabric-test-{os.getpid()}-{imports[0]}"
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, name, *imports, _ROOM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": CHECKOUT, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline() == b"ready\n"

    def close() -> None:
        process.stdin.close()
        process.wait()

    atexit.register(close)
    return name


def start_lighthouse(arguments: Sequence[str], log: BinaryIO) -> ForkedProcess:
    """Start ``fabric lighthouse`` with this process's environment, in the folder of this checkout."""
    with Path(os.devnull).open("rb") as nothing:
        given = {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno()}
        words = ["-m", "fabric.cli.main", "lighthouse", *arguments]
        return ForkedProcess(address(), words, given, dict(os.environ), CHECKOUT)


def run_python(
    *words: str, imports: Sequence[str] = SERVERS, environment: dict[str, str] | None = None, cwd: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Run ``python WORDS...`` in a process that has these modules; return its exit code and its output."""
    with Path(os.devnull).open("rb") as nothing, TemporaryFile() as out, TemporaryFile() as error:
        given = {0: nothing.fileno(), 1: out.fileno(), 2: error.fileno()}
        inherited = dict(os.environ) if environment is None else environment
        process = ForkedProcess(address(imports), words, given, inherited, cwd or str(Path.cwd()))
        code = process.wait(_LIMIT_S)
        said = [(file.seek(0), file.read().decode())[1] for file in (out, error)]
    return subprocess.CompletedProcess(words, code, *said)


def run_with_torch(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run ``python WORDS...`` in a process that has torch, with these variables besides those of this one."""
    return run_python(*words, imports=TORCH, environment={**os.environ, **environment})


# --- in the zygote -----------------------------------------------------------------------------------------


def child(request: dict, descriptors: Sequence[int]) -> None:
    """Become the process of ``request``; never return."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if request["session"]:
            os.setsid()
        _take(dict(zip(request["descriptors"], descriptors, strict=True)))
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"] or ".")
        _show([sys.executable, *request["words"]])
        kind, what, *arguments = request["words"]
        sys.argv = [what if kind == "-m" else kind, *arguments]
        if what == "fabric.ckpt_server" and WRITERS in os.environ:
            fork_durable_writers(os.environ[WRITERS])
        code = _main_of(what)() or 0 if kind == "-m" else _run(what)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  (the child must never return into the zygote's loop)
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _main_of(module: str) -> Callable[[], int | None]:
    """Return the function that ``python -m module`` calls."""
    found = importlib.import_module(module)
    return (importlib.import_module(f"{module}.__main__") if hasattr(found, "__path__") else found).main


def _run(program: str) -> int:
    """Run ``python -c program``."""
    sys.path.insert(0, "")
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), main.__dict__)
    return 0


def _take(wanted: dict[int, int]) -> None:
    """Move the received descriptors to their numbers, and close all others."""
    above = max(*wanted, *wanted.values(), 64) + 1
    moved = {}
    for target, descriptor in wanted.items():
        moved[target] = above + len(moved)
        os.dup2(descriptor, moved[target])
    os.closerange(3, above)
    for target, descriptor in moved.items():
        os.dup2(descriptor, target)
    os.closerange(above, above + len(moved))


def _show(words: Sequence[str]) -> None:
    """Write ``words`` over the arguments that the kernel shows of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(word.encode() for word in words) + b"\0"
    assert len(text) <= end - start, "the words are too long"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def main() -> None:
    for name in sys.argv[2:-1]:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, tests still end their processes
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + sys.argv[1])
    listener.listen(64)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    connections: dict[int, socket.socket] = {}  # of each living process
    accepted: list[socket.socket] = []  # their requests have not come yet
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([0, wake_read, listener, *accepted], [], [])
        if 0 in readable and not os.read(0, 1):
            return
        if wake_read in readable:
            os.read(wake_read, 4096)
            while ended := _ended():
                _say(connections.pop(ended[0]), {"status": ended[1]})
        if listener in readable:
            accepted.append(listener.accept()[0])
        for connection in [x for x in accepted if x in readable]:
            accepted.remove(connection)
            data, descriptors, _, _ = socket.recv_fds(connection, _MAX_BYTES, _MAX_DESCRIPTORS)
            if not data:
                continue  # the trainer has died
            pid = os.fork()
            if pid == 0:
                child(json.loads(data), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            connections[pid] = connection
            _say(connection, {"pid": pid})


def _ended() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _say(connection: socket.socket, message: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # its trainer has ended
        connection.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
