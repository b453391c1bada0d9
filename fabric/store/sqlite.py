"""The store in an SQLite file, for all lighthouses of one machine: the asyncio half.

The handle's own thread makes all blocking calls, in order, so the event loop never waits for a disk and
SQLite sees one thread. A watch polls, because another process cannot notify it: one cheap indexed read every
``POLL_S``. A write through this handle wakes its watches at once. See ``sqlite_file`` for history, leases and
reboots.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from fabric.errors import StoreError
from fabric.store.base import (
    Compare,
    KeyValue,
    Lease,
    Operation,
    WatchEvent,
    check_transaction,
    check_ttl,
    check_watch,
    key_bytes,
    key_range,
    settle_store_id,
)
from fabric.store.sqlite_file import Cursor, SqliteFile

# The longest delay until a watch sees another process's write or the end of a lease.
POLL_S = 0.05

Answer = TypeVar("Answer")


class SqliteStore:
    """A handle on the file at ``path``; it and its directory must be writable, the file need not exist."""

    def __init__(self, path: Path, *, attempt_timeout_s: float) -> None:
        self.warnings: list[str] = []
        self._path = path
        self._attempt_timeout_s = attempt_timeout_s
        self._file: SqliteFile | None = None
        self._problem = ""
        self._thread: ThreadPoolExecutor | None = None
        self._wake = asyncio.Event()

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
        revision = await self._call(lambda file: file.commit(compares, operations))
        self._wake_watches()
        return revision

    async def grant_lease(self, ttl_s: float) -> Lease:
        check_ttl(ttl_s)
        return await self._call(lambda file: file.grant(ttl_s))

    async def keep_alive(self, lease_id: int) -> float:
        return await self._call(lambda file: file.keep_alive(lease_id))

    async def revoke(self, lease_id: int) -> None:
        await self._call(lambda file: file.revoke(lease_id))
        self._wake_watches()

    async def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[WatchEvent, None]:
        check_watch(from_revision)
        key_range(prefix)
        cursor: Cursor = (from_revision, 0)
        while True:
            wake = self._wake
            if self._file is None:
                return
            events, cursor = await self._call(partial(SqliteFile.changes, prefix=prefix, cursor=cursor))
            for event in events:
                yield event
            if not events:
                try:
                    async with asyncio.timeout(POLL_S):
                        await wake.wait()
                except TimeoutError:
                    continue

    async def close(self) -> None:
        file, thread = self._file, self._thread
        self._file = self._thread = None
        self._wake_watches()
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

    def _wake_watches(self) -> None:
        self._wake.set()
        self._wake = asyncio.Event()
