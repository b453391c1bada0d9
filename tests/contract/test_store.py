"""The promises of every store, one suite for all of them."""

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_store import MemorySpace, MemoryStore
from store_harness import Backend, soon, take, wait_for

from fabric.errors import Compacted, LeaseGone, StoreError
from fabric.store import base
from fabric.store.base import STORE_ID_KEY, Compare, Delete, KeyValue, Put, Store, WatchEvent

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


async def test_a_large_transaction_is_listed_and_watched_whole(store: Store, prefix: str) -> None:
    keys = [f"{prefix}{index:03}" for index in range(90)]
    await store.commit([], [Put(key, key.encode()) for key in keys])
    found, revision = await store.list(prefix)
    assert [item.key for item in found] == keys
    assert [item.value for item in found] == [key.encode() for key in keys]
    assert {item.mod_revision for item in found} == {revision}
    async with aclosing(store.watch(prefix, revision)) as watch:
        assert sorted(event.key_value.key for event in await take(watch, len(keys))) == keys


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


async def test_the_largest_value_is_kept_and_watched(store: Store, prefix: str) -> None:
    value = bytes(range(256)) * (base.MAX_VALUE_BYTES // 256)
    revision = await put(store, prefix + "a", value)
    found = await store.get(prefix + "a")
    assert found is not None and found.value == value
    async with aclosing(store.watch(prefix, revision)) as watch:
        [event] = await take(watch, 1)
        assert event.key_value.value == value


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
            async with aclosing(store.watch(prefix, revision)) as watch:
                assert await take(watch, 1) == [WatchEvent("put", found, revision)]
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
    async with aclosing(store.watch(prefix, revision + 1)) as watch:
        events = await take(watch, 2)
    assert [event.kind for event in events] == ["delete", "delete"]
    assert {event.key_value.key for event in events} == set(keys)
    assert (await store.list(prefix))[0] == []
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


async def test_a_watch_tells_the_past_then_the_present_in_order(backend: Backend, prefix: str) -> None:
    watcher, writer = await backend.open(), await backend.open()
    first = await put(writer, prefix + "a", b"1")
    second = await put(writer, prefix + "b", b"2")
    expected = [
        WatchEvent("put", KeyValue(prefix + "a", b"1", first, first), first),
        WatchEvent("put", KeyValue(prefix + "b", b"2", second, second), second),
    ]
    async with aclosing(watcher.watch(prefix, first)) as watch:
        assert await take(watch, 2) == expected
        waiting = asyncio.ensure_future(soon(anext(watch)))
        third = await put(writer, prefix + "a", b"3")
        assert await waiting == WatchEvent("put", KeyValue(prefix + "a", b"3", first, third), third)
        fourth = await writer.commit([], [Delete(prefix + "a")])
        assert fourth is not None
        assert await take(watch, 1) == [WatchEvent("delete", KeyValue(prefix + "a", b"", 0, fourth), fourth)]


async def test_a_watch_leaves_nothing_out_and_repeats_nothing(backend: Backend, prefix: str) -> None:
    watcher, writer = await backend.open(), await backend.open()
    _, revision = await watcher.list(prefix)
    count = 150  # more keys than any backend reads at once

    async def write() -> None:
        for index in range(count // 3):
            operations = [Put(f"{prefix}{part}", str(index).encode()) for part in "xyz"]
            await writer.commit([], operations)
            await writer.commit([], [Put(f"/other{prefix}", b"noise")])

    async with aclosing(watcher.watch(prefix, revision + 1)) as watch:
        writing = asyncio.ensure_future(write())
        events = await take(watch, count)
        await writing
    seen = [(event.key_value.key[-1], int(event.key_value.value)) for event in events]
    assert sorted(seen) == sorted((part, index) for index in range(count // 3) for part in "xyz")
    revisions = [event.revision for event in events]
    assert revisions == sorted(revisions)
    assert len(set(revisions)) == count // 3


async def test_a_transaction_is_seen_under_one_revision(store: Store, prefix: str) -> None:
    await put(store, prefix + "b", b"0")
    revision = await store.commit(
        [], [Put(prefix + "a", b"1"), Delete(prefix + "b"), Put(prefix + "c", b"1")]
    )
    assert revision is not None
    async with aclosing(store.watch(prefix, revision)) as watch:
        events = await take(watch, 3)
    assert {event.revision for event in events} == {revision}
    assert {(event.kind, event.key_value.key[-1]) for event in events} == {
        ("put", "a"),
        ("delete", "b"),
        ("put", "c"),
    }


async def test_two_watches_do_not_disturb_each_other(store: Store, prefix: str) -> None:
    _, revision = await store.list(prefix)
    async with (
        aclosing(store.watch(prefix + "a", revision + 1)) as one,
        aclosing(store.watch(prefix + "b", revision + 1)) as two,
    ):
        both = asyncio.gather(soon(anext(one)), soon(anext(two)))
        await put(store, prefix + "b", b"2")
        await put(store, prefix + "a", b"1")
        assert [event.key_value.value for event in await both] == [b"1", b"2"]


async def test_a_watch_ends_when_its_store_is_closed(backend: Backend, prefix: str) -> None:
    store = await backend.open()
    revision = await put(store, prefix + "a", b"1")

    async def watch_all() -> list[WatchEvent]:
        return [event async for event in store.watch(prefix, revision)]

    watching = asyncio.ensure_future(watch_all())
    async with aclosing(store.watch(prefix, revision)) as other:
        await take(other, 1)
    await store.close()
    assert [event.revision for event in await soon(watching)] in ([], [revision])


async def test_a_cancelled_watch_leaves_the_store_usable(store: Store, prefix: str) -> None:
    _, revision = await store.list(prefix)
    watch = store.watch(prefix, revision + 1)
    waiting = asyncio.ensure_future(anext(watch))
    await put(store, "/other" + prefix, b"1")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await watch.aclose()
    await put(store, prefix + "a", b"1")
    async with aclosing(store.watch(prefix, revision + 1)) as again:
        assert [event.key_value.value for event in await take(again, 1)] == [b"1"]


@pytest.mark.parametrize("from_revision", [0, -3])
async def test_a_watch_starts_from_a_revision(store: Store, from_revision: int) -> None:
    with pytest.raises(ValueError, match="revision 1 or later"):
        await anext(store.watch("a", from_revision))


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


async def test_a_memory_store_watch_from_a_forgotten_revision_is_an_error(prefix: str) -> None:
    store = MemoryStore(MemorySpace(history_revisions=5))
    await store.connect()
    revisions = [await put(store, prefix + "a", b"") for _ in range(7)]
    with pytest.raises(Compacted, match="list the keys again"):
        await anext(store.watch(prefix, revisions[1]))
    async with aclosing(store.watch(prefix, revisions[2])) as watch:
        assert [event.revision for event in await take(watch, 5)] == revisions[2:]
    await store.close()


async def test_a_quiet_watch_in_memory_is_not_overtaken_by_other_keys(prefix: str) -> None:
    store = MemoryStore(MemorySpace(history_revisions=5))
    await store.connect()
    _, revision = await store.list("")
    async with (
        aclosing(store.watch(prefix + "quiet", revision + 1)) as quiet,
        aclosing(store.watch(prefix + "noise", revision + 1)) as noise,
    ):
        waiting = asyncio.ensure_future(soon(anext(quiet)))
        for _ in range(12):
            await put(store, prefix + "noise", b"")
            await take(noise, 1)
        await put(store, prefix + "quiet", b"1")
        assert (await waiting).key_value.value == b"1"
    await store.close()
