"""A process that shares an SQLite store with the test. ``sqlite_worker.py PATH ACTION ARGUMENT``:

``count N``   raise the number under ``/count`` N times by guarded commits, as others do too;
``pairs``     commit ``/left`` and ``/right`` with the same number for ever, saying each that is committed;
``hold``      apply a commit, say so before it is made durable, and wait to be killed;
``open``      only connect, and say the store's id or the error.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from fabric.errors import StoreError
from fabric.store import open_store
from fabric.store.base import Compare, Put, Store
from fabric.store.sqlite_file import SqliteFile


class HoldingFile(SqliteFile):
    """A file that stops at the named point between the operations of a transaction and its COMMIT."""

    def _apply(self, operations: Sequence[object]) -> None:
        super()._apply(operations)  # type: ignore[arg-type]
        say("in commit")
        sys.stdin.read()


def say(text: str) -> None:
    print(text, flush=True)


async def count(store: Store, times: int) -> None:
    for _ in range(times):
        while True:
            found = await store.get("/count")
            number = int(found.value) if found else 0
            guard = [Compare("/count", mod_revision=found.mod_revision if found else 0)]
            if await store.commit(guard, [Put("/count", str(number + 1).encode())]) is not None:
                break


async def pairs(store: Store) -> None:
    number = 0
    while True:
        number += 1
        value = str(number).encode()
        await store.commit([], [Put("/left", value), Put("/right", value)])
        say(str(number))


async def main() -> None:
    path, action, argument = sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else ""
    if action == "hold":
        file = HoldingFile(Path(path), busy_timeout_s=5)
        file.commit([], [Put("/left", b"never"), Put("/right", b"never")])
        return
    store = open_store(f"sqlite://{path}")
    try:
        store_id = await store.connect()
    except StoreError as error:
        say(str(error))
        return
    if action == "count":
        await count(store, int(argument))
    elif action == "pairs":
        await pairs(store)
    else:
        say(store_id)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main())
