"""The environment that this process hands on to the processes that it starts; no setting is read here."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fabric

# A launcher sets this variable in every process that it starts, to its process id and a name: 4711-0f3c...
LAUNCH_MARK = "FABRIC_LAUNCH_MARK"
# A launcher with a limit of restarts sets this variable to the limit.
LAUNCH_RESTARTS = "FABRIC_LAUNCH_RESTARTS"
# A launcher sets this variable to the seconds from its SIGTERM to its SIGKILL.
LAUNCH_STOP_S = "FABRIC_LAUNCH_STOP_S"
# A launcher sets this variable to the descriptor over which it offers layouts and takes orders.
LAYOUT_ORDERS = "FABRIC_LAYOUT_ORDERS"
# A launcher sets this variable in a standby to the socket between them, as number and inode: 7 socket:[4711].
STANDBY = "FABRIC_STANDBY"
# Kubernetes, Slurm and torchrun leave a process this many seconds after SIGTERM, unless configured otherwise.
_STOP_S = 30.0

# The variables by which frameworks notice the other processes of a launcher.
_WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_WORLDS_OF_MPI = ("PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "MPI_LOCAL")


def own_program(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line of a module of fabric or torch, which does not import from the working folder.

    The working folder may have a folder ``fabric`` of its own, such as that of a checkout.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def start_helper(module: str, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    """Start a module of fabric in a session of its own: no signal to this process's group reaches it."""
    # The folder from which this package is imported, installed or not.
    folder = Path(fabric.__file__).resolve().parent.parent
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, cwd=folder, start_new_session=True, **options)


def process_environment() -> dict[str, str]:
    return dict(os.environ)


def other_environment() -> dict[str, str]:
    """Return the environment without fabric's settings, for the processes of a job of its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")}


def is_restarted() -> bool:
    """Whether `fabric launch` or torchrun started this process in place of an earlier one."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def stop_s() -> float:
    """Return the seconds from a SIGTERM to the end of this process: what the launcher says, else 30."""
    with contextlib.suppress(ValueError):
        return float(os.environ.get(LAUNCH_STOP_S, _STOP_S))
    return _STOP_S


def outliving_environment() -> dict[str, str]:
    """Return the environment of a process that outlives this launcher: without the launcher's mark."""
    return {name: value for name, value in os.environ.items() if name != LAUNCH_MARK}


def take_standby_socket() -> int | None:
    """Return the number of a standby's socket, None in another process, and forget it."""
    socket = os.environ.pop(STANDBY, None)
    return None if socket is None else int(socket.split()[0])


def is_standby(pid: int, environment: Mapping[str, str]) -> bool:
    """Whether process ``pid``, which started with ``environment``, is a standby and not a rank yet."""
    number, _, inode = environment.get(STANDBY, "").partition(" ")
    with contextlib.suppress(OSError):
        return bool(number) and str(Path(f"/proc/{pid}/fd/{number}").readlink()) == inode
    return False


def add_to_environment(variables: Mapping[str, str]) -> None:
    """Set ``variables`` for this process and the processes that it starts."""
    os.environ.update(variables)


@contextlib.contextmanager
def without_launcher() -> Iterator[None]:
    """Within this context hide the variables of the launcher's world."""
    hidden = {
        name: os.environ.pop(name)
        for name in list(os.environ)
        if name in _WORLD or name.startswith(_WORLDS_OF_MPI)
    }
    try:
        yield
    finally:
        os.environ.update(hidden)
