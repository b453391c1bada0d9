"""If an operator deletes the leader's key or empties the store, the leader steps down although its lease goes
on.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, nullcontext
from pathlib import Path

import pytest
from etcd_process import EtcdMember, free_ports, require_etcd, running_etcd
from in_process import Instance, lighthouse_on
from lighthouse_support import close_all, eventually, get, start_job
from memory_store import MemorySpace, MemoryStore

from fabric.errors import StoreUnavailable
from fabric.lighthouse.connections.connection import NOT_THE_LEADER
from fabric.lighthouse.jobs.job_history import record_key
from fabric.protocol.messages import wire
from fabric.store import open_store
from fabric.store.base import STORE_ID_KEY, Delete, Store

# With this lease no renewal happens during the test: only the deleted key can depose the leader.
LEASE_S = 3600.0


@asynccontextmanager
async def two_handles(kind: str, folder: Path) -> AsyncIterator[tuple[Store, Store]]:
    """A lighthouse's handle on a store, and another connected handle."""
    if kind == "etcd":
        require_etcd()
        member = EtcdMember(folder / "etcd", *free_ports(2))
        try:
            await asyncio.to_thread(member.start)
            async with connected(open_store(member.url)) as other:
                yield open_store(member.url), other
        finally:
            member.stop()
        return
    space = MemorySpace()
    url = f"sqlite://{folder}/store.db"
    handles = [MemoryStore(space) if kind == "memory" else open_store(url) for _ in range(2)]
    async with connected(handles[1]) as other:
        yield handles[0], other


@asynccontextmanager
async def connected(store: Store) -> AsyncIterator[Store]:
    await store.connect()
    try:
        yield store
    finally:
        await store.close()


async def leads(instance: Instance, after: str = "") -> None:
    """Wait until the lighthouse leads by another key than ``after``."""

    async def check() -> bool:
        term = instance.election.term
        return instance.parts.serves and term is not None and term.key != after

    await eventually(check, "it to lead")


def key_of(instance: Instance) -> str:
    assert instance.election.term is not None
    return instance.election.term.key


STORES = pytest.mark.parametrize("kind", ["memory", "sqlite", pytest.param("etcd", marks=pytest.mark.etcd)])


@STORES
async def test_a_leader_whose_key_is_deleted_stands_again_without_any_write(http, kind, tmp_path):
    async with (
        two_handles(kind, tmp_path) as (store, other),
        lighthouse_on(store, lease_s=LEASE_S) as instance,
    ):
        await leads(instance)
        members = await start_job(http, instance.url)
        key = key_of(instance)
        await other.commit([], [Delete(key)])
        for member in members:
            assert (await member.close_reason())[0] == NOT_THE_LEADER
        await leads(instance, after=key)
        assert len(instance.lost) == 1 and "emptied the store" in instance.lost[0]
        kept = await other.get(record_key("ns", "job"))
        assert kept is not None and wire.decode_record(kept.value).epoch == 1
        await close_all(members)


@STORES
async def test_a_leader_whose_store_is_emptied_leads_again_in_a_new_one(http, kind, tmp_path):
    async with (
        two_handles(kind, tmp_path) as (store, other),
        lighthouse_on(store, lease_s=LEASE_S) as instance,
    ):
        await leads(instance)
        members = await start_job(http, instance.url)
        key, before = key_of(instance), await other.get(STORE_ID_KEY)
        found, _ = await other.list("")
        await other.commit([], [Delete(each.key) for each in found])
        assert (await members[0].close_reason())[0] == NOT_THE_LEADER
        await leads(instance, after=key)
        now, term = await other.get(STORE_ID_KEY), instance.election.term
        assert before is not None and now is not None and now.value != before.value
        assert term is not None and term.store_id == now.value.decode(), "it is another store from now on"
        _, health = await get(http, f"{instance.url}/healthz")
        assert health["ok"] and health["is_leader"]
        await close_all(members)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("etcd", marks=pytest.mark.etcd)])
async def test_a_leader_whose_store_is_put_back_to_a_copy_with_its_key_leads_again(http, kind, tmp_path):
    """The leader's lease is renewed in etcd's copy, so nothing else would end its term. A new SQLite file is
    found at once, but its handle is new too and waits for the end of the lease in the copy.
    """
    with running_etcd(tmp_path) if kind == "etcd" else nullcontext() as etcd:
        file, copy = tmp_path / "store.db", tmp_path / "copy"
        store = open_store(etcd.url if etcd else f"sqlite://{file}")
        async with lighthouse_on(store, lease_s=LEASE_S if etcd else 1.0) as instance:
            await leads(instance)
            key = key_of(instance)
            if etcd:
                await asyncio.to_thread(etcd.save, copy)
            else:
                with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
                    source.backup(target)
            members = await start_job(http, instance.url)
            if etcd:
                await asyncio.to_thread(etcd.restore, copy)
            else:
                for log in ("store.db-wal", "store.db-shm"):
                    (tmp_path / log).unlink()
                copy.replace(file)
            assert (await members[0].close_reason())[0] == NOT_THE_LEADER
            await leads(instance, after=key)
            assert ("wiped or restored" if etcd else "removed or replaced") in instance.lost[0]
            await close_all(members)


async def test_a_look_that_fails_costs_no_leader_the_lead():
    """A leader that cannot read its key leads while its lease is renewed, and reads again."""

    class Deaf(MemoryStore):
        refusals = 3
        leader = None

        async def get(self, key):
            if self.refusals and self.leader is not None and key == self.leader.election.term.key:
                self.refusals -= 1
                raise StoreUnavailable("not now")
            return await super().get(key)

    space = MemorySpace()
    store = Deaf(space)
    async with lighthouse_on(store, lease_s=1.0) as instance:
        await leads(instance)
        key, store.leader = key_of(instance), instance

        async def asked() -> bool:
            return store.refusals == 0

        await eventually(asked, "it to have asked three times")
        assert not instance.lost
        space.commit([], [Delete(key)])
        await leads(instance, after=key)
        assert "emptied the store" in instance.lost[0]
