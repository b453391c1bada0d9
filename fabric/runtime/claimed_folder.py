"""A folder for the output of one run of one command: checked, locked, and cleared of an earlier run."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fabric.errors import ConfigError
from fabric.runtime.private_folder import open_private


@dataclass(frozen=True, slots=True)
class FolderUse:
    """The command that uses the folder, and the names that it makes there."""

    what: str  # the command in a sentence: "demo"
    marker: str  # file that marks a folder of this command
    names: Sequence[str]  # files and folders of an earlier run, which the next run removes


@contextlib.contextmanager
def claimed(directory: Path, use: FolderUse) -> Iterator[Path]:
    """Make ``directory`` ready for a new run and lock it; yields its absolute path.

    The files of an earlier run in it are removed, anything else stays. Raises ConfigError where it
    holds files and is not a folder of ``use``, cannot be written, or belongs to a running command. The run
    writes a token there, so the folder of another user, or one in which all users may write, is refused too.
    """
    directory = directory.absolute()
    marker = directory / use.marker
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _check_owner(directory)
        if not marker.exists() and any(directory.iterdir()):
            raise ConfigError(
                f"{directory} holds files and is not the folder of an earlier {use.what}; name another with "
                "--out, or empty it."
            )
        descriptor = open_private(marker, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be used ({error.strerror}); name a folder that can be written with --out."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"Another {use.what} is running in {directory}; wait for it or name another folder "
                "with --out."
            ) from None
        _clear(directory, use.names)
        yield directory
    finally:
        os.close(descriptor)


def _check_owner(directory: Path) -> None:
    there = directory.stat()
    if there.st_uid != os.geteuid():
        raise ConfigError(
            f"{directory} belongs to user {there.st_uid}, who could replace the token that this run writes "
            "there; name a folder of your own with --out."
        )
    if there.st_mode & 0o002:
        raise ConfigError(
            f"every user can write to {directory} and could replace the token that this run writes there; "
            "chmod o-w it, or name another folder with --out."
        )


def _clear(directory: Path, names: Sequence[str]) -> None:
    try:
        for path in (directory / name for name in names):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be replaced: {error.strerror}.") from error
