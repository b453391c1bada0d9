"""The storage of durable checkpoints: the few operations that they need, on a local folder or any fsspec URL.

A write is durable when ``create`` or ``put`` returns: on a local file system after an fsync of the
file and its folder, elsewhere when the service has taken the whole object.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from fabric.errors import StateError
from fabric.runtime.config import check_no_password

_PROBE = ".fabric-probe"
# Storage says this of a file or a name, and says it again at every try.
_LASTING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, ValueError)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # a person must make room, or mount it for writing


class StorageError(StateError):
    """The storage has failed; the message names the file and the storage's reason."""


class StorageAway(StorageError):
    """The storage did not answer, or answered with an error that may pass; the file may be whole."""


class Storage:
    """One folder. ``url`` is a path or ``protocol://...``; credentials come from fsspec's own
    configuration."""

    def __init__(self, url: str) -> None:
        check_no_password("the storage's URL", url)
        self.url = url.rstrip("/") or url
        with storage_errors("opened", url):
            self._fs, path = fsspec.core.url_to_fs(url)
        self._path: str = path.rstrip("/") or path
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def at(self, name: str) -> "Storage":
        """Return the folder ``name`` inside this one."""
        return Storage(f"{self.url}/{name}")

    def where(self, name: str) -> str:
        """Return the full name of the file ``name``, for messages."""
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        """Return the names directly in this folder; none where the folder is missing. Raises StorageError."""
        with storage_errors("listed", self.url):
            try:
                self._fs.invalidate_cache()
                paths = self._fs.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in paths)

    def is_there(self) -> bool:
        """Whether this folder exists; always True for storage that is not local. Raises StorageError."""
        with storage_errors("looked at", self.url):
            return not self._is_local or bool(self._fs.isdir(self._path))

    def make(self) -> None:
        """Make this folder and its parents. Raises StorageError.

        No other method makes a folder. If a mounted storage vanishes during a write, the write must fail, and
        not make a folder on the disk under the mount point.
        """
        with storage_errors("written", self.url):
            self._fs.makedirs(self._path, exist_ok=True)

    def try_writing(self) -> None:
        """Make the folder, and write a small file in it. Raises StorageError.

        The file stays where nothing may be deleted; checkpoints can be written there.
        """
        self.make()
        with self.create(_PROBE) as file:
            file.write(b"may this be written?\n")
        with contextlib.suppress(StorageError):
            self.remove(_PROBE)

    def size(self, name: str) -> int:
        """Return the number of bytes in the file. Raises StorageError."""
        with storage_errors("looked at", self.where(name)):
            return int(self._fs.size(self._full(name)))

    def get(self, name: str, most: int) -> bytes:
        """Return the whole small file. Raises StorageError, also where it has more than ``most`` bytes."""
        with self.open(name) as file, storage_errors("read", self.where(name)):
            data: bytes = file.read(most + 1)
        if len(data) > most:
            raise StorageError(f"{self.where(name)} has more than {most} bytes; it is damaged")
        return data

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Any]:
        """Open a file for reading, with seek and readinto; see also ``read_into``."""
        with storage_errors("opened", self.where(name)):
            # Opening a pipe without a writer would wait for ever.
            if self._is_local and not stat.S_ISREG(os.stat(self._full(name)).st_mode):  # noqa: PTH116
                raise StorageError(f"{self.where(name)} is no plain file: delete it")
            file = self._fs.open(self._full(name), "rb")
        try:
            yield file
        finally:
            file.close()

    def read_into(self, file: Any, name: str, begin: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``begin`` of the open ``file`` called ``name``. Raises StorageError."""
        filled = 0
        with storage_errors("read", self.where(name)):
            file.seek(begin)
            while filled < len(into):
                count = file.readinto(into[filled:])
                if not count:
                    break
                filled += count
        if filled < len(into):
            raise StorageError(
                f"{self.where(name)} ends at byte {begin + filled} and should go on to {begin + len(into)};"
                " it is damaged"
            )

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """Open a new file for writing, in place of an old one; durable after the block. Raises
        StorageError."""
        with storage_errors("written", self.where(name)):
            file = self._fs.open(self._full(name), "wb")
            try:
                yield file
                file.flush()
                if self._is_local:
                    os.fsync(file.fileno())
            finally:
                file.close()
            self._settle()

    def put(self, name: str, data: bytes) -> None:
        """Write a small file; readers see all of it or no file. Raises StorageError."""
        if not self._is_local:
            with self.create(name) as file:
                file.write(data)
            return
        with self.create(f"{name}.part") as file:
            file.write(data)
        with storage_errors("written", self.where(name)):
            os.replace(self._full(f"{name}.part"), self._full(name))  # noqa: PTH105 - fsspec gives strings
            self._settle()

    def remove(self, name: str) -> None:
        """Delete a file if it exists. Raises StorageError."""
        with storage_errors("deleted", self.where(name)), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._full(name))
            self._settle()

    def is_link(self) -> bool:
        """Whether this folder is a symbolic link to another one. Raises StorageError."""
        with storage_errors("looked at", self.url):
            return self._is_local and os.path.islink(self._path)  # noqa: PTH114 - fsspec gives strings

    def remove_folder(self) -> None:
        """Delete this folder and all that is in it. Raises StorageError."""
        with storage_errors("deleted", self.url), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path, recursive=True)

    def _full(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _settle(self) -> None:
        """Make the names in the folder durable."""
        if self._is_local:
            folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


@contextlib.contextmanager
def storage_errors(what: str, where: str) -> Iterator[None]:
    """Turn any error of the block into a StorageError: ``where`` could not be ``what`` (written)."""
    try:
        yield
    except (StateError, KeyboardInterrupt):
        raise
    # File systems are plug-ins: each raises the errors of its own client library.
    except Exception as error:
        reason = _reason(error) or " ".join(str(error).split())[:300] or type(error).__name__
        lasts = isinstance(error, _LASTING) or (isinstance(error, OSError) and error.errno in _FULL)
        kind = StorageError if lasts else StorageAway
        raise kind(f"{where} could not be {what}: {reason}") from error


def _reason(error: BaseException | None) -> str:
    """Return the operating system's reason below a library's own error; else empty."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return ""
