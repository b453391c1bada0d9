"""Real checkpoint server processes, each ended with its test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked_processes
import pytest
from server_support import end, start_server

from fabric.ckpt_server import attach as handles
from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.wire.channel_protocol import LOCK_NAME

Attach = Callable[..., ServerHandle]


@pytest.fixture(scope="module", autouse=True)
def forked_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork the servers of this process; ``test_server_process.py`` starts them as a trainer does."""
    started_as_usual = handles.start_helper
    if request.path.name != "test_server_process.py":
        forked_processes.fork_checkpoint_servers(forked_processes.address())
    yield
    handles.start_helper = started_as_usual


def _end_server(run_dir: Path) -> None:
    """Kill the server that owns ``run_dir``, if any."""
    lock = run_dir / LOCK_NAME
    pid = lock.read_text().strip() if lock.exists() else ""
    if pid and Path(f"/proc/{pid}").exists():
        end(int(pid))


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """The run folder of one checkpoint server, which ends with the test."""
    folder = tmp_path / "run"
    yield folder
    _end_server(folder)


@pytest.fixture
def attach(run_dir: Path) -> Iterator[Attach]:
    """A function that attaches this process to the server in ``run_dir``, and starts the server if needed."""
    handles: list[ServerHandle] = []

    def start(**others: Any) -> ServerHandle:
        handles.append(start_server(run_dir, **others))
        return handles[-1]

    yield start
    for handle in handles:
        handle.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHandle]:
    """One checkpoint server for all tests of a module that do not disturb each other."""
    folder = tmp_path_factory.mktemp("served") / "run"
    handle = start_server(folder)
    yield handle
    handle.close()
    _end_server(folder)
