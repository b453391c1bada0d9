"""Writes to the store from a separate thread.

A write takes eight turns of an event loop, to connect, send, and read the answer. With 10,000 sessions a turn
of the lighthouse's loop takes some 50 ms. In that loop, an epoch would be in the store long before its
members hear of it. From this thread a write costs one turn of that loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from fabric.errors import LeaseGone, StoreError, StoreIndefinite, StoreUnavailable
from fabric.runtime.tasks import BackgroundLoop
from fabric.store import Compare, Operation, Store

# The arguments, answer and errors are those of ``Store.commit``.
Commit = Callable[[Sequence[Compare], Sequence[Operation]], Awaitable[int | None]]


class StoreThread:
    """``store``: this thread's own handle; the first write connects it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._side = BackgroundLoop("fabric-writes")
        self._connecting = asyncio.Lock()
        self._is_connected = False

    async def commit(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        return await asyncio.wrap_future(self._side.start(self._commit(compares, operations)))

    async def close(self) -> None:
        """Give up the handle and end the thread."""
        await asyncio.wrap_future(self._side.start(self._store.close()))
        self._side.close()

    async def _commit(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        async with self._connecting:
            if not self._is_connected:
                await self._store.connect()
                self._is_connected = True
        try:
            return await self._store.commit(compares, operations)
        except (StoreUnavailable, StoreIndefinite, LeaseGone):
            raise
        except StoreError:
            # The store may have been wiped or replaced; a connected handle refuses another store for ever.
            self._is_connected = False
            await self._store.close()
            raise
