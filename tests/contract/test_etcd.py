"""Promises of the store that need a real etcd: lost answers, dead members, another client."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import aiohttp
import pytest
from etcd_process import EtcdMember, free_ports, running_cluster, running_etcd
from store_harness import soon, wait_for
from tcp_proxy import TcpProxy, tcp_proxy

from fabric.errors import StoreError, StoreIndefinite, StoreUnavailable
from fabric.store import open_store
from fabric.store.base import STORE_ID_KEY, Compare, Put, Store

T = TypeVar("T")

pytestmark = pytest.mark.etcd

WITNESS = Path(__file__).with_name("etcd3_witness.py")


@asynccontextmanager
async def connected(url: str, **options: float) -> AsyncIterator[Store]:
    store = open_store(url, **options)
    await store.connect()
    try:
        yield store
    finally:
        await store.close()


def port_of(etcd_url: str) -> int:
    return int(etcd_url.rpartition(":")[2])


@pytest.fixture
async def proxy(etcd_url: str) -> AsyncIterator[TcpProxy]:
    async with tcp_proxy(port_of(etcd_url)) as running:
        yield running


@pytest.fixture
async def direct(etcd_url: str) -> AsyncIterator[Store]:
    async with connected(etcd_url) as store:
        yield store


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EtcdMember]]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), 3) as members:
        yield members


def address_nobody_listens_at() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


async def test_a_write_whose_answer_is_dropped_is_indefinite(
    proxy: TcpProxy, direct: Store, prefix: str
) -> None:
    async with connected(f"etcd://{proxy.address}") as store:
        proxy.mode = "drop"
        guard = [Compare(prefix + "a", create_revision=0)]
        with pytest.raises(StoreIndefinite, match="may or may not"):
            await store.commit(guard, [Put(prefix + "a", b"mine")])
        proxy.mode = "pass"
        # A second read shows that the store applied the write.
        found = await store.get(prefix + "a")
        assert found is not None and found.value == b"mine"
        assert found == await direct.get(prefix + "a")
        assert await store.commit(guard, [Put(prefix + "a", b"again")]) is None


async def test_a_write_whose_answer_never_comes_is_indefinite(
    proxy: TcpProxy, direct: Store, prefix: str
) -> None:
    async with connected(f"etcd://{proxy.address}", attempt_timeout_s=0.5) as store:
        proxy.mode = "mute"
        proxy.answered.clear()
        with pytest.raises(StoreIndefinite):
            await store.commit([], [Put(prefix + "a", b"mine")])
        await soon(proxy.answered.wait())
        found = await direct.get(prefix + "a")
        assert found is not None and found.value == b"mine"


async def test_an_indefinite_write_is_not_tried_on_another_endpoint(
    etcd_url: str, proxy: TcpProxy, prefix: str
) -> None:
    async with connected(f"etcd://{proxy.address},127.0.0.1:{port_of(etcd_url)}") as store:
        before = await store.commit([], [Put(prefix + "count", b"0")])
        assert before is not None
        proxy.mode = "drop"
        with pytest.raises(StoreIndefinite):
            await store.commit([], [Put(prefix + "a", b"1")])
        # The next call begins with the other endpoint, and must see one write, not two.
        assert (await store.list(prefix))[1] == before + 1
        assert await store.commit([], [Put(prefix + "b", b"1")]) == before + 2


async def test_a_write_that_arrives_late_fails_at_its_guard(
    proxy: TcpProxy, direct: Store, prefix: str
) -> None:
    key = prefix + "a"
    async with connected(f"etcd://{proxy.address}", attempt_timeout_s=0.5) as store:
        proxy.mode = "hold"
        with pytest.raises(StoreIndefinite):
            await store.commit([Compare(key, create_revision=0)], [Put(key, b"late")])
        assert await direct.get(key) is None
        assert await direct.commit([Compare(key, create_revision=0)], [Put(key, b"newer")])
        proxy.answered.clear()
        proxy.release.set()
        await soon(proxy.answered.wait())
        found = await direct.get(key)
        assert found is not None and found.value == b"newer"


async def test_a_late_write_without_a_newer_one_is_applied_late(
    proxy: TcpProxy, direct: Store, prefix: str
) -> None:
    """An indefinite write is not a failed write: it may be applied after a read that did not find it."""
    key = prefix + "a"
    async with connected(f"etcd://{proxy.address}", attempt_timeout_s=0.5) as store:
        proxy.mode = "hold"
        with pytest.raises(StoreIndefinite):
            await store.commit([Compare(key, create_revision=0)], [Put(key, b"late")])
        assert await direct.get(key) is None
        proxy.answered.clear()
        proxy.release.set()
        await soon(proxy.answered.wait())
        found = await direct.get(key)
        assert found is not None and found.value == b"late"


async def test_a_read_whose_answer_is_dropped_is_repeated_elsewhere(
    etcd_url: str, proxy: TcpProxy, prefix: str
) -> None:
    async with connected(f"etcd://{proxy.address},127.0.0.1:{port_of(etcd_url)}") as store:
        revision = await store.commit([], [Put(prefix + "a", b"1")])
        lease = await store.grant_lease(30)
        proxy.mode = "drop"
        proxy.cut()
        found = await store.get(prefix + "a")
        assert found is not None and found.mod_revision == revision
        assert await store.keep_alive(lease.id) == lease.ttl_s
        await store.revoke(lease.id)


async def test_an_only_endpoint_that_drops_reads_is_unavailable(proxy: TcpProxy, prefix: str) -> None:
    async with connected(f"etcd://{proxy.address}") as store:
        lease = await store.grant_lease(30)
        proxy.mode = "drop"
        proxy.cut()
        with pytest.raises(StoreUnavailable, match="check that etcd runs"):
            await store.get(prefix + "a")
        # The store may have renewed the lease although its answer was lost.
        with pytest.raises(StoreIndefinite):
            await store.keep_alive(lease.id)


async def test_one_dead_endpoint_of_two_is_only_a_warning(etcd_url: str, prefix: str) -> None:
    dead = address_nobody_listens_at()
    async with connected(f"etcd://{dead},127.0.0.1:{port_of(etcd_url)}") as store:
        assert any(dead in warning for warning in store.warnings)
        revision = await store.commit([Compare(prefix + "a", 0)], [Put(prefix + "a", b"1")])
        assert revision is not None
        found = await store.get(prefix + "a")
        assert found is not None and found.value == b"1"
        lease = await store.grant_lease(10)
        assert await store.keep_alive(lease.id) == 10


async def test_a_write_to_a_dead_endpoint_was_certainly_not_applied(tmp_path: Path, prefix: str) -> None:
    with running_etcd(tmp_path) as etcd:
        async with connected(etcd.url) as store:
            assert await store.commit([], [Put(prefix + "a", b"1")])
            etcd.stop()
            with pytest.raises(StoreUnavailable, match=r"nothing was done; check that etcd runs"):
                await store.commit([], [Put(prefix + "a", b"2")])
            etcd.start()
            found = await store.get(prefix + "a")
            assert found is not None and found.value == b"1"
            # A connection opened before the restart must not make this write look lost.
            assert await store.commit([], [Put(prefix + "a", b"3")])


@pytest.mark.parametrize("listening", [False, True])
async def test_no_endpoint_at_all_is_one_sentence(listening: bool) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listening:
            silent.listen()  # this endpoint accepts connections and never answers
        address = "{}:{}".format(*silent.getsockname())
        store = open_store(f"etcd://{address}", attempt_timeout_s=0.3)
        with pytest.raises(StoreUnavailable, match=address):
            await store.connect()
        await store.close()


async def test_a_wiped_etcd_is_another_store(tmp_path: Path, prefix: str) -> None:
    with running_etcd(tmp_path) as etcd:
        store, other = open_store(etcd.url), open_store(etcd.url)
        first_id = await store.connect()
        for index in range(5):
            await store.commit([], [Put(prefix + "a", str(index).encode())])
        etcd.stop()
        etcd.data.rename(tmp_path / "wiped")
        etcd.start()
        # The error must come before and after another process has given the new store its id.
        with pytest.raises(StoreError, match="wiped or replaced"):
            await store.commit([Compare(prefix + "a", mod_revision=0)], [Put(prefix + "a", b"old")])
        assert await other.connect() != first_id
        with pytest.raises(StoreError, match="wiped or replaced"):
            await store.commit([Compare(prefix + "a", mod_revision=0)], [Put(prefix + "a", b"old")])
        with pytest.raises(StoreError, match="went back"):
            await store.get(prefix + "a")
        assert await other.get(prefix + "a") is None
        await store.close()
        assert await store.connect() == await other.connect() != first_id
        await store.close()
        await other.close()


async def test_endpoints_of_two_clusters_are_refused(etcd_url: str, cluster: list[EtcdMember]) -> None:
    store = open_store(f"{etcd_url},{cluster[0].address}")
    with pytest.raises(StoreError, match="another cluster"):
        await store.connect()
    await store.close()


async def test_a_key_that_is_not_our_store_id_is_not_taken_for_one(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as etcd:
        witness(etcd.client_port, "write", STORE_ID_KEY, b"\xff not an id".hex())
        store = open_store(etcd.url)
        with pytest.raises(StoreError, match="not hold a store id"):
            await store.connect()
        await store.close()


async def test_the_version_is_judged_at_connect(direct: Store) -> None:
    version = (await asyncio.to_thread(subprocess.check_output, ["etcd", "--version"])).decode()
    old = "etcd Version: 3.4." in version
    assert any("no longer gets fixes" in warning for warning in direct.warnings) == old


async def leader_of(members: list[EtcdMember]) -> EtcdMember:
    for member in members:
        url = f"http://{member.address}/v3/maintenance/status"
        async with aiohttp.ClientSession() as client, client.post(url, json={}) as answer:
            status = await answer.json()
            if status["leader"] == status["header"]["member_id"]:
                return member
    raise AssertionError("the cluster has no leader")


async def test_a_frozen_leader_does_not_stop_the_others(cluster: list[EtcdMember], prefix: str) -> None:
    leader = await leader_of(cluster)
    # The client begins with the etcd member that will freeze.
    url = "etcd://" + ",".join(member.address for member in sorted(cluster, key=lambda m: m is not leader))
    async with connected(url, attempt_timeout_s=1.0) as store:
        revision = await store.commit([], [Put(prefix + "a", b"1")])
        assert revision is not None
        leader.pause()
        try:
            await wait_for(
                lambda: written(store, prefix + "b"), "a write to succeed without the frozen leader"
            )
            assert [kv.value for kv in (await store.list(prefix))[0]] == [b"1", b"2"]
        finally:
            leader.resume()


async def test_a_killed_leader_does_not_stop_the_others(tmp_path: Path, prefix: str) -> None:
    with running_cluster(tmp_path, 3) as members:
        leader = await leader_of(members)
        url = "etcd://" + ",".join(m.address for m in sorted(members, key=lambda m: m is not leader))
        async with connected(url, attempt_timeout_s=1.0) as store:
            lease = await store.grant_lease(30)
            revision = await store.commit([], [Put(prefix + "a", b"1", lease.id)])
            assert revision is not None
            leader.stop()
            await wait_for(lambda: written(store, prefix + "b"), "a write to succeed without the leader")
            assert await store.keep_alive(lease.id) == lease.ttl_s


async def written(store: Store, key: str) -> bool:
    """Write once: after a lost answer, read the key and repeat the guarded write unless it was applied."""
    try:
        found = await store.get(key)
        return found is not None or bool(
            await store.commit([Compare(key, create_revision=0)], [Put(key, b"2")])
        )
    except (StoreIndefinite, StoreUnavailable):
        return False


async def once_led(ask: Callable[[], Awaitable[T]]) -> T:
    """Retry until the cluster has a leader, which may change again on a loaded machine."""
    async with asyncio.timeout(60):
        while True:
            with suppress(StoreUnavailable):
                return await ask()


async def test_a_whole_cluster_that_was_away_is_the_same_store(tmp_path: Path, prefix: str) -> None:
    with running_cluster(tmp_path, 3) as members:
        url = "etcd://" + ",".join(member.address for member in members)
        async with connected(url, attempt_timeout_s=1.0) as store:
            first = await store.connect()
            lease = await store.grant_lease(60)
            revision = await store.commit([], [Put(prefix + "a", b"1", lease.id)])
            assert revision is not None
            for member in members:
                member.stop()
            with pytest.raises(StoreUnavailable, match="check that etcd runs"):
                await store.commit([], [Put(prefix + "b", b"0")])
            for member in members:
                member.launch()
            await wait_for(lambda: written(store, prefix + "b"), "the cluster to be back")
            found = await once_led(lambda: store.get(prefix + "a"))
            assert found is not None and found.mod_revision == revision
            left_s = await once_led(lambda: store.keep_alive(lease.id))
            assert left_s == lease.ttl_s, "a lease outlives its cluster's restart"
            assert await once_led(store.connect) == first


async def test_a_member_without_a_leader_refuses_definitely(tmp_path: Path, prefix: str) -> None:
    with running_cluster(tmp_path, 3) as members:
        async with connected(members[0].url, attempt_timeout_s=5.0) as store:
            revision = await store.commit([], [Put(prefix + "a", b"1")])
            assert revision is not None
            members[1].stop()
            members[2].stop()

            async def refuses() -> bool:
                try:
                    await store.commit([Compare(prefix + "b", create_revision=7)], [Put(prefix + "b", b"")])
                except StoreIndefinite:
                    return False
                except StoreUnavailable as error:
                    return "no leader" in str(error)
                return False

            await wait_for(refuses, "the last member to notice that it has no leader")
            members[1].start()

            async def write() -> bool:
                try:
                    return bool(await store.commit([], [Put(prefix + "b", b"2")]))
                except (StoreIndefinite, StoreUnavailable):
                    return False

            await wait_for(write, "two of three members to elect a leader")


def witness(port: int, *arguments: str) -> str:
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    command = [sys.executable, str(WITNESS), str(port), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


async def test_another_client_reads_what_we_wrote(etcd_url: str, direct: Store, prefix: str) -> None:
    values = {
        prefix + "bytes": bytes(range(256)),
        prefix + "schlüssel-鍵": b"wert",
        prefix + "empty": b"",
    }
    lease = await direct.grant_lease(60)
    for key, value in values.items():
        assert await direct.commit([], [Put(key, value, lease.id)])
    keys = [*values, prefix + "missing"]
    told = json.loads(await asyncio.to_thread(witness, port_of(etcd_url), "read", *keys))
    for key, line in zip(keys, told, strict=True):
        ours = await direct.get(key)
        if ours is None:
            assert line is None
        else:
            assert line == [values[key].hex(), ours.create_revision, ours.mod_revision, lease.id]
    await direct.revoke(lease.id)
    assert json.loads(await asyncio.to_thread(witness, port_of(etcd_url), "read", *values)) == [None] * 3


async def test_we_read_what_another_client_wrote(etcd_url: str, direct: Store, prefix: str) -> None:
    key, value = prefix + "schlüssel-鍵", bytes(range(255, -1, -1))
    port = port_of(etcd_url)
    lease = int(await asyncio.to_thread(witness, port, "lease", key, value.hex(), "60"))
    found = await direct.get(key)
    assert found is not None and (found.key, found.value, found.lease) == (key, value, lease)
    await asyncio.to_thread(witness, port, "delete", key)
    assert await direct.get(key) is None
