"""The settings of a checkpoint server: a trainer writes them as a command line, and the server reads it."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import field
from msgspec.structs import asdict

from fabric.errors import ConfigError
from fabric.model import Value
from fabric.runtime import logs
from fabric.runtime.http.tls import Tls


class ServerSettings(Value):
    """Each field is an option of ``python -m fabric.ckpt_server``; OPTIONS says what it means."""

    job: str
    replica: str
    run_dir: Path
    bind: str = "127.0.0.1"
    port: str = "0"
    advertise: str = ""
    token_file: Path | None = None
    tls_folder: Path | None = None
    lighthouse: tuple[str, ...] = ()
    orphan_s: float = 600.0
    rank: int = 0
    log: str = field(default_factory=logs.form)

    @property
    def tls(self) -> Tls:
        """The TLS of the server, and of its connection to the lighthouse."""
        return Tls(self.tls_folder)

    def arguments(self) -> list[str]:
        """The command line after the name of the module."""
        values = asdict(self)
        values["lighthouse"] = ",".join(self.lighthouse)
        # Join name and value with "=", so that a value which begins with a dash is not taken for an option.
        return [
            f"{option_of(name)}={value.absolute() if isinstance(value, Path) else value}"
            for name, value in values.items()
            if value is not None
        ]

    def check(self) -> None:
        """Raise ConfigError for settings that cannot be used."""
        for what, name in (("job", self.job), ("replica", self.replica)):
            if not name.isprintable() or not 0 < len(name) <= 200:
                raise ConfigError(f"the {what} {name[:40]!r} is no name: give 1 to 200 printable characters")
        for url in self.lighthouse:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(
                    f'the lighthouse "{url[:200]}" is no URL: give addresses such as http://host:port'
                )
        self.tls.check()
        if self.rank < 0:
            raise ConfigError(f"the rank is {self.rank}: give 0 or more")
        if not (self.orphan_s > 0 and math.isfinite(self.orphan_s)):
            raise ConfigError(f"orphan-s is {self.orphan_s}: give a number of seconds above 0")


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(url.strip() for url in text.split(",") if url.strip())


# Field -> the parser of its text, and its meaning.
OPTIONS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "job": (str, "name of the job"),
    "replica": (str, "name of this replica"),
    "run_dir": (Path, "folder of the replica, for the socket, lock and log"),
    "bind": (str, "address to listen on"),
    "port": (str, "port, range such as 8000-8010, or 0 for any"),
    "advertise": (str, "host name that others reach this one by; empty for the bound address"),
    "token_file": (Path, "file with the job's token"),
    "tls_folder": (Path, "folder with tls.crt, tls.key and ca.crt; none without TLS"),
    "lighthouse": (_addresses, "base URLs, separated by commas; empty to report to none"),
    "orphan_s": (float, "seconds to live without a trainer"),
    "rank": (int, "rank of the trainer within its replica; later ones may have other ranks"),
    "log": (str, "how to log: text, or a JSON object per line"),
}


def option_of(field_name: str) -> str:
    """The option that sets a field."""
    return f"--{field_name.replace('_', '-')}"
