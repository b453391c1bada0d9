"""Opens several handles on one store of any backend, for the contract tests."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fabric.store.base import Store

DEADLINE_S = 20.0

Answer = TypeVar("Answer")


class Backend:
    """One store; ``open`` returns a connected handle, and ``close`` closes all handles."""

    def __init__(self, name: str, make: Callable[[], Store]) -> None:
        self.name = name
        self.make = make
        self.handles: list[Store] = []

    async def open(self) -> Store:
        store = self.make()
        self.handles.append(store)
        await store.connect()
        return store

    async def close(self) -> None:
        for store in self.handles:
            await store.close()


async def soon(awaitable: Awaitable[Answer]) -> Answer:
    """Await with a deadline that only a broken store reaches."""
    return await asyncio.wait_for(awaitable, DEADLINE_S)


async def wait_for(condition: Callable[[], Awaitable[object]], what: str) -> None:
    """Poll an asynchronous condition until it is true."""
    end = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < end, f"still waiting after {DEADLINE_S} s: {what}"
        await asyncio.sleep(0.02)
