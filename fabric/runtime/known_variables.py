"""The names of fabric's variables: a misspelt ``FABRIC_`` variable is refused with the nearest name.

Fabric owns the prefix. A name that fabric does not know is a mistake more often than the variable of another
program, and an ignored setting changes a job in silence.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping

from fabric.errors import ConfigError
from fabric.runtime.guarded_processes import MARK
from fabric.runtime.process_environment import LAUNCH_MARK, LAUNCH_RESTARTS, LAUNCH_STOP_S

PREFIX = "FABRIC_"
# Launchers, the demo and drills set these in the processes that they start.
_OWN = (MARK, LAUNCH_MARK, LAUNCH_RESTARTS, LAUNCH_STOP_S)
_SERVICE = "_SERVICE_HOST"
# The beginnings of further variables that Kubernetes sets for a service.
_OF_SERVICE = ("_SERVICE_", "_PORT_")


def refuse_unknown(environment: Mapping[str, str], settings: Collection[str]) -> None:
    """Raise ConfigError for the first ``FABRIC_`` variable that is neither in ``settings`` nor fabric's own.

    ``settings``: the variables of all settings. An empty variable counts as not set.
    """
    services = {name.removesuffix(_SERVICE) for name in environment if name.endswith(_SERVICE)}
    for name in _given(environment):
        if name in settings or name in _OWN or any(_belongs(name, service) for service in services):
            continue
        words = {setting.removeprefix(PREFIX): setting for setting in sorted(settings)}
        nearest = difflib.get_close_matches(name.removeprefix(PREFIX), words, 1)
        remedy = f"set {words[nearest[0]]} in its place, or unset it" if nearest else "unset it"
        raise ConfigError(f"the variable {name[:80]} is set, and fabric has no such setting: {remedy}")


def _given(environment: Mapping[str, str]) -> Iterator[str]:
    return (name for name, text in sorted(environment.items()) if text and name.startswith(PREFIX))


def _belongs(name: str, service: str) -> bool:
    """Whether Kubernetes sets ``name`` in each container, for a service such as ``fabric-lighthouse``."""
    rest = name.removeprefix(service) if name.startswith(service) else ""
    return rest == "_PORT" or rest.startswith(_OF_SERVICE)
