"""Settings of a trainer: arguments, else environment, else defaults. The only reader of the environment.

Every field is one knob with a unit in its name. Cross-field checks raise ConfigError with a sentence.
"""

import math
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fabric.errors import ConfigError
from fabric.runtime.web import read_token


@dataclass(frozen=True, slots=True)
class Settings:
    """``job``, ``replica``: who I am. ``replicas``: "3" starts with 3 and goes on with 1, "2:8" needs 2 and
    takes 8. ``lighthouse``: base URLs. ``bind``, ``advertise``, ``ports``: where peers reach me.
    ``run_dir``: this replica's sockets, logs and lock on this host. ``journal``: one JSON line per event.
    ``contact_s``: how long to look for a lighthouse at the start.
    ``exchange_s``: silence allowed inside an exchange. ``autonomy_s``: how long to step without any
    lighthouse. ``digest_every``: steps between digests of the state. ``snapshot_share``: part of the step
    time that snapshots may cost. ``disable``: plain training, no services."""

    job: str = "job"
    replica: str = ""
    replicas: str = "1"
    lighthouse: tuple[str, ...] = ()
    token_file: Path | None = None
    bind: str = "127.0.0.1"
    advertise: str = ""
    ports: str = "0"
    run_dir: Path | None = None
    journal: Path | None = None
    disable: bool = False
    contact_s: float = 60.0
    exchange_s: float = 60.0
    autonomy_s: float = 1800.0
    digest_every: int = 10
    snapshot_share: float = 0.02
    orphan_s: float = 600.0
    points: str = ""

    @property
    def home(self) -> Path:
        """Where this replica keeps its sockets and logs."""
        if self.run_dir is not None:
            return self.run_dir
        return Path(tempfile.gettempdir()) / f"fabric-{os.getuid()}" / self.job / self.replica

    @property
    def min_replicas(self) -> int:
        """How many members a step needs."""
        return parse_replicas(self.replicas)[0]

    @property
    def token(self) -> bytes:
        """The job's token, empty without a token file."""
        return b"" if self.token_file is None else read_token(self.token_file).encode()


def parse_replicas(text: str) -> tuple[int, int]:
    """(least, start) of "3" or "2:8"; raises ConfigError."""
    parts = text.split(":")
    if len(parts) > 2 or not all(p.isdecimal() and 0 < int(p) <= 1_000_000 for p in parts):
        raise ConfigError(f'FABRIC_REPLICAS is "{text}": give a count such as 3, or a range such as 2:8')
    least, start = (1, int(parts[0])) if len(parts) == 1 else (int(parts[0]), int(parts[1]))
    if least > start:
        raise ConfigError(f'FABRIC_REPLICAS is "{text}": the first number must not exceed the second')
    return least, start


def settings(environment: Mapping[str, str] | None = None, **arguments: Any) -> Settings:
    """Settings from ``arguments`` (None: not given), else ``FABRIC_*`` variables, else defaults.

    Raises ConfigError naming the variable, for values that cannot be used.
    """
    environment = os.environ if environment is None else environment
    names = {f.name: f.type for f in fields(Settings)}
    unknown = set(arguments) - set(names)
    if unknown:
        raise ConfigError(f"unknown setting {sorted(unknown)[0]}: known are {', '.join(sorted(names))}")
    values = {k: v for k, v in arguments.items() if v is not None}
    for name in names:
        text = environment.get(_variable(name), "")
        if name not in values and text:
            values[name] = _parse(name, text)
    return _checked(Settings(**values), environment)


def _variable(name: str) -> str:
    return "FABRIC_TEST_POINTS" if name == "points" else f"FABRIC_{name.upper()}"


def _parse(name: str, text: str) -> Any:
    default = getattr(_DEFAULTS, name)
    if name in ("token_file", "run_dir", "journal"):
        return Path(text)
    if name == "lighthouse":
        return tuple(part.strip().rstrip("/") for part in text.split(",") if part.strip())
    if isinstance(default, bool):
        return text.lower() not in ("0", "false", "no")
    try:
        return type(default)(text)
    except ValueError:
        raise ConfigError(f'{_variable(name)} is "{text}": it must be a {type(default).__name__}') from None


def _checked(found: Settings, environment: Mapping[str, str]) -> Settings:
    parse_replicas(found.replicas)
    if found.disable:
        return found
    world = environment.get("WORLD_SIZE", "1")
    if world != "1":
        raise ConfigError(
            f"WORLD_SIZE is {world}: a replica of several processes is not supported yet; "
            "run one process per replica, each in its own torchrun world"
        )
    if not found.lighthouse:
        raise ConfigError(
            "no lighthouse is named: set FABRIC_LIGHTHOUSE=http://host:port (or FABRIC_DISABLE=1)"
        )
    for url in found.lighthouse:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f'FABRIC_LIGHTHOUSE has "{url}": give URLs such as http://host:port')
    for name in ("job", "replica"):
        _check_name(name, getattr(found, name))
    for name in ("contact_s", "exchange_s", "autonomy_s", "digest_every", "snapshot_share", "orphan_s"):
        value = getattr(found, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{_variable(name)} is {value:g}: give a finite number from 0")
    if found.exchange_s <= 0 or found.autonomy_s < found.exchange_s:
        raise ConfigError(
            f"autonomy_s ({found.autonomy_s:g}) must be at least exchange_s "
            f"({found.exchange_s:g}), both above 0"
        )
    return found


def _check_name(what: str, name: str) -> None:
    allowed = all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
    if not name or len(name) > 64 or not allowed:
        raise ConfigError(
            f'FABRIC_{what.upper()} is "{name}": give a name of 1 to 64 letters, digits, ".", "_" or "-"'
        )


def advertised_host(found: Settings) -> str:
    """The host name or address that peers dial: what was set, else the bound address itself."""
    if found.advertise:
        return found.advertise
    if found.bind in ("0.0.0.0", "::", ""):
        return socket.gethostname()
    return found.bind


_DEFAULTS = Settings()
