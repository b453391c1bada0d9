"""Promises of the SQLite store: several processes, sudden deaths, reboots, and files of other programs."""

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from fabric.errors import LeaseGone, StoreError, StoreIndefinite, StoreUnavailable
from fabric.store import open_store
from fabric.store.base import Compare, Put, Store
from fabric.store.sqlite_file import SqliteFile

WORKER = Path(__file__).with_name("sqlite_worker.py")
NOBODY = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@asynccontextmanager
async def connected(path: Path, **options: float) -> AsyncIterator[Store]:
    store = open_store(f"sqlite://{path}", **options)
    await store.connect()
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def worker(path: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(WORKER), str(path), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(WORKER.parents[2])}
    # Open the pipe unbuffered: ``communicate`` would lose bytes that ``readline`` had read ahead.
    process = subprocess.Popen(
        command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


async def sentence_of(path: Path) -> str:
    """The error of connecting to a path, which must be one sentence and name it."""
    store = open_store(f"sqlite://{path}")
    try:
        with pytest.raises(StoreError) as caught:
            await store.connect()
    finally:
        await store.close()
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text and text.endswith(".")
    return text


async def test_committed_keys_are_there_when_the_file_is_opened_again(path: Path) -> None:
    async with connected(path) as store:
        store_id = await store.connect()
        revision = await store.commit([], [Put("/a", b"1")])
        assert revision is not None
    async with connected(path) as store:
        assert await store.connect() == store_id
        found = await store.get("/a")
        assert found is not None and (found.value, found.mod_revision) == (b"1", revision)


async def test_processes_that_compete_lose_no_update(path: Path) -> None:
    with worker(path, "count", "40") as one, worker(path, "count", "40") as two:
        async with connected(path) as store:
            for _ in range(20):
                revision: int | None = None
                while revision is None:
                    found = await store.get("/count")
                    number = int(found.value) if found else 0
                    guard = [Compare("/count", mod_revision=found.mod_revision if found else 0)]
                    revision = await store.commit(guard, [Put("/count", str(number + 1).encode())])
            assert await asyncio.to_thread(one.wait, 60) == 0
            assert await asyncio.to_thread(two.wait, 60) == 0
            found = await store.get("/count")
            assert found is not None and found.value == b"100"


async def test_a_process_killed_in_mid_commit_leaves_nothing_of_it(path: Path) -> None:
    async with connected(path) as store:
        before = await store.commit([], [Put("/left", b"0"), Put("/right", b"0")])
        assert before is not None
        with worker(path, "hold") as process:
            assert await asyncio.to_thread(line_of, process) == "in commit"
            # The unfinished transaction does not disturb readers.
            found = await store.get("/left")
            assert found is not None and found.value == b"0"
            process.kill()
            process.wait()
        after = await store.commit([], [Put("/right", b"1")])
        assert after == before + 1
        assert [item.value for item in (await store.list("/"))[0]][-2:] == [b"0", b"1"]


async def test_a_process_killed_while_it_commits_leaves_whole_transactions(path: Path) -> None:
    for committed in (1, 7, 20):
        with worker(path, "pairs") as process:
            told = [await asyncio.to_thread(line_of, process) for _ in range(committed)][-1]
            process.kill()
            rest, _ = process.communicate()
            complete = [line for line in rest.decode().splitlines(keepends=True) if line.endswith("\n")]
            told = complete[-1].strip() if complete else told
        async with connected(path) as store:
            left, right = await store.get("/left"), await store.get("/right")
            assert left is not None and right is not None
            assert (left.value, left.mod_revision) == (right.value, right.mod_revision)
            # The file must hold every confirmed key, and may hold the unconfirmed last key.
            assert int(left.value) in (int(told), int(told) + 1)


async def test_a_lock_that_is_kept_is_unavailable_and_nothing_is_written(path: Path) -> None:
    async with connected(path, attempt_timeout_s=0.1) as store:
        revision = await store.commit([], [Put("/a", b"1")])
        with worker(path, "hold") as process:
            assert await asyncio.to_thread(line_of, process) == "in commit"
            with pytest.raises(StoreUnavailable, match="locked by another process"):
                await store.commit([], [Put("/a", b"2")])
        found = await store.get("/a")
        assert found is not None and found.mod_revision == revision


async def test_a_file_with_the_history_of_older_checkouts_is_opened(path: Path) -> None:
    async with connected(path) as store:
        await store.commit([], [Put("/a", b"1")])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE history (revision INTEGER NOT NULL, position INTEGER NOT NULL)")
    async with connected(path) as store:
        assert await store.commit([Compare("/a", mod_revision=3)], [Put("/a", b"2")]) == 4


def test_the_clock_that_ends_leases_is_the_machine_s(path: Path) -> None:
    now_s = 1000.0
    one = SqliteFile(path, busy_timeout_s=1, clock=lambda: now_s, boot="first")
    two = SqliteFile(path, busy_timeout_s=1, clock=lambda: now_s, boot="first")
    lease = one.grant(10)
    one.commit([], [Put("/a", b"1", lease.id)])
    now_s += 9.9
    assert two.get("/a") is not None
    assert two.keep_alive(lease.id) == 10
    now_s += 9.9
    assert one.get("/a") is not None
    now_s += 0.2
    assert one.get("/a") is None
    with pytest.raises(LeaseGone):
        two.keep_alive(lease.id)
    assert two.find("/")[0] == []
    one.close()
    two.close()


def test_rounding_does_not_end_a_lease(path: Path) -> None:
    now_s, ttl_s = 0.3, 10.0
    assert (now_s + ttl_s) - ttl_s > now_s
    file = SqliteFile(path, busy_timeout_s=1, clock=lambda: now_s, boot="first")
    lease = file.grant(ttl_s)
    assert file.keep_alive(lease.id) == ttl_s
    file.close()


@pytest.mark.parametrize(("boot", "now_s"), [("second", 5000.0), ("first", 3.0)])
def test_a_reboot_ends_all_leases(path: Path, boot: str, now_s: float) -> None:
    """The store notices a reboot by the boot id, or without one by a clock that began again."""
    before = SqliteFile(path, busy_timeout_s=1, clock=lambda: 5000.0, boot="first")
    lease = before.grant(600)
    before.commit([], [Put("/held", b"1", lease.id), Put("/kept", b"1")])
    before.close()
    after = SqliteFile(path, busy_timeout_s=1, clock=lambda: now_s, boot=boot)
    assert after.get("/held") is None
    assert after.get("/kept") is not None
    assert after.commit([Compare("/held", create_revision=0)], [Put("/held", b"2")]) is not None
    after.close()


def test_a_commit_that_the_disk_does_not_confirm_is_indefinite(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SqliteFile(path, busy_timeout_s=1)

    class FailingDisk:
        """A wrapper of SQLite that loses COMMITs, as a failing disk would."""

        def __init__(self, connection: sqlite3.Connection) -> None:
            self.connection = connection

        def __getattr__(self, name: str) -> object:
            return getattr(self.connection, name)

        def execute(self, statement: str, *arguments: object) -> object:
            if statement == "COMMIT":
                raise sqlite3.OperationalError("disk I/O error")
            return self.connection.execute(statement, *arguments)  # type: ignore[arg-type]

    whole = file._connection
    monkeypatch.setattr(file, "_connection", FailingDisk(whole))
    with pytest.raises(StoreIndefinite, match="did not confirm"):
        file.commit([], [Put("/a", b"1")])
    monkeypatch.setattr(file, "_connection", whole)
    assert file.get("/a") is None
    assert file.commit([], [Put("/a", b"2")]) is not None
    file.close()


async def test_a_file_removed_while_in_use_is_noticed(path: Path) -> None:
    async with connected(path) as store, connected(path) as other:
        await store.commit([], [Put("/a", b"1")])
        os.rename(path, path.with_name("moved.db"))  # noqa: PTH104 - in one step, on purpose
        with pytest.raises(StoreError, match="removed or replaced"):
            await store.get("/a")
        shutil.copy(path.with_name("moved.db"), path)
        with pytest.raises(StoreError, match="removed or replaced"):
            await other.commit([], [Put("/a", b"2")])


def write_text(file: BinaryIO) -> None:
    file.write(b"this is certainly not a database\n" * 200)


async def test_a_missing_directory_is_one_sentence(tmp_path: Path) -> None:
    text = await sentence_of(tmp_path / "missing" / "store.db")
    assert "does not exist, create it" in text
    assert not (tmp_path / "missing").exists()


async def test_a_directory_in_the_place_of_the_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "store.db").mkdir()
    assert "open or create" in await sentence_of(tmp_path / "store.db")


async def test_a_file_in_the_place_of_the_directory_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "does not exist" in await sentence_of(tmp_path / "file" / "store.db")


def test_a_file_that_is_no_database_is_left_alone(path: Path) -> None:
    with path.open("wb") as file:
        write_text(file)
    before = path.read_bytes()
    assert "not an SQLite file" in asyncio.run(sentence_of(path))
    assert path.read_bytes() == before
    assert sorted(path.parent.iterdir()) == [path]


def test_another_program_s_database_is_left_alone(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    assert "another program" in asyncio.run(sentence_of(path))
    assert path.read_bytes() == before


async def test_a_newer_format_is_refused(path: Path) -> None:
    async with connected(path):
        pass
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert "has format 99" in await sentence_of(path)


@pytest.mark.parametrize("first_page", [1, 2, 7])
async def test_a_damaged_file_is_one_sentence(path: Path, first_page: int) -> None:
    async with connected(path) as store:
        for index in range(30):
            await store.commit([], [Put(f"/{index}", os.urandom(4000))])
    with path.open("r+b") as file:
        file.seek(4096 * first_page)
        write_text(file)
        file.write(b"\xff" * 40_000)
    assert "damaged" in await sentence_of(path)


@contextmanager
def without_root() -> Iterator[None]:
    """Run as another user, because root may write everywhere."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("what", ["file", "directory"])
def test_read_only_storage_is_one_sentence(what: str) -> None:
    # Use a folder outside tmp_path, because only the owner may enter tmp_path.
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "store.db"
        if what == "file":
            asyncio.run(touch(path))
            path.chmod(0o444)
            path.parent.chmod(0o777)
        else:
            path.parent.chmod(0o555)
        with without_root():
            text = asyncio.run(sentence_of(path))
        path.parent.chmod(0o700)
    assert ("read-only" if what == "file" else "may not open") in text


async def touch(path: Path) -> None:
    async with connected(path):
        pass


async def test_handles_that_open_a_new_file_at_once_agree(tmp_path: Path) -> None:
    for index in range(5):
        stores = [open_store(f"sqlite://{tmp_path}/{index}.db") for _ in range(6)]
        ids = await asyncio.gather(*(store.connect() for store in stores))
        assert len(set(ids)) == 1
        await asyncio.gather(*(store.close() for store in stores))


async def test_closing_leaves_one_file_and_no_thread(path: Path) -> None:
    async with connected(path) as store:
        await store.commit([], [Put("/a", b"1")])
        assert any(thread.name.startswith("fabric-store") for thread in threading.enumerate())
    for thread in threading.enumerate():
        if thread.name.startswith("fabric-store"):
            await asyncio.to_thread(thread.join, 20)
            assert not thread.is_alive()
    assert list(path.parent.iterdir()) == [path]
