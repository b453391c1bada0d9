"""The environment that this process hands on to the processes that it starts; no setting is read here."""

import os
from collections.abc import Mapping

# A launcher sets this variable, with a value of its own, in every process that the launcher starts.
LAUNCH_MARK = "FABRIC_LAUNCH_MARK"
# A launcher with a limit of restarts sets this variable to the limit.
LAUNCH_RESTARTS = "FABRIC_LAUNCH_RESTARTS"


def process_environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def outliving_environment() -> dict[str, str]:
    """Return the environment of a process that outlives this launcher: without the launcher's mark."""
    return {name: value for name, value in os.environ.items() if name != LAUNCH_MARK}


def add_to_environment(variables: Mapping[str, str]) -> None:
    """Set ``variables`` for this process and the processes that it starts."""
    os.environ.update(variables)
