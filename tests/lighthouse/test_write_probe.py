"""A full store answers reads and refuses writes; the lighthouse reports this before an epoch needs a
write.
"""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from etcd_process import EtcdMember, free_ports, require_etcd, wait_until
from in_process import lighthouse_on
from lighthouse_support import eventually
from memory_store import MemorySpace, MemoryStore

from fabric.errors import StoreError, StoreIndefinite, StoreUnavailable
from fabric.lighthouse.election import StoreProbe
from fabric.store import open_store
from fabric.store.base import Delete, Put, Store

KEY = "/fabric/ns/"


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_store_with_room_is_asked_and_nothing_is_written(kind, tmp_path):
    store = open_store(f"sqlite://{tmp_path}/store.db") if kind == "sqlite" else MemoryStore(MemorySpace())
    await store.connect()
    before = await store.list("/")
    assert await StoreProbe(store, KEY).try_writing() == ""
    assert await store.list("/") == before, "not even its revision has changed"
    await store.close()


class Moody:
    """A store with a given answer to writes; None: it accepts them."""

    def __init__(self) -> None:
        self.answer: Exception | None = None

    async def commit(self, compares: object, operations: object) -> None:
        if self.answer is not None:
            raise self.answer


async def test_only_a_refused_write_counts_as_a_failure_and_it_is_logged_once(caplog):
    store = Moody()
    probe = StoreProbe(store, KEY)
    for answer in (StoreUnavailable("away"), StoreIndefinite("lost"), TimeoutError()):
        store.answer = answer
        assert await probe.try_writing() == ""
    store.answer = StoreError("database space exceeded")
    for _ in range(3):
        assert await probe.try_writing() == "database space exceeded"
    store.answer = StoreUnavailable("away")
    assert await probe.try_writing() == "database space exceeded", "nothing has said otherwise"
    store.answer = None
    assert await probe.try_writing() == await probe.try_writing() == ""
    assert caplog.messages == [
        "the store refuses writes: database space exceeded",
        "the store takes writes again",
    ]


@pytest.mark.etcd
async def test_a_full_etcd_is_reported_and_probed_again(tmp_path: Path):
    require_etcd()
    ports = free_ports(2)
    quota = ("--quota-backend-bytes", "1000000")
    member = EtcdMember(tmp_path / "etcd", *ports, extra=quota)
    try:
        member.launch()
        await asyncio.to_thread(wait_until, member.is_healthy, "etcd to be healthy")
        store = open_store(member.url)
        await store.connect()
        probe = StoreProbe(store, KEY)
        assert await probe.try_writing() == ""
        with pytest.raises(StoreError, match="space"):
            await fill(store)
        assert "space" in await probe.try_writing()
        assert await store.get("/fill/0") is not None, "reads say nothing of it"
        await make_room(member, store)
        assert await probe.try_writing() == ""
        await store.close()
    finally:
        member.stop()


async def fill(store: Store) -> None:
    """Write until the store refuses."""
    for number in range(100):
        await store.commit([], [Put(f"/fill/{number}", bytes(100_000))])


async def make_room(member: EtcdMember, store: Store) -> None:
    """The runbook's advice."""
    found, revision = await store.list("/fill/")
    deleted = await store.commit([], [Delete(each.key) for each in found])
    assert deleted is not None and deleted > revision
    async with aiohttp.ClientSession(f"http://{member.address}") as http:

        async def ask(path: str, body: dict[str, object]) -> dict[str, Any]:
            async with http.post(path, json=body) as answer:
                assert answer.status == 200, await answer.text()
                found: dict[str, Any] = await answer.json()
                return found

        await ask("/v3/kv/compaction", {"revision": str(deleted), "physical": True})
        await ask("/v3/maintenance/defragment", {})
        for alarm in (await ask("/v3/maintenance/alarm", {"action": "GET"}))["alarms"]:
            await ask("/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})


async def test_a_lighthouse_whose_store_refuses_writes_is_not_ready():
    async with lighthouse_on(MemoryStore(MemorySpace())) as lighthouse, aiohttp.ClientSession() as http:

        async def says(path: str) -> tuple[int, dict[str, Any]]:
            async with http.get(lighthouse.url + path) as answer:
                return answer.status, await answer.json()

        async def is_ready() -> bool:
            return (await says("/readyz"))[0] == 200

        await eventually(is_ready, "the lighthouse to be ready")
        assert (await says("/readyz"))[1]["store_takes_writes"] is True
        lighthouse.parts.probe.refusal = "database space exceeded"
        status, body = await says("/readyz")
        assert status == 503 and body["store_reachable"] and not body["store_takes_writes"]
        assert (await says("/healthz"))[1]["ok"] is False
        assert (await says("/livez"))[0] == 200, "a restart would not mend the store"
