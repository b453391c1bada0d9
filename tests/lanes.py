"""Runs the tests of ``make test``: ``python tests/lanes.py``.

Each lane is a session of pytest with an output of its own. Lanes of one kind share a list of files: each
claims the next file when it has run one, so they end together. All lanes are forked from one process that has
imported torch once. So are two zygotes of ``forked_processes.py``, which the lanes share.
"""

import contextlib
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp
from typing import BinaryIO

import forked_processes
from forked_processes import SERVERS, TORCH, ZYGOTES

TESTS = Path(__file__).resolve().parent
CLAIM_BYTES = 4  # of the number of a file in a list
# Whole jobs wait much of their time, so several run side by side. The files that take longest begin first.
JOBS = "tests/integration/"
SLOW_JOBS = ("drill", "hosts", "namespaces", "launched_jobs", "ranks", "durable", "ways_in", "mistakes")
SLOW_PARTS = (
    "tests/conformance/test_same_training.py",
    "tests/cli/test_launch.py",
    "tests/lighthouse/test_node_meeting.py",
    "tests/test_package.py",
)
# Worlds only need a processor, so they have a low priority.
WORLDS = ("tests/protocol/", "tests/sim/", "tests/mutants/")
LANES = {"jobs": 4, "parts": 3, "worlds": 1}
LINT = ("make", "--no-print-directory", "lint")
SHARDED = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)


def files() -> dict[str, list[str]]:
    """Return the files of each kind of lanes, in the order in which they are claimed."""
    everything = [str(x.relative_to(TESTS.parent)) for x in sorted(TESTS.rglob("test_*.py"))]
    jobs = [x for x in everything if x.startswith(JOBS)]
    worlds = [x for folder in WORLDS for x in everything if x.startswith(folder)]
    slow = [f"{JOBS}test_{name}.py" for name in SLOW_JOBS]
    parts = [x for x in everything if x not in {*jobs, *worlds, *SLOW_PARTS}]
    return {"jobs": [*dict.fromkeys([*slow, *jobs])], "parts": [*SLOW_PARTS, *parts], "worlds": worlds}


class ClaimedFiles:
    """A plugin: its session claims, imports and runs one file after the other."""

    def __init__(self, names: Sequence[str], claims: BinaryIO) -> None:
        self._names, self._claims = names, claims
        self._modules: Sequence = ()

    def pytest_collection(self, session) -> bool:
        self._modules = session.perform_collect(self._names, genitems=False)
        assert len(self._modules) == len(self._names), self._modules
        return True

    def pytest_runtestloop(self, session) -> bool:
        session.testscollected = 0
        # All lanes share their place in the file, which each read moves.
        while claim := os.read(self._claims.fileno(), CLAIM_BYTES):
            self._import(session, self._modules[int(claim)])
            # What follows the last test keeps the fixtures of the session alone.
            for item, following in pairwise([*session.items, session]):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        return True

    def _import(self, session, module) -> None:
        session.items = list(session.genitems(module))
        session.config.hook.pytest_collection_modifyitems(
            session=session, config=session.config, items=session.items
        )
        session.testscollected += len(session.items)
        gc.collect()
        gc.freeze()


def claims_of(count: int) -> BinaryIO:
    """Return an open file with the numbers below ``count``, of CLAIM_BYTES each."""
    claims = TemporaryFile()  # noqa: SIM115  (open as long as the lanes)
    claims.write(b"".join(b"%*d" % (CLAIM_BYTES, number) for number in range(count)))
    claims.seek(0)
    return claims


def run_lane(kind: str, names: Sequence[str], claims: BinaryIO, log: BinaryIO | None) -> int:
    """Run a session of pytest in this process; return its exit code. ``log`` None: it shows its output."""
    pytest = importlib.import_module("pytest")
    os.nice(10 if kind == "worlds" else 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
    for number in (1, 2) if log is not None else ():
        os.dup2(log.fileno(), number)
    # A process that ``multiprocessing`` spawns imports the main module.
    sys.modules["__main__"] = importlib.import_module("pytest.__main__")
    sys.argv = ["pytest", "-p", "no:cacheprovider", "-m", "not long"]
    code = pytest.main(sys.argv[1:], plugins=[ClaimedFiles(names, claims)])
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code


def fork(run: Callable[[], int]) -> int:
    """Run a function, which returns an exit code, in a process of its own; return the process id."""
    if pid := os.fork():
        return pid
    code = 1
    with contextlib.suppress(KeyboardInterrupt):
        code = run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start_zygote(name: Path, lifeline: tuple[int, int]) -> None:
    """Fork a zygote that has the modules of this process, and ends when all others have closed a pipe."""
    listener = forked_processes.listen(str(name))

    def serve() -> int:
        os.dup2(lifeline[0], 0)
        os.close(lifeline[1])
        forked_processes.serve(listener)
        return 0

    fork(serve)
    listener.close()


def start_zygotes(folder: Path) -> int:
    """Import what the tests need; return a descriptor. The zygotes end when it is closed."""
    lifeline = os.pipe()
    for name, imports in (("servers", SERVERS), ("torch", (*TORCH, *SHARDED))):
        for module in imports:
            importlib.import_module(module)
        forked_processes.keep_imports()
        start_zygote(folder / name, lifeline)
    os.close(lifeline[0])
    os.environ[ZYGOTES] = f"{folder / 'servers'} {folder / 'torch'}"
    return lifeline[1]


def start_lanes(lifeline: int) -> dict[int, tuple[str, BinaryIO | None]]:
    """Start all lanes; return the kind and the output of each, by process id. The first shows its output."""
    lanes = {}
    for kind, names in files().items():
        claims = claims_of(len(names))
        for _ in range(LANES[kind]):
            log = TemporaryFile() if lanes else None  # noqa: SIM115

            def run(kind=kind, names=names, claims=claims, log=log) -> int:
                os.close(lifeline)
                return run_lane(kind, names, claims, log)

            lanes[fork(run)] = kind, log
    return lanes


def show(ended: list[tuple[str, BinaryIO | None]]) -> None:
    """Print what lanes have said, and forget it."""
    for title, log in ended:
        print(f"=== {title} ===", flush=True)
        if log is not None:
            log.seek(0)
            shutil.copyfileobj(log, sys.stdout.buffer)
            sys.stdout.flush()
    ended.clear()


def main() -> int:
    """Run everything; print the output of the first lane as it comes, and that of the others later."""
    if not forked_processes.has_room():
        # A forked process writes its words and variables over those of this process.
        command, environment = forked_processes.with_room(dict(os.environ), __file__)
        os.execve(sys.executable, command, environment)
    os.chdir(TESTS.parent)
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.disable()  # until each session has collected its first file
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    folder = Path(mkdtemp(prefix="fabric-test-"))
    log = TemporaryFile()  # noqa: SIM115
    lint = subprocess.Popen(LINT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    lifeline = start_zygotes(folder)
    lanes = start_lanes(lifeline)
    shown = next(iter(lanes))
    running = {lint.pid: ("lint", log), **lanes}
    ended, failed = [], []
    try:
        while running:
            pid, status = os.wait()
            assert pid in running, "a zygote has died"
            kind, log = running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            ended.append((f"{kind}: exit code {code}", log))
            failed += [kind] if code else []
            if shown not in running:
                show(ended)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGINT)
        for pid, (kind, log) in running.items():
            os.waitpid(pid, 0)
            ended.append((f"{kind}: interrupted", log))
        show(ended)
        os.close(lifeline)
        shutil.rmtree(folder)
    print("failed: " + ", ".join(failed) if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
