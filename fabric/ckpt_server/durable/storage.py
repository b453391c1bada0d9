"""The storage of durable checkpoints: the few operations that they need, on a local folder or any fsspec URL.

A write is durable when ``create`` or ``put`` returns: on a local file system after an fsync of the
file and its folder, elsewhere when the service has taken the whole object.
"""

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Generic, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from fabric.errors import StateError
from fabric.runtime.config import check_no_password

_PROBE = ".fabric-probe"
# Storage says this of a file or a name, and says it again at every try.
_LASTING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, ValueError)
T = TypeVar("T")
ANSWER_S = 10.0  # after this time a caller says that storage is slow
_FULL = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
)  # a person must make room, or mount it for writing


class StorageError(StateError):
    """The storage has failed; the message names the file and the storage's reason."""


class StorageAway(StorageError):
    """The storage did not answer, or answered with an error that may pass; the file may be whole."""


class StorageGone(StorageAway):
    """A folder that this job has made is not there, as after its file system was unmounted."""


class NoAnswer(StorageError):
    """Storage has neither answered nor failed yet."""


class StorageCall(Generic[T]):
    """A call to storage in a separate thread.

    A mount whose server has vanished blocks for ever, and no call to it can be interrupted.
    """

    def __init__(self, url: str, call: Callable[[], T]) -> None:
        self._url, self._call, self._began = url, call, time.monotonic()
        self._outcome: Future[T] = Future()
        threading.Thread(target=self._run, name="fabric-storage", daemon=True).start()

    def wait(self, seconds: float = ANSWER_S) -> T:
        """Return the call's value. Raises its error; NoAnswer if there is neither after ``seconds``."""
        try:
            return self._outcome.result(seconds)
        except FutureTimeoutError:
            gone_s = time.monotonic() - self._began
            raise NoAnswer(f"{self._url} has not answered for {gone_s:.0f} s") from None

    def _run(self) -> None:
        try:
            self._outcome.set_result(self._call())
        except Exception as error:  # noqa: BLE001  (``wait`` raises it)
            self._outcome.set_exception(error)


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

    def try_writing(self) -> bool:
        """Make the folder, and write a small file in it; return whether it is new. Raises StorageError.

        The file stays where nothing may be deleted; checkpoints can be written there.
        """
        is_new = not self.is_there()
        self.make()
        with self.create(_PROBE) as file:
            file.write(b"may this be written?\n")
        with contextlib.suppress(StorageError):
            self.remove(_PROBE)
        return is_new

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
        with storage_errors("written", self.where(name), missing=StorageGone):
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
def storage_errors(what: str, where: str, missing: type[StorageError] = StorageError) -> Iterator[None]:
    """Turn any error of the block into a StorageError: ``where`` could not be ``what`` (written).

    ``missing``: the kind of the error where a file or folder is not there."""
    try:
        yield
    except (StateError, KeyboardInterrupt):
        raise
    # File systems are plug-ins: each raises the errors of its own client library.
    except Exception as error:
        cause = _cause(error)
        reason = cause.strerror if isinstance(cause, OSError) else ""
        reason = reason or " ".join(str(error).split())[:300] or type(error).__name__
        lasts = isinstance(cause, _LASTING) or (isinstance(cause, OSError) and cause.errno in _FULL)
        kind = StorageError if lasts else StorageAway
        if isinstance(cause, FileNotFoundError | NotADirectoryError):
            kind = missing
        raise kind(f"{where} could not be {what}: {reason}") from error


def _cause(error: BaseException) -> BaseException:
    """Return the operating system's error below a library's own error; else the error."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError) and below.strerror:
            return below
        below = below.__cause__ or below.__context__
    return error
