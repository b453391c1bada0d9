"""Starts Python programs quickly: a zygote imports their modules once, then forks a real process per request.

A lighthouse or a checkpoint server then costs a third, and a program that imports torch a tenth, of one that
imports its modules again. ``test_package.py``, ``cli/test_launch.py``, ``cli/test_run.py`` and
``ckpt_server/test_server_process.py`` also start these programs by ``exec``, and
``ckpt_server/test_durable_jobs.py`` the writer of a durable checkpoint.

A request comes over a Unix socket with the descriptors that the new process gets. The answers on the same
connection are the process id, and at the end the status of ``waitpid``. The new process shows its own words
in ``/proc/PID/cmdline`` and its environment in ``/proc/PID/environ``, as after ``exec``, before its id is
told. The process is in the mount namespace of the process that asked, and in the network namespace that
``TEST_NETNS`` in its environment names.

With ``LAUNCHERS`` in its environment, a process of ``fabric launch``, ``local``, ``demo`` or ``drill`` forks
all Python programs that it starts, and so do these.
"""

import asyncio
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import itertools
import json
import logging
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp
from types import ModuleType, SimpleNamespace
from typing import BinaryIO

from fabric.runtime import logs

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
TORCH = (
    "torch._dynamo",
    "fabric.client.attach",
    "fabric.cli.run",
    "fabric.ckpt_server.durable.dcp",
    "fabric.ckpt_server.durable.__main__",
    *SERVERS,
)
ADDRESS = "TEST_SERVER_ZYGOTE"  # the variable with the zygote's address, for the trainers of a job
WRITERS = "TEST_WRITER_ZYGOTE"  # likewise, for the checkpoint servers of a job with durable checkpoints
CHECKOUT = str(Path(__file__).resolve().parents[1])
NETWORK = "TEST_NETNS"  # the variable with the network namespace of a process
LAUNCHERS = "TEST_LAUNCHER_ZYGOTE"  # likewise, for supervisors, launchers, their ranks, servers and writers
# The beginning of a program that needs modules of fabric.client, and not the package, which imports torch.
WITHOUT_TORCH = f"""
import sys, types
package = sys.modules["fabric.client"] = types.ModuleType("fabric.client")
package.__path__ = [{CHECKOUT!r} + "/fabric/client"]
"""
_LIMIT_S = 300.0
_ROOM = "x" * 8192  # an argument whose place takes the words of a forked process
_MORE_ROOM = "x" * 24_576  # a variable whose place takes the environment of a forked process
_WORDS, _ENVIRONMENT = 45, 47  # the places of their first addresses in /proc/PID/stat, after the name
_NEW_MOUNTS = 0x20000  # CLONE_NEWNS
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
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
        request["asks"] = os.getpid()
        request["descriptors"] = list(descriptors)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(zygote)
        socket.send_fds(self._connection, [json.dumps(request).encode()], list(descriptors.values()))
        self.pid: int = self._receive()["pid"]
        self.returncode: int | None = None
        self._waiting = threading.Lock()  # the ranks of one process look at their server from several threads

    def _receive(self) -> dict[str, int]:
        data = self._connection.recv(_MAX_BYTES)
        assert data, "the zygote of the servers has died"
        return json.loads(data)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._waiting:
            if self.returncode is None:
                if not select.select([self._connection], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
                self.returncode = os.waitstatus_to_exitcode(self._receive()["status"])
                self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its parent may have seen its end before us
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def fork_checkpoint_servers(zygote: str) -> None:
    """From now on the zygote at this address starts the checkpoint servers of this process."""
    launch = importlib.import_module("fabric.ckpt_server.attach")
    folder = Path(launch.__file__).parent.parent.parent

    def start_helper(module, *arguments, stdin, stdout, stderr, pass_fds, env) -> ForkedProcess:
        assert (stdin, stderr) == (subprocess.DEVNULL, stdout)
        with Path(os.devnull).open("rb") as nothing:
            given = {0: nothing.fileno(), 1: stdout.fileno(), 2: stdout.fileno(), **{x: x for x in pass_fds}}
            return ForkedProcess(zygote, ["-m", module, *arguments], given, env, str(folder), session=True)

    assert callable(launch.start_helper)
    launch.start_helper = start_helper


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
    # A path, because processes in another network namespace do not see the abstract names of this one.
    name = f"{mkdtemp(prefix='fabric-test-')}/zygote"
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, name, *imports, _ROOM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": CHECKOUT, "OMP_NUM_THREADS": "1", "TEST_ROOM": _MORE_ROOM},
    )
    assert process.stdout.readline() == b"ready\n"

    def close() -> None:
        process.stdin.close()
        process.wait()

    atexit.register(close)
    return name


def start_lighthouse(arguments: Sequence[str], log: BinaryIO, network: str = "") -> ForkedProcess:
    """Start ``fabric lighthouse`` with this process's environment in the folder of this checkout.

    ``network`` names the network namespace of the new process.
    """
    with Path(os.devnull).open("rb") as nothing:
        given = {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno()}
        words = ["-m", "fabric.cli.main", "lighthouse", *arguments]
        environment = {**os.environ, **({NETWORK: network} if network else {})}
        return ForkedProcess(address(), words, given, environment, CHECKOUT)


def start_supervisor(
    *words: str,
    log: BinaryIO,
    environment: dict[str, str] | None = None,
    cwd: str = "",
    program: Sequence[str] = ("-P", "-m", "fabric.cli.main"),
) -> ForkedProcess:
    """Start ``fabric WORDS...``, or another program, as the leader of a session, with ``log`` as its output;
    all that it starts is forked."""
    zygote = address(TORCH)
    variables = {**(os.environ if environment is None else environment), LAUNCHERS: zygote}
    with Path(os.devnull).open("rb") as nothing:
        given = {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno()}
        command = (*program, *words)
        return ForkedProcess(zygote, command, given, variables, cwd or str(Path.cwd()), session=True)


def run_supervisor(
    *words: str, environment: dict[str, str] | None = None, cwd: str = "", limit_s: float = _LIMIT_S
) -> "subprocess.CompletedProcess[str]":
    """Run ``fabric WORDS...`` to its end; return its exit code and its output."""
    with TemporaryFile() as out:
        process = start_supervisor(*words, log=out, environment=environment, cwd=cwd)
        try:
            code = process.wait(limit_s)
        finally:
            process.kill()
        out.seek(0)
        return subprocess.CompletedProcess(words, code, out.read().decode(), "")


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


def child(request: dict, descriptors: Sequence[int], asks: socket.socket) -> None:
    """Become the process of ``request``; tell ``asks`` the process id; never return."""
    code = 1
    try:
        _forget(request)
        asks = _take(dict(zip(request["descriptors"], descriptors, strict=True)), asks)
        _share_mounts(request.get("asks", os.getpid()))
        os.chdir(request["cwd"] or ".")
        os.environ.clear()
        os.environ.update(request["environment"])
        if NETWORK in os.environ:
            enter_network(os.environ[NETWORK])
        _show([sys.executable, *request["words"]], _WORDS)
        _show([f"{name}={value}" for name, value in os.environ.items()], _ENVIRONMENT)
        with asks:
            _say(asks, {"pid": os.getpid()})
        code = _main(request["words"])
    except SystemExit as end:
        code = _code(end)
    except BaseException:  # noqa: BLE001  (the child must never return into the zygote's loop)
        code = _shown(*sys.exc_info())
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _forget(request: dict) -> None:
    """Have the signals and logs of a new process."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger().handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    logs._process.clear()
    if request["session"]:
        os.setsid()
    if (first := request.get("first")) is not None:
        first()


def _code(end: SystemExit) -> int:
    if end.code is not None and not isinstance(end.code, int):
        print(end.code, file=sys.stderr)
        return 1
    return end.code or 0


def _shown(*error: object) -> int:
    """Show an uncaught error as the interpreter itself would; return the exit code."""
    try:
        sys.excepthook(*error)
    except SystemExit as end:
        return _code(end)
    return 1


def _main(words: Sequence[str]) -> int:
    """Run ``python WORDS...``; return its exit code."""
    own = [*itertools.dropwhile(("-P", "-u").__contains__, words)]
    searched = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [x for x in searched if x and x not in sys.path]
    if LAUNCHERS in os.environ:
        _fork_programs(os.environ[LAUNCHERS])
    if own[:2] == ["-m", "fabric.ckpt_server"] and WRITERS in os.environ:
        fork_durable_writers(os.environ[WRITERS])
    if own[0] == "-m":
        sys.argv = own[1:]
        found = importlib.import_module(own[1])
        name = f"{own[1]}.__main__" if hasattr(found, "__path__") else own[1]
        if hasattr(main := importlib.import_module(name), "main"):
            return main.main() or 0
        runpy.run_module(own[1], run_name="__main__", alter_sys=True)
        return 0
    main = sys.modules["__main__"] = ModuleType("__main__")
    if own[0] == "-c":
        sys.argv, folder, program = ["-c", *own[2:]], "", compile(own[1], "<string>", "exec")
    else:
        sys.argv, folder = own, str(Path(own[0]).resolve().parent)
        program, main.__file__ = compile(Path(own[0]).read_text(), own[0], "exec"), own[0]
    if "-P" not in words[: -len(own)]:
        sys.path.insert(0, folder)
    exec(program, main.__dict__)
    return 0


def _take(wanted: dict[int, int], asks: socket.socket) -> socket.socket:
    """Move the received descriptors to their numbers, and close all others but that of ``asks``."""
    above = max(*wanted, *wanted.values(), asks.fileno(), 64) + 1
    moved = {}
    for target, descriptor in wanted.items():
        moved[target] = above + len(moved)
        os.dup2(descriptor, moved[target])
    connection = socket.socket(fileno=os.dup2(asks.detach(), above + len(moved), inheritable=False))
    os.closerange(3, above)
    for target, descriptor in moved.items():
        os.dup2(descriptor, target)
        os.close(descriptor)
    return connection


def _share_mounts(asks: int) -> None:
    """Enter the mount namespace of process ``asks``."""
    theirs = Path(f"/proc/{asks}/ns/mnt")
    if theirs.readlink() == Path("/proc/self/ns/mnt").readlink():
        return
    _enter(theirs, _NEW_MOUNTS)


def enter_network(name: str) -> None:
    """Move this thread, and every process and thread that it starts, into a network namespace."""
    _enter(Path(f"/run/netns/{name}"), _NEW_NETWORK)


def _enter(namespace: Path, kind: int) -> None:
    with namespace.open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), kind):
            raise OSError(ctypes.get_errno(), f"the namespace {namespace} cannot be entered")


def _show(words: Sequence[str], place: int) -> None:
    """Write ``words`` over the arguments, or the environment, that the kernel shows of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[place]), int(fields[place + 1])
    text = b"\0".join(os.fsencode(word) for word in words) + b"\0"
    assert len(text) <= end - start, "the words are too long"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


# --- in a launcher, or in a process that starts launchers --------------------------------------------------


class _Fork(subprocess.Popen):
    """A Python program that a process with one thread forks: its own child, as after ``exec``."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others) -> None:
        if args[0] != sys.executable:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others)
            return
        pipes, session = others[3:9], others[-2]
        given = {0: pipes[0], 1: pipes[3], 2: pipes[5], **{x: x for x in pass_fds}}
        given = {number: number if there < 0 else there for number, there in given.items()}
        request = {"words": list(args[1:]), "environment": dict(env), "cwd": cwd, "session": session}
        request |= {"first": preexec_fn, "descriptors": list(given)}
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            child(request, list(given.values()), theirs)
        self._child_created = True
        with own:
            theirs.close()
            own.recv(_MAX_BYTES)  # the child shows its words, or has ended
        self._close_pipe_fds(*pipes)


def _fork_programs(zygote: str) -> None:
    """From now on this process, and the processes that it starts, fork their Python programs."""
    os.environ[WRITERS] = zygote
    fork_checkpoint_servers(zygote)

    def start(command, *, stdin, stdout=None, env=None, **others: object) -> ForkedProcess | subprocess.Popen:
        if command[0] != sys.executable or stdin != subprocess.DEVNULL:
            return subprocess.Popen(command, stdin=stdin, stdout=stdout, env=env, **others)
        with Path(os.devnull).open("rb") as nothing:
            given = {0: nothing.fileno(), 1: stdout.fileno(), 2: stdout.fileno()}
            return ForkedProcess(zygote, command[1:], given, env, str(Path.cwd()), session=True)

    names = ("PIPE", "DEVNULL", "STDOUT", "TimeoutExpired")
    known = {name: getattr(subprocess, name) for name in names}
    guarded = importlib.import_module("fabric.runtime.guarded_processes")
    guarded.subprocess = SimpleNamespace(Popen=start, **known)
    attempt = importlib.import_module("fabric.cli.launch.attempt")
    attempt.subprocess = SimpleNamespace(Popen=_Fork, **known)


def fork_ranks_of_torchrun() -> None:
    """From now on this agent of torchrun forks its ranks."""

    def start(*, args, env, stdout, stderr, start_new_session) -> ForkedProcess:
        with Path(os.devnull).open("rb") as nothing:
            given = {0: nothing.fileno(), 1: stdout.fileno() if stdout else 1}
            given[2] = stderr.fileno() if stderr else 2
            return ForkedProcess(os.environ[LAUNCHERS], args[1:], given, env, str(Path.cwd()), session=True)

    package = "torch.distributed.elastic.multiprocessing.subprocess_handler"
    importlib.import_module(f"{package}.subprocess_handler").Popen = start


def _make_ready(names: Sequence[str]) -> None:
    """Import the modules, and compile the patterns of the servers' routes, once for all forked processes."""
    for name in (*names, "encodings.idna"):  # the first connection of a process imports the last one
        importlib.import_module(name)
    no_parts = SimpleNamespace(jobs=SimpleNamespace(token_refused=None))
    importlib.import_module("fabric.lighthouse.http.routes").make_app(no_parts, None)
    importlib.import_module("fabric.ckpt_server.server.routes").make_app(None, None, None)
    gc.collect()
    keep_imports()


def keep_imports() -> None:
    """Spare forked processes the work on objects of the modules that this process has imported.

    A look at all living objects would copy their memory. At its end, a process would take 30 ms to undo the
    libraries of torch.
    """
    gc.freeze()
    for undone in weakref.finalize._registry:
        undone.atexit = False


def main() -> None:
    _make_ready(sys.argv[2:-1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, tests still end their processes
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(sys.argv[1])
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
            shutil.rmtree(Path(sys.argv[1]).parent)
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
                child(json.loads(data), descriptors, connection)
            for descriptor in descriptors:
                os.close(descriptor)
            connections[pid] = connection


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
