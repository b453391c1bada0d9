"""The folder of a demo run: its file names, its subfolders and its token."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from fabric.errors import ConfigError
from fabric.runtime import claimed_folder
from fabric.runtime.claimed_folder import FolderUse

MARKER = ".fabric-demo"
_USE = FolderUse(
    "demo",
    MARKER,
    (
        "journal",
        "run",
        "log",
        "token",
        "auth",
        "lighthouse.json",
        "lighthouse.db",
        "lighthouse.db-wal",
        "lighthouse.db-shm",
        "supervisor.jsonl",
        "summary.json",
        "report.html",
        "events.jsonl",
    ),
)


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[Path]:
    """Claim ``directory`` for a new run, and lay it out. Raises ConfigError as ``claimed_folder`` does."""
    with claimed_folder.claimed(directory, _USE) as path:
        _lay_out(path)
        yield path


def _lay_out(directory: Path) -> None:
    try:
        for name in ("journal", "run", "log"):
            (directory / name).mkdir(mode=0o700)
        token = secrets.token_hex(32)
        # curl reads its header from a file: every user of the host can read a command line.
        for name, line in (("token", token), ("auth", f"Authorization: Bearer {token}")):
            descriptor = os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(line + "\n")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be replaced: {error.strerror}.") from error
