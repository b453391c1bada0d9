"""One job's membership record in the store: read it, and replace it under two guards.

A write is applied only while this lighthouse's election key stands and the record is still the one that was
read or written here last. So neither a deposed leader nor a stale leader can undo a write.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

from fabric.errors import StoreError, StoreIndefinite
from fabric.lighthouse.election import Commit, Term
from fabric.lighthouse.history.recovery import CAPACITY, RecoveryRecord
from fabric.lighthouse.history.slowdowns import SlowdownRecord
from fabric.lighthouse.telemetry.metrics import LighthouseMetrics
from fabric.model import Record
from fabric.protocol.messages import wire
from fabric.store import Compare, Delete, Operation, Put, Store


def records_prefix(namespace: str) -> str:
    """Return the prefix of the records of all jobs."""
    return f"/fabric/{namespace}/jobs/"


def record_key(namespace: str, job: str) -> str:
    """Return the key of the record of ``job``."""
    return f"{records_prefix(namespace)}{job}/record"


def job_of(namespace: str, key: str) -> str:
    """Invert ``record_key``; empty for a key of another kind."""
    name, _, kind = key.removeprefix(records_prefix(namespace)).partition("/")
    return name if kind == "record" else ""


# Kind of the records for people -> their class, and what an error calls one of them.
_KINDS: Mapping[str, tuple[type[RecoveryRecord | SlowdownRecord], str]] = {
    "recoveries": (RecoveryRecord, "recovery record"),
    "slowdowns": (SlowdownRecord, "slowdown record"),
}


def folder_of(namespace: str, kind: str, job: str) -> str:
    """Return the prefix of the keys of the ``recoveries`` or ``slowdowns`` of ``job``; a key ends with an id.

    They are not under the prefix of the jobs' records, which a new leader must read before it can lead.
    """
    return f"/fabric/{namespace}/{kind}/{job}/"


def ledger_of(namespace: str, job: str) -> str:
    """Return the key of the goodput ledger of ``job``."""
    return f"/fabric/{namespace}/ledgers/{job}"


class StoredRecord:
    """The record of ``job`` as one term sees it. ``revision``: of the last read or write, 0 for none.
    ``commit`` does all writes."""

    def __init__(
        self,
        store: Store,
        commit: Commit,
        namespace: str,
        job: str,
        term: Term,
        revision: int,
        metrics: LighthouseMetrics,
    ) -> None:
        self._store = store
        self._commit = commit
        self._key = record_key(namespace, job)
        self._folders = {kind: folder_of(namespace, kind, job) for kind in _KINDS}
        self._ledger = ledger_of(namespace, job)
        self._term = term
        self._revision = revision
        self._metrics = metrics
        self._job = job

    async def write(self, record: Record) -> bool:
        """Replace the record; False when a guard refused. Raises as ``Store.commit`` does."""
        guards = [self._term.guard, Compare(self._key, mod_revision=self._revision)]
        begun = time.monotonic()
        outcome = "failed"
        try:
            revision = await self._commit(guards, [Put(self._key, wire.encode_record(record))])
            outcome = "refused" if revision is None else "written"
        except StoreIndefinite:
            outcome = "indefinite"
            raise
        finally:
            self._metrics.record_write(self._job, outcome, time.monotonic() - begun)
        if revision is None:
            return False
        self._revision = revision
        return True

    async def earlier(self, kind: str) -> list[Any]:
        """Return the records of this kind that are stored. Raises StoreError or ProtocolError."""
        entries, _ = await self._store.list(self._folders[kind])
        record, name = _KINDS[kind]
        return [wire.decode_value(record, entry.value, name) for entry in entries]

    async def keep(self, kind: str, record: RecoveryRecord | SlowdownRecord, ids: list[int]) -> None:
        """Write a record, and remove stored records older than the first of ``ids`` (ascending).
        Raises as ``Store.commit`` does; the store refuses a deposed leader's write, which is then dropped."""
        folder = self._folders[kind]
        body = json.dumps(record.to_json()).encode()
        operations: list[Operation] = [Put(f"{folder}{record.id:020d}", body)]
        if len(ids) >= CAPACITY and record.id == ids[-1]:
            entries, _ = await self._store.list(folder)
            old = [kv.key for kv in entries if kv.key < f"{folder}{ids[0]:020d}"]
            operations += [Delete(key) for key in old[:50]]
        await self._commit([self._term.guard], operations)

    async def delete(self) -> bool:
        """Remove all records and the ledger of a job that is over; False when a guard refused.
        Raises as ``Store.commit`` does."""
        for folder in self._folders.values():
            entries, _ = await self._store.list(folder)
            for first in range(0, len(entries), 50):
                some = [Delete(kv.key) for kv in entries[first : first + 50]]
                await self._commit([self._term.guard], some)
        guards = [self._term.guard, Compare(self._key, mod_revision=self._revision)]
        return await self._commit(guards, [Delete(self._key), Delete(self._ledger)]) is not None

    async def keep_ledger(self, saved: Mapping[str, object]) -> None:
        """Write the ledger; raises as ``Store.commit`` does. A deposed leader's write is dropped."""
        await self._commit([self._term.guard], [Put(self._ledger, json.dumps(saved).encode())])

    async def earlier_ledger(self) -> Any:
        """Return the stored ledger; None without one. Raises StoreError or ValueError."""
        entry = await self._store.get(self._ledger)
        return None if entry is None else json.loads(entry.value)

    async def read(self) -> Record | None:
        """Return the record as it is now.

        Raises StoreError when it cannot be read, ProtocolError when it is not a record, and Deposed when this
        term's election key is gone.
        """
        holder = await self._store.get(self._term.key)
        if holder is None or holder.create_revision != self._term.revision:
            raise Deposed("another lighthouse has been elected")
        entry = await self._store.get(self._key)
        record = None if entry is None else wire.decode_record(entry.value)
        self._revision = 0 if entry is None else entry.mod_revision
        return record


class Deposed(StoreError):
    """The election key is no longer this term's, so the store refuses all its writes."""
