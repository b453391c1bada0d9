"""One SQLite file as a store: ``SqliteFile`` blocks, and ``SqliteStore`` calls it in one thread of its own.

The problem: several processes on one machine share a file, any of them may be killed in mid-commit, and
leases must end even when no process runs. The mechanism: write-ahead log with ``synchronous=FULL`` (a commit
that returned survives a power cut), every transaction ``BEGIN IMMEDIATE`` (no other process writes between
guard and change).

Leases are deadlines on the monotonic clock, which all processes of one machine share and which no change of
the wall clock moves. That clock starts again with the machine, so each lease also names the boot it was
granted in: after a reboot all leases have ended, as their holders have. For the same reason the file must not
be shared between machines. Each process deletes expired leases before it reads or writes.

A file that was removed or replaced while in use would silently split the store in two (SQLite goes on with
the unlinked one), so each transaction first checks the file's identity.
"""

import asyncio
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from fabric.errors import StoreError, StoreIndefinite, StoreReplaced, StoreUnavailable
from fabric.runtime.system_calls import boot_id
from fabric.store.base import (
    MAX_LISTED_KEYS,
    Compare,
    KeyValue,
    Lease,
    Operation,
    Put,
    check_transaction,
    check_ttl,
    key_bytes,
    key_range,
    key_text,
    lease_gone,
    settle_store_id,
)

APPLICATION_ID = 0x46414252
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE store (one INTEGER PRIMARY KEY CHECK (one = 1), revision INTEGER NOT NULL);
CREATE TABLE keys (
    key BLOB PRIMARY KEY, value BLOB NOT NULL,
    create_revision INTEGER NOT NULL, mod_revision INTEGER NOT NULL, lease INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE leases (
    id INTEGER PRIMARY KEY, ttl_s REAL NOT NULL, deadline_s REAL NOT NULL, boot TEXT NOT NULL
);
INSERT INTO store VALUES (1, 1);
"""


class SqliteFile:
    """The open file. All methods raise StoreError, StoreUnavailable or StoreIndefinite."""

    def __init__(
        self,
        path: Path,
        *,
        busy_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        boot: str = "",
    ) -> None:
        self._path = path
        self._clock = clock
        self._boot = boot or boot_id()
        self._busy_timeout_s = busy_timeout_s
        self._identity = (0, 0)
        self.warnings: list[str] = []
        self._connection = self._opened()

    def get(self, key: str) -> KeyValue | None:
        with self._reading() as connection:
            query = "SELECT key, value, create_revision, mod_revision, lease FROM keys WHERE key = ?"
            row = connection.execute(query, (key.encode(),)).fetchone()
        return None if row is None else _key_value(*row)

    def find(self, prefix: str) -> tuple[list[KeyValue], int]:
        start, end = key_range(prefix)
        # A key is UTF-8 text, which never contains 0xff.
        bounds = (start, b"\xff" if end == b"\0" else end, MAX_LISTED_KEYS + 1)
        with self._reading() as connection:
            query = (
                "SELECT key, value, create_revision, mod_revision, lease FROM keys "
                "WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
            )
            rows = connection.execute(query, bounds).fetchall()
            revision = self._revision()
        if len(rows) > MAX_LISTED_KEYS:
            raise StoreError(f"More than {MAX_LISTED_KEYS} keys start with {prefix!r}: list a longer prefix.")
        return [_key_value(*row) for row in rows], revision

    def commit(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        with self._writing() as connection:
            self._expire()
            query = "SELECT create_revision, mod_revision FROM keys WHERE key = ?"
            for compare in compares:
                if not compare.holds(
                    *connection.execute(query, (key_bytes(compare.key),)).fetchone() or (0, 0)
                ):
                    return None
            query = "SELECT 1 FROM leases WHERE id = ?"
            for operation in operations:
                lease = operation.lease if isinstance(operation, Put) else 0
                if lease and connection.execute(query, (lease,)).fetchone() is None:
                    raise lease_gone(lease)
            self._apply(operations)
            return self._revision()

    def grant(self, ttl_s: float) -> Lease:
        with self._writing() as connection:
            self._expire()
            lease = Lease(secrets.randbelow(1 << 62) + 1, ttl_s)
            connection.execute(
                "INSERT INTO leases VALUES (?, ?, ?, ?)", (lease.id, ttl_s, self._clock() + ttl_s, self._boot)
            )
        return lease

    def keep_alive(self, lease_id: int) -> float:
        with self._writing() as connection:
            self._expire()
            row = connection.execute("SELECT ttl_s FROM leases WHERE id = ?", (lease_id,)).fetchone()
            if row is None:
                raise lease_gone(lease_id)
            ttl_s = float(row[0])
            connection.execute(
                "UPDATE leases SET deadline_s = ? WHERE id = ?", (self._clock() + ttl_s, lease_id)
            )
        return ttl_s

    def revoke(self, lease_id: int) -> None:
        with self._writing():
            self._end_lease(lease_id)

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._connection.close()

    def _opened(self) -> sqlite3.Connection:
        if not self._path.parent.is_dir():
            raise StoreError(
                f"The store cannot be at {self._path}: the directory {self._path.parent} does not exist, "
                "create it or name another path."
            )
        connection = None
        try:
            # Close it to other users, because a reader can lock it. SQLite gives its other files this mode.
            with suppress(OSError):  # the file exists already, or SQLite will say why it cannot be made
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
            connection = sqlite3.connect(self._path, timeout=self._busy_timeout_s, isolation_level=None)
            self._connection = connection
            self._prepare(connection)
            status = self._path.stat()
        except (sqlite3.Error, OSError, StoreError) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, StoreError):
                raise
            raise self._translated(error) from error
        self._identity = (status.st_dev, status.st_ino)
        if status.st_mode & 0o077:
            self.warnings.append(
                f"others on this machine can open the store {self._path}, and stop every lighthouse on it"
                f" by a lock: chmod 600 {self._path}*"
            )
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        # Before the first change, check whether this file is ours, new, or another program's.
        with self._transaction("BEGIN"):
            self._check_owner(connection)
        self._switch_to_log(connection)
        connection.execute("PRAGMA synchronous=FULL")
        with self._transaction("BEGIN IMMEDIATE"):
            if self._check_owner(connection):
                for statement in SCHEMA.strip().split(";\n"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            # SQLite opens a read-only file without an error: find out now whether the file is writable.
            connection.execute("UPDATE store SET revision = revision")
            damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if damage != "ok":
                shown = " ".join(str(damage).split())[:120]
                raise StoreError(
                    f"The store {self._path} is damaged ({shown}): move it away to start an empty one, or "
                    "restore a copy."
                )

    def _switch_to_log(self, connection: sqlite3.Connection) -> None:
        """Enter WAL mode. SQLite does not wait for its lock here, so this method does: another process may
        open the file too."""
        deadline_s = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorname != "SQLITE_BUSY" or time.monotonic() > deadline_s:
                    raise
            time.sleep(secrets.randbelow(10_000) / 1e6)
        if mode != "wal":
            raise StoreError(
                f"The store cannot be at {self._path}: its file system offers no shared memory for SQLite "
                "(a network file system?), put it on a local disk."
            )

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        """Give the connection in a transaction, which an error in the block takes back."""
        try:
            self._connection.execute(begin)
            try:
                yield self._connection
            except BaseException:
                self._roll_back()
                raise
        except sqlite3.Error as error:
            raise self._translated(error) from error
        try:
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            # The log may or may not hold a complete transaction: the next open of the file decides.
            self._roll_back()
            raise StoreIndefinite(
                f"The store {self._path} did not confirm a write ({error}): read it again before going on."
            ) from error

    def _check_owner(self, connection: sqlite3.Connection) -> bool:
        """Whether the file is new. Raises StoreError when another program or version made it."""
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application == APPLICATION_ID and version == SCHEMA_VERSION:
            return False
        if application == APPLICATION_ID:
            raise StoreError(
                f"The store {self._path} has format {version}, this release reads {SCHEMA_VERSION}: "
                "use the release that wrote it, or another path."
            )
        if tables or application:
            raise StoreError(f"{self._path} is another program's SQLite file: name another path.")
        return True

    def _check_identity(self) -> None:
        try:
            status = self._path.stat()
            same = (status.st_dev, status.st_ino) == self._identity
        except OSError:
            same = False
        if not same:
            raise StoreReplaced(
                f"The store {self._path} was removed or replaced while in use: stop all processes that use "
                "it and start them again."
            )

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Give a consistent view without expired leases."""
        self._check_identity()
        with self._transaction("BEGIN"):
            expired = self._expired()
        if expired:
            with self._writing():
                self._expire()
        with self._transaction("BEGIN") as connection:
            yield connection

    def _writing(self) -> AbstractContextManager[sqlite3.Connection]:
        self._check_identity()
        return self._transaction("BEGIN IMMEDIATE")

    def _roll_back(self) -> None:
        # After some errors SQLite has already ended the transaction, and a failed disk may refuse.
        with suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _revision(self) -> int:
        return int(self._connection.execute("SELECT revision FROM store").fetchone()[0])

    def _expired(self) -> list[int]:
        now_s = self._clock()
        # A lease whose deadline is further away than its TTL was counted on another clock: it has ended as
        # well. The extra second in this comparison allows for rounding.
        query = "SELECT id FROM leases WHERE deadline_s <= ? OR boot != ? OR deadline_s - ttl_s > ? + 1"
        return sorted(int(row[0]) for row in self._connection.execute(query, (now_s, self._boot, now_s)))

    def _expire(self) -> None:
        for lease_id in self._expired():
            self._end_lease(lease_id)

    def _end_lease(self, lease_id: int) -> None:
        self._connection.execute("DELETE FROM leases WHERE id = ?", (lease_id,))
        if self._connection.execute("DELETE FROM keys WHERE lease = ?", (lease_id,)).rowcount:
            self._connection.execute("UPDATE store SET revision = revision + 1")

    def _apply(self, operations: Sequence[Operation]) -> None:
        """Apply the operations as one revision, in the open transaction; without a change there is none."""
        execute = self._connection.execute
        revision = self._revision() + 1
        changes = 0
        for operation in operations:
            key = key_bytes(operation.key)
            if isinstance(operation, Put):
                before = execute("SELECT create_revision FROM keys WHERE key = ?", (key,)).fetchone()
                row = (
                    key,
                    bytes(operation.value),
                    before[0] if before else revision,
                    revision,
                    operation.lease,
                )
                changes += execute("REPLACE INTO keys VALUES (?, ?, ?, ?, ?)", row).rowcount
            else:
                changes += execute("DELETE FROM keys WHERE key = ?", (key,)).rowcount
        if changes:
            execute("UPDATE store SET revision = ?", (revision,))

    def _translated(self, error: sqlite3.Error | OSError) -> StoreError:
        name = getattr(error, "sqlite_errorname", "") or ""
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return StoreUnavailable(
                f"The store {self._path} was kept locked by another process for too long: nothing was "
                "written, try again, or look who holds it."
            )
        for prefix, what in _WHAT_TO_DO.items():
            if name.startswith(prefix):
                return StoreError(f"The store {self._path} cannot be used: {what}.")
        return StoreError(f"The store {self._path} cannot be used ({error}): check the file and its disk.")


_WHAT_TO_DO = {
    "SQLITE_READONLY": "it or its directory is read-only for this user, change the permissions or the path",
    "SQLITE_CANTOPEN": "this user may not open or create it, check that it is a file and the permissions",
    "SQLITE_NOTADB": "it is not an SQLite file, name another path",
    "SQLITE_CORRUPT": "it is damaged, move it away to start an empty one or restore a copy",
    "SQLITE_FULL": "its disk is full, free some space",
}


def _key_value(key: bytes, value: bytes, created: int, modified: int, lease: int) -> KeyValue:
    return KeyValue(key_text(bytes(key)), bytes(value), created, modified, lease)


Answer = TypeVar("Answer")


class SqliteStore:
    """A handle on the file at ``path``; it and its directory must be writable, the file need not exist.

    The handle's own thread makes all blocking calls, in order, so the event loop never waits for a disk and
    SQLite sees one thread. See ``SqliteFile`` for leases and reboots.
    """

    def __init__(self, path: Path, *, attempt_timeout_s: float) -> None:
        self.warnings: list[str] = []
        self._path = path
        self._attempt_timeout_s = attempt_timeout_s
        self._file: SqliteFile | None = None
        self._problem = ""
        self._thread: ThreadPoolExecutor | None = None

    async def connect(self) -> str:
        if self._file is None:
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fabric-store")
            loop = asyncio.get_running_loop()
            try:
                self._file = await loop.run_in_executor(
                    thread, lambda: SqliteFile(self._path, busy_timeout_s=self._attempt_timeout_s)
                )
            except BaseException as error:
                self._problem = str(error) if isinstance(error, StoreError) else ""
                thread.shutdown(wait=False)
                raise
            self._thread, self._problem = thread, ""
            self.warnings = self._file.warnings
        return await settle_store_id(self)

    async def get(self, key: str) -> KeyValue | None:
        key_bytes(key)
        return await self._call(lambda file: file.get(key))

    async def list(self, prefix: str) -> tuple[list[KeyValue], int]:
        key_range(prefix)
        return await self._call(lambda file: file.find(prefix))

    async def commit(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        check_transaction(compares, operations)
        return await self._call(lambda file: file.commit(compares, operations))

    async def grant_lease(self, ttl_s: float) -> Lease:
        check_ttl(ttl_s)
        return await self._call(lambda file: file.grant(ttl_s))

    async def keep_alive(self, lease_id: int) -> float:
        return await self._call(lambda file: file.keep_alive(lease_id))

    async def revoke(self, lease_id: int) -> None:
        await self._call(lambda file: file.revoke(lease_id))

    async def close(self) -> None:
        file, thread = self._file, self._thread
        self._file = self._thread = None
        if file is not None and thread is not None:
            await asyncio.get_running_loop().run_in_executor(thread, file.close)
            thread.shutdown(wait=False)

    async def _call(self, operation: Callable[[SqliteFile], Answer]) -> Answer:
        file, thread = self._file, self._thread
        if file is None or thread is None:
            # Prefer the reason of the last failed attempt to connect.
            unasked = f"The store {self._path} is not connected: call connect() first."
            raise StoreError(self._problem or unasked)
        return await asyncio.get_running_loop().run_in_executor(thread, operation, file)
