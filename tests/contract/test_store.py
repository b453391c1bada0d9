"""The promises of every store, one suite for all of them."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_store import MemorySpace, MemoryStore
from store_harness import Backend, wait_for

from fabric.errors import LeaseGone, StoreError
from fabric.store import base
from fabric.store.base import STORE_ID_KEY, Compare, Delete, KeyValue, Put, Store

SHORT_TTL_S = 0.3  # etcd rounds this up to a second or two


async def put(store: Store, key: str, value: bytes, lease: int = 0) -> int:
    revision = await store.commit([], [Put(key, value, lease)])
    assert revision is not None
    return revision


async def test_all_handles_agree_on_one_store_id(backend: Backend) -> None:
    handles = [backend.make() for _ in range(4)]
    backend.handles += handles
    ids = await asyncio.gather(*(handle.connect() for handle in handles))
    assert len(set(ids)) == 1
    assert len(ids[0]) == 16
    assert await handles[0].connect() == ids[0]
    found = await handles[1].get(STORE_ID_KEY)
    assert found is not None and found.value.decode() == ids[0]


async def test_before_connect_and_after_close_nothing_works(backend: Backend, prefix: str) -> None:
    unconnected = backend.make()
    with pytest.raises(StoreError, match="connect"):
        await unconnected.get(prefix + "a")
    closed = await backend.open()
    await closed.close()
    await closed.close()
    with pytest.raises(StoreError, match="connect"):
        await closed.commit([], [Put(prefix + "a", b"1")])


async def test_a_missing_key_is_none(store: Store, prefix: str) -> None:
    assert await store.get(prefix + "missing") is None
    assert (await store.list(prefix))[0] == []


async def test_put_reads_back_with_its_revisions(store: Store, prefix: str) -> None:
    first = await put(store, prefix + "a", b"1")
    second = await put(store, prefix + "a", b"2")
    assert second == first + 1
    assert await store.get(prefix + "a") == KeyValue(prefix + "a", b"2", first, second)


async def test_a_deleted_key_is_created_again(store: Store, prefix: str) -> None:
    first = await put(store, prefix + "a", b"1")
    assert await store.commit([], [Delete(prefix + "a")]) == first + 1
    assert await store.get(prefix + "a") is None
    again = await put(store, prefix + "a", b"")
    assert await store.get(prefix + "a") == KeyValue(prefix + "a", b"", again, again)


async def test_deleting_nothing_changes_nothing(store: Store, prefix: str) -> None:
    revision = await put(store, prefix + "a", b"1")
    assert await store.commit([], [Delete(prefix + "b")]) == revision
    assert (await store.list(prefix))[1] == revision


async def test_a_list_is_in_key_order_and_of_this_prefix_only(store: Store, prefix: str) -> None:
    names = ["b", "a", "a/b", "ä", "a0", "￿", "\U0001f642"]
    for name in names:
        await put(store, prefix + name, name.encode())
    await put(store, prefix[:-1] + "0", b"the prefix's neighbour")
    found, revision = await store.list(prefix)
    assert [item.key for item in found] == [prefix + name for name in sorted(names, key=str.encode)]
    assert revision == max(item.mod_revision for item in found) + 1


async def test_a_large_transaction_is_listed_whole(store: Store, prefix: str) -> None:
    keys = [f"{prefix}{index:03}" for index in range(90)]
    await store.commit([], [Put(key, key.encode()) for key in keys])
    found, revision = await store.list(prefix)
    assert [item.key for item in found] == keys
    assert [item.value for item in found] == [key.encode() for key in keys]
    assert {item.mod_revision for item in found} == {revision}


async def test_a_guard_on_the_creation_revision_is_checked(store: Store, prefix: str) -> None:
    key = prefix + "a"
    created = await store.commit([Compare(key, create_revision=0)], [Put(key, b"1")])
    assert created is not None
    assert await store.commit([Compare(key, create_revision=0)], [Put(key, b"2")]) is None
    changed = await store.commit([Compare(key, create_revision=created)], [Put(key, b"3")])
    assert changed is not None
    assert await store.get(key) == KeyValue(key, b"3", created, changed)
    assert await store.commit([Compare(key, create_revision=changed)], [Put(key, b"4")]) is None


async def test_a_guard_on_the_change_revision_is_checked(store: Store, prefix: str) -> None:
    key = prefix + "a"
    first = await store.commit([Compare(key, mod_revision=0)], [Put(key, b"1")])
    assert first is not None
    second = await store.commit([Compare(key, mod_revision=first)], [Put(key, b"2")])
    assert second is not None
    assert await store.commit([Compare(key, mod_revision=first)], [Delete(key)]) is None
    assert await store.commit([Compare(key, mod_revision=0)], [Delete(key)]) is None
    found = await store.get(key)
    assert found is not None and found.value == b"2"
    assert await store.commit([Compare(key, first, second)], [Delete(key)]) is not None


async def test_one_failed_guard_of_many_applies_nothing(store: Store, prefix: str) -> None:
    revision = await put(store, prefix + "a", b"1")
    guards = [
        Compare(prefix + "a", mod_revision=revision),
        Compare(prefix + "b", create_revision=0),
        Compare(prefix + "c", create_revision=revision),
    ]
    operations = [Put(prefix + "a", b"2"), Put(prefix + "b", b"2"), Delete(prefix + "a")][:2]
    assert await store.commit(guards, operations) is None
    assert [(item.key, item.value) for item in (await store.list(prefix))[0]] == [(prefix + "a", b"1")]
    assert await store.commit(guards[:2], operations) is not None
    assert [item.value for item in (await store.list(prefix))[0]] == [b"2", b"2"]


async def test_a_guard_on_one_key_protects_another(store: Store, prefix: str) -> None:
    """The fence: every write names the election key that its writer holds."""
    election = await put(store, prefix + "election", b"first")
    await put(store, prefix + "election", b"second")
    fenced = [Compare(prefix + "election", mod_revision=election)]
    assert await store.commit(fenced, [Put(prefix + "record", b"late")]) is None
    assert await store.get(prefix + "record") is None


async def test_the_largest_transaction_is_applied(store: Store, prefix: str) -> None:
    guards = [Compare(f"{prefix}{i}", 0, 0) for i in range(base.MAX_COMPARES)]
    operations = [Put(f"{prefix}{i}", b"x" * 100) for i in range(base.MAX_OPERATIONS)]
    assert await store.commit(guards, operations) is not None
    assert len((await store.list(prefix))[0]) == base.MAX_OPERATIONS


async def test_the_largest_value_is_kept(store: Store, prefix: str) -> None:
    value = bytes(range(256)) * (base.MAX_VALUE_BYTES // 256)
    await put(store, prefix + "a", value)
    found = await store.get(prefix + "a")
    assert found is not None and found.value == value


@pytest.mark.parametrize(
    ("operations", "sentence"),
    [
        ([Put("", b"1")], "1 to 1024 bytes"),
        ([Put("k" * 1025, b"1")], "1 to 1024 bytes"),
        ([Put("a\0b", b"1")], "zero byte"),
        ([Put("a\ud800", b"1")], "Unicode"),
        ([Put("a", b"1"), Delete("a")], "occurs twice"),
        ([Put("a", b"x" * (base.MAX_VALUE_BYTES + 1))], "more than the"),
        ([Put("a", b"x" * base.MAX_VALUE_BYTES), Put("b", b"x" * 400_000)], "split it"),
        ([Put(str(i), b"") for i in range(base.MAX_OPERATIONS + 1)], "split it"),
    ],
)
async def test_all_stores_refuse_a_transaction_that_one_could_not_apply(
    store: Store, operations: list[Put | Delete], sentence: str
) -> None:
    before = (await store.list(""))[1]
    with pytest.raises(StoreError, match=sentence):
        await store.commit([], operations)
    assert (await store.list(""))[1] == before


async def test_a_guard_must_guard_something() -> None:
    with pytest.raises(ValueError, match="neither"):
        Compare("a")


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=60),
    value=st.binary(max_size=300),
)
def test_any_text_is_a_key_and_any_bytes_a_value(
    backend: Backend, prefix: str, name: str, value: bytes
) -> None:
    async def round_trip() -> None:
        store = backend.make()
        try:
            await store.connect()
            revision = await put(store, prefix + name, value)
            found = await store.get(prefix + name)
            assert found is not None
            assert (found.key, found.value, found.mod_revision) == (prefix + name, value, revision)
            assert found in (await store.list(prefix + name))[0]
        finally:
            await store.close()

    asyncio.run(round_trip())


async def test_of_concurrent_commits_exactly_one_wins(backend: Backend, prefix: str) -> None:
    handles = [await backend.open() for _ in range(5)]
    key = prefix + "a"
    expected = 0
    for _ in range(6):
        guard = [Compare(key, mod_revision=expected)]
        outcomes = await asyncio.gather(
            *(handle.commit(guard, [Put(key, str(i).encode())]) for i, handle in enumerate(handles))
        )
        winners = [i for i, revision in enumerate(outcomes) if revision is not None]
        assert len(winners) == 1
        found = await handles[0].get(key)
        assert found is not None and found.value == str(winners[0]).encode()
        expected = found.mod_revision
        assert expected == outcomes[winners[0]]


async def test_a_read_sees_what_any_handle_committed_before(backend: Backend, prefix: str) -> None:
    writer, reader = await backend.open(), await backend.open()
    for index in range(20):
        revision = await put(writer, prefix + "a", str(index).encode())
        found = await reader.get(prefix + "a")
        assert found is not None and found.mod_revision == revision


async def test_an_expired_lease_deletes_its_keys(store: Store, prefix: str) -> None:
    lease = await store.grant_lease(SHORT_TTL_S)
    assert lease.ttl_s >= SHORT_TTL_S
    keys = [prefix + "a", prefix + "b"]
    revision = await store.commit([], [Put(key, b"1", lease.id) for key in keys])
    assert revision is not None
    found = await store.get(keys[0])
    assert found is not None and found.lease == lease.id

    async def gone() -> bool:
        return (await store.list(prefix))[0] == []

    await wait_for(gone, "the lease to end")
    with pytest.raises(LeaseGone):
        await store.keep_alive(lease.id)
    with pytest.raises(LeaseGone):
        await store.commit([], [Put(keys[0], b"2", lease.id)])
    assert await store.get(keys[0]) is None


async def test_a_lease_expires_without_anybody_watching(backend: Backend, prefix: str) -> None:
    holder, other = await backend.open(), await backend.open()
    lease = await holder.grant_lease(SHORT_TTL_S)
    await put(holder, prefix + "a", b"1", lease.id)
    await holder.close()

    async def is_gone() -> bool:
        return await other.get(prefix + "a") is None

    await wait_for(is_gone, "the key of the expired lease to be deleted")
    # After the lease's end another process can create the key.
    assert await other.commit([Compare(prefix + "a", create_revision=0)], [Put(prefix + "a", b"2")])


async def test_a_lease_that_is_kept_alive_outlives_its_ttl(store: Store, prefix: str) -> None:
    kept, left = await store.grant_lease(SHORT_TTL_S), await store.grant_lease(SHORT_TTL_S)
    await put(store, prefix + "kept", b"1", kept.id)
    await put(store, prefix + "left", b"1", left.id)

    async def left_is_gone() -> bool:
        assert await store.keep_alive(kept.id) == kept.ttl_s
        return await store.get(prefix + "left") is None

    await wait_for(left_is_gone, "the lease that nobody renews to end")
    assert await store.get(prefix + "kept") is not None
    await store.revoke(kept.id)


async def test_a_revoked_lease_takes_its_keys_with_it(store: Store, prefix: str) -> None:
    lease = await store.grant_lease(60)
    await put(store, prefix + "a", b"1", lease.id)
    await put(store, prefix + "b", b"1")
    await store.revoke(lease.id)
    assert [item.key for item in (await store.list(prefix))[0]] == [prefix + "b"]
    await store.revoke(lease.id)
    with pytest.raises(LeaseGone, match="ask for a new one"):
        await store.keep_alive(lease.id)


async def test_a_key_leaves_its_lease_when_it_is_put_without(store: Store, prefix: str) -> None:
    lease = await store.grant_lease(60)
    await put(store, prefix + "a", b"1", lease.id)
    await put(store, prefix + "a", b"2")
    await store.revoke(lease.id)
    found = await store.get(prefix + "a")
    assert found is not None and (found.value, found.lease) == (b"2", 0)


async def test_an_unknown_lease_applies_nothing(store: Store, prefix: str) -> None:
    with pytest.raises(LeaseGone):
        await store.commit([], [Put(prefix + "a", b"1"), Put(prefix + "b", b"1", lease=123_456_789)])
    assert (await store.list(prefix))[0] == []
    # The answer must be the failed guard, although the put is impossible too.
    guard = [Compare(prefix + "a", create_revision=77)]
    assert await store.commit(guard, [Put(prefix + "b", b"1", lease=123_456_789)]) is None


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("nan"), float("inf"), 1e9])
async def test_a_ttl_that_makes_no_sense_is_refused(store: Store, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="lease"):
        await store.grant_lease(ttl_s)


async def test_a_transaction_is_seen_under_one_revision(store: Store, prefix: str) -> None:
    await put(store, prefix + "b", b"0")
    revision = await store.commit(
        [], [Put(prefix + "a", b"1"), Delete(prefix + "b"), Put(prefix + "c", b"1")]
    )
    assert revision is not None
    entries, now = await store.list(prefix)
    assert now == revision
    assert [(kv.key[-1], kv.create_revision, kv.mod_revision) for kv in entries] == [
        ("a", revision, revision),
        ("c", revision, revision),
    ]


async def test_the_memory_store_expires_leases_by_its_own_clock(prefix: str) -> None:
    now_s = 100.0
    store = MemoryStore(MemorySpace(clock=lambda: now_s))
    await store.connect()
    lease = await store.grant_lease(10)
    await put(store, prefix + "a", b"1", lease.id)
    now_s = 109.9
    assert await store.get(prefix + "a") is not None
    assert await store.keep_alive(lease.id) == 10
    now_s = 119.8
    assert await store.get(prefix + "a") is not None
    now_s = 119.95
    assert await store.get(prefix + "a") is None
    await store.close()
