"""The folder of a demo run: its file names, and the check that it is a demo's before it is replaced."""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from fabric.errors import ConfigError

MARKER = ".fabric-demo"
_OURS = (
    "journal",
    "run",
    "log",
    "token",
    "lighthouse.json",
    "lighthouse.db",
    "lighthouse.db-wal",
    "lighthouse.db-shm",
    "supervisor.jsonl",
    "summary.json",
    "report.html",
    "events.jsonl",
)


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[Path]:
    """Make ``directory`` ready for a new run and lock it; yields its absolute path.

    The files of an earlier run in it are removed, anything else stays. Raises ConfigError where it
    holds files and is not the folder of a demo, cannot be written, or belongs to a running demo.
    """
    directory = directory.absolute()
    marker = directory / MARKER
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not marker.exists() and any(directory.iterdir()):
            raise ConfigError(
                f"{directory} holds files and is not the folder of an earlier demo; name another with "
                "--out, or empty it."
            )
        descriptor = os.open(marker, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be used ({error.strerror}); name a folder that can be written with --out."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"Another demo is running in {directory}; wait for it or name another folder with --out."
            ) from None
        _lay_out(directory)
        yield directory
    finally:
        os.close(descriptor)


def _lay_out(directory: Path) -> None:
    try:
        for name in _OURS:
            path = directory / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for name in ("journal", "run", "log"):
            (directory / name).mkdir(mode=0o700)
        descriptor = os.open(directory / "token", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be replaced: {error.strerror}.") from error
