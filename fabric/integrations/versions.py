"""Which releases of a framework an integration works with."""

import logging
import re
from importlib import metadata

from fabric.errors import ConfigError

_log = logging.getLogger("fabric")


def check_version(framework: str, least: str, tested: str) -> None:
    """Raise ConfigError where the installed ``framework`` is older than ``least``.

    Another release than ``tested`` is allowed, and the log says so: its inside may differ.
    """
    version = metadata.version(framework)
    if _numbers(version) < _numbers(least):
        raise ConfigError(
            f"{framework} {version} is installed, and fabric.integrations.{framework} needs {least} or newer "
            f"(tested with {tested}): run pip install -U {framework}"
        )
    if _numbers(version)[:2] != _numbers(tested)[:2]:
        _log.warning(
            "%s %s is not %s, the release that fabric.integrations.%s was tested with",
            framework,
            version,
            tested,
            framework,
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release's numbers, without what follows them: "5.23.0rc1" is (5, 23, 0)."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(x) for x in release[0].split(".")) if release is not None else ()
