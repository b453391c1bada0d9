"""Folders and files of this user alone, also where other users could create a file there first.

A run folder may lie where every user of the host may write, for instance in ``/tmp``, and its name can be
guessed. So no file in it is trusted by its name. The folder, and each folder above it up to the first one of
root, must be this user's. A file in it must be a plain file of this user. For a socket there, the kernel says
which user's process is at the other end.
"""

import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fabric.errors import ConfigError

_CREDENTIALS = struct.Struct("iII")
_ROOT = 0
_REMEDY = "name another folder in FABRIC_RUN_DIR, or have its owner remove it"


def make_private(folder: Path) -> None:
    """Make ``folder``, and the missing folders above it, with mode 0700. Existing ones stay as they are.

    Raises ConfigError where no folder can be made that this user alone may write to.
    """
    folder = folder.absolute()
    missing = []
    above = folder
    while not _is_there(above):
        missing.append(above)
        above = above.parent
    _check(above, is_last=not missing)
    for each in reversed(missing):
        try:
            each.mkdir(mode=0o700)
        except FileExistsError:
            pass  # another process made it first: the next check finds its owner
        except OSError as error:
            raise ConfigError(_unusable(folder, error.strerror)) from error
    _check(folder, is_last=True)
    if foreign := _foreign_file(folder):
        raise ConfigError(
            f"the folder {folder} holds {foreign}, which belongs to another user: use a folder of its own"
        )


def open_private(path: Path, flags: int) -> int:
    """Open the plain file at ``path``; make it with mode 0600 where ``flags`` say so.

    Raises OSError, and ConfigError where a link, another kind of file or another user's file is there.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link, or a pipe without a reader
            raise ConfigError(f"{path} is not a plain file of this user alone: {_REMEDY}") from error
        raise
    there = os.fstat(descriptor)
    if not stat.S_ISREG(there.st_mode) or there.st_uid != os.geteuid() or there.st_nlink > 1:
        os.close(descriptor)
        raise ConfigError(f"{path} is not a plain file of this user alone: {_REMEDY}")
    os.set_blocking(descriptor, True)
    return descriptor


def rank_folder(home: Path, rank: int) -> Path:
    """Return the folder of one rank of the replica whose folder is ``home``."""
    return home / f"rank{rank}" if rank else home


@contextmanager
def socket_path(run_dir: Path, name: str) -> Iterator[str]:
    """Give a short path of the socket ``name`` in ``run_dir``, valid inside the block. Raises OSError.

    A unix socket's path may have 107 bytes only, so the socket is named through its folder's descriptor.
    """
    folder = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{name}"
    finally:
        os.close(folder)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the (pid, uid) of the process at the other end of a unix socket, from the kernel."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def check_peer(connection: socket.socket, name: str) -> None:
    """Raise ConfigError where the process at the other end of a unix socket is another user's."""
    user = peer_of(connection)[1]
    if user != os.geteuid():
        raise ConfigError(
            f"{name} is answered by a process of user {user}, and this is user {os.geteuid()}: {_REMEDY}"
        )


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(_unusable(path, error.strerror)) from error
    return True


def _check(folder: Path, *, is_last: bool) -> None:
    """Check ``folder``, and the folders above it up to the first of another user."""
    there = folder.lstat()
    if is_last:
        if not stat.S_ISDIR(there.st_mode):
            kind = "it is a symbolic link" if stat.S_ISLNK(there.st_mode) else "File exists"
            raise ConfigError(_unusable(folder, kind))
        if there.st_uid != os.geteuid():
            raise ConfigError(f"the folder {folder} belongs to user {there.st_uid}: {_REMEDY}")
        if there.st_mode & 0o022:
            raise ConfigError(
                f"other users can write to the folder {folder}: give it mode 0700, or name another one in"
                " FABRIC_RUN_DIR"
            )
        folder = folder.parent
        there = folder.lstat()
    while there.st_uid == os.geteuid() != _ROOT:
        if there.st_mode & 0o002 and not (there.st_mode & stat.S_ISVTX or stat.S_ISLNK(there.st_mode)):
            raise ConfigError(
                f"every user can replace what lies in {folder}: chmod o-w it, or name another folder in"
                " FABRIC_RUN_DIR"
            )
        folder = folder.parent
        there = folder.lstat()
    if there.st_uid not in (os.geteuid(), _ROOT, _unmapped_user()):
        raise ConfigError(f"the folder {folder} belongs to user {there.st_uid}: {_REMEDY}")


def _unusable(folder: Path, why: str | None) -> str:
    return f"the folder {folder} cannot be used ({why}): name one of this user in FABRIC_RUN_DIR"


def _unmapped_user() -> int:
    """Return the user that owns, as seen here, the files of users outside of this user namespace."""
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:
            return _ROOT
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return _ROOT


def _foreign_file(folder: Path) -> str:
    """Name a file in ``folder`` of another user; empty for none."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                    return entry.name
            except FileNotFoundError:
                continue  # another process has removed the file
    return ""
