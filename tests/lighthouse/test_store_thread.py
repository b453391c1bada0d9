"""The lighthouse writes from a thread of its own, with the store's own answers and errors."""

import threading

import pytest
from etcd_process import running_etcd
from memory_store import MemorySpace, MemoryStore

from fabric.errors import LeaseGone, StoreError, StoreIndefinite, StoreUnavailable
from fabric.lighthouse.election import StoreThread
from fabric.store import open_store
from fabric.store.base import Compare, Put


@pytest.fixture
async def writer(tmp_path):
    made = StoreThread(open_store(f"sqlite://{tmp_path}/store.db"))
    yield made
    await made.close()


async def test_the_store_thread_answers_as_the_store_does(writer, tmp_path):
    revision = await writer.commit([Compare("/a", create_revision=0)], [Put("/a", b"1")])
    assert revision is not None
    assert await writer.commit([Compare("/a", create_revision=0)], [Put("/a", b"2")]) is None, "a guard"
    with pytest.raises(StoreError, match="no zero byte"):
        await writer.commit([], [Put("", b"3")])
    store = open_store(f"sqlite://{tmp_path}/store.db")
    await store.connect()
    found = await store.get("/a")
    assert found is not None and (found.value, found.mod_revision) == (b"1", revision)
    await store.close()


async def test_the_store_thread_writes_while_the_event_loop_is_busy():
    class Watched(MemoryStore):
        async def commit(self, compares, operations):
            revision = await super().commit(compares, operations)
            written.set()
            return revision

    written, writer = threading.Event(), StoreThread(Watched(MemorySpace()))
    writing = writer.commit([], [Put("/a", b"1")])
    writing.send(None)  # the write is under way, and this event loop does not turn before the write arrives
    assert written.wait(20)
    writing.close()
    await writer.close()


async def test_a_store_that_cannot_be_reached_is_tried_again_with_the_next_write():
    class Away(MemoryStore):
        async def connect(self):
            if troubles:
                raise troubles.pop()
            return await super().connect()

    troubles, writer = [StoreUnavailable("unplugged")], StoreThread(Away(MemorySpace()))
    with pytest.raises(StoreUnavailable, match="unplugged"):
        await writer.commit([], [Put("/a", b"1")])
    assert await writer.commit([], [Put("/a", b"1")]) is not None
    await writer.close()


async def test_a_store_that_was_wiped_is_written_to_again(tmp_path):
    with running_etcd(tmp_path) as etcd:
        writer = StoreThread(open_store(etcd.url))
        assert await writer.commit([], [Put("/a", b"1")]) is not None
        etcd.stop()
        etcd.data.rename(tmp_path / "wiped")
        etcd.start()
        with pytest.raises(StoreError, match="wiped or replaced"):
            await writer.commit([], [Put("/a", b"2")])
        assert await writer.commit([Compare("/a", create_revision=0)], [Put("/a", b"2")]) is not None
        await writer.close()


@pytest.mark.parametrize("is_applied", [False, True])
@pytest.mark.parametrize(
    ("error", "connects"), [(StoreUnavailable, 1), (StoreIndefinite, 1), (LeaseGone, 1), (StoreError, 2)]
)
async def test_each_failure_reaches_the_caller_once_and_the_next_write_is_made(error, connects, is_applied):
    """Only an error that may mean another store closes the connection."""
    asked = []

    class Failing(MemoryStore):
        async def connect(self):
            asked.append("connect")
            return await super().connect()

        async def commit(self, compares, operations):
            if operations[0].key != "/a":
                return await super().commit(compares, operations)
            asked.append("commit")
            if asked.count("commit") > 1:
                return await super().commit(compares, operations)
            if is_applied:
                await super().commit(compares, operations)
            raise error("as the test wants it")

    space = MemorySpace()
    writer = StoreThread(Failing(space))
    with pytest.raises(error, match="as the test wants it"):
        await writer.commit([Compare("/a", create_revision=0)], [Put("/a", b"1")])
    assert (space.get("/a") is not None) == is_applied
    again = await writer.commit([Compare("/a", create_revision=0)], [Put("/a", b"2")])
    assert (again is None) == is_applied, "the guard of the caller decides"
    assert asked.count("connect") == connects and asked.count("commit") == 2
    await writer.close()
