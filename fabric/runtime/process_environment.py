"""The environment that this process hands on to the processes that it starts; no setting is read here."""

import contextlib
import os
from collections.abc import Iterator, Mapping

# A launcher sets this variable, with a value of its own, in every process that the launcher starts.
LAUNCH_MARK = "FABRIC_LAUNCH_MARK"
# A launcher with a limit of restarts sets this variable to the limit.
LAUNCH_RESTARTS = "FABRIC_LAUNCH_RESTARTS"

# The variables by which frameworks notice the other processes of a launcher.
_WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_WORLDS_OF_MPI = ("PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "MPI_LOCAL")


def process_environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def is_restarted() -> bool:
    """Whether `fabric launch` or torchrun started this process in place of an earlier one."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def outliving_environment() -> dict[str, str]:
    """Return the environment of a process that outlives this launcher: without the launcher's mark."""
    return {name: value for name, value in os.environ.items() if name != LAUNCH_MARK}


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
