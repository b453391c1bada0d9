"""The store in memory: it keeps the same promises as the stores of fabric.

``MemorySpace`` is the store itself, ``MemoryStore`` one handle on it; several handles of one process and one
event loop share a space, as several lighthouses share etcd. Nothing here awaits between reading and writing,
so a transaction is atomic without a lock. Every operation first ends the expired leases and deletes their
keys.
"""

import itertools
import time
from collections.abc import Callable, Sequence

from fabric.errors import StoreError
from fabric.store.base import (
    Compare,
    Delete,
    KeyValue,
    Lease,
    Operation,
    Put,
    check_transaction,
    check_ttl,
    key_bytes,
    key_range,
    lease_gone,
    settle_store_id,
)


class MemorySpace:
    """Keys and leases. ``clock`` gives monotonic seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.revision = 1
        self._clock = clock
        self._keys: dict[str, KeyValue] = {}
        self._ttl_by_lease: dict[int, float] = {}
        self._deadline_by_lease: dict[int, float] = {}
        self._lease_ids = itertools.count(1)

    def get(self, key: str) -> KeyValue | None:
        self._expire()
        return self._keys.get(key)

    def find(self, prefix: str) -> tuple[list[KeyValue], int]:
        self._expire()
        entries = [self._keys[key] for key in sorted(self._keys) if key.startswith(prefix)]
        return entries, self.revision

    def commit(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        self._expire()
        for compare in compares:
            now = self._keys.get(compare.key)
            if not compare.holds(now.create_revision if now else 0, now.mod_revision if now else 0):
                return None
        for operation in operations:
            if isinstance(operation, Put) and operation.lease and operation.lease not in self._ttl_by_lease:
                raise lease_gone(operation.lease)
        self._apply(operations)
        return self.revision

    def grant(self, ttl_s: float) -> Lease:
        lease = Lease(next(self._lease_ids), ttl_s)
        self._ttl_by_lease[lease.id] = ttl_s
        self._deadline_by_lease[lease.id] = self._clock() + ttl_s
        return lease

    def keep_alive(self, lease_id: int) -> float:
        self._expire()
        if lease_id not in self._ttl_by_lease:
            raise lease_gone(lease_id)
        self._deadline_by_lease[lease_id] = self._clock() + self._ttl_by_lease[lease_id]
        return self._ttl_by_lease[lease_id]

    def end_lease(self, lease_id: int) -> None:
        self._ttl_by_lease.pop(lease_id, None)
        self._deadline_by_lease.pop(lease_id, None)
        self._apply([Delete(key) for key, entry in sorted(self._keys.items()) if entry.lease == lease_id])

    def _expire(self) -> None:
        now = self._clock()
        for lease_id in [lease for lease, deadline in self._deadline_by_lease.items() if deadline <= now]:
            self.end_lease(lease_id)

    def _apply(self, operations: Sequence[Operation]) -> None:
        revision = self.revision + 1
        changed = False
        for operation in operations:
            before = self._keys.get(operation.key)
            if isinstance(operation, Put):
                created = before.create_revision if before else revision
                self._keys[operation.key] = KeyValue(
                    operation.key, bytes(operation.value), created, revision, operation.lease
                )
                changed = True
            elif before is not None:
                del self._keys[operation.key]
                changed = True
        if changed:
            self.revision = revision


class MemoryStore:
    """One handle; ``MemoryStore()`` has a space of its own, ``MemoryStore(space)`` shares one."""

    def __init__(self, space: MemorySpace | None = None) -> None:
        self.space = space if space is not None else MemorySpace()
        self.warnings: list[str] = []
        self._open = False

    async def connect(self) -> str:
        self._open = True
        return await settle_store_id(self)

    async def get(self, key: str) -> KeyValue | None:
        key_bytes(key)
        return self._space().get(key)

    async def list(self, prefix: str) -> tuple[list[KeyValue], int]:
        key_range(prefix)
        return self._space().find(prefix)

    async def commit(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        check_transaction(compares, operations)
        return self._space().commit(compares, operations)

    async def grant_lease(self, ttl_s: float) -> Lease:
        return self._space().grant(check_ttl(ttl_s))

    async def keep_alive(self, lease_id: int) -> float:
        return self._space().keep_alive(lease_id)

    async def revoke(self, lease_id: int) -> None:
        self._space().end_lease(lease_id)

    async def close(self) -> None:
        self._open = False

    def _space(self) -> MemorySpace:
        if not self._open:
            raise StoreError("The store in memory is not connected: call connect() first.")
        return self.space
