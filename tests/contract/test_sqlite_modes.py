"""Other users cannot open the files of the SQLite store: a reader could stop a lighthouse by a lock."""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fabric.errors import StoreError
from fabric.store.sqlite_file import SqliteStore

# Another user's process tries to lock the byte of SQLite's shared memory that means "a writer works".
LOCK = """
import fcntl, os, sys
os.setresuid(65534, 65534, 65534)
with open(sys.argv[1], "rb") as file:
    fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 120)
"""


@pytest.fixture
def shared():
    """A folder that every user of the host can list."""
    with tempfile.TemporaryDirectory(prefix="fabric-modes-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
async def store(shared):
    before = os.umask(0o022)
    found = SqliteStore(shared / "lh.db", attempt_timeout_s=5.0)
    await found.connect()
    yield found
    await found.close()
    os.umask(before)


async def test_the_files_are_closed_to_others_whatever_the_umask(store, shared):
    await store.grant_lease(10.0)
    modes = {path.name: path.stat().st_mode & 0o777 for path in shared.iterdir()}
    assert modes and set(modes.values()) == {0o600}, modes
    assert not store.warnings


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_cannot_lock_them(store, shared):
    for path in shared.iterdir():
        command = [sys.executable, "-c", LOCK, str(path)]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode and "Permission denied" in done.stderr


async def test_a_store_that_other_users_can_open_is_reported(tmp_path):
    path = tmp_path / "old.db"
    path.touch()
    path.chmod(0o644)
    found = SqliteStore(path, attempt_timeout_s=5.0)
    await found.connect()
    assert len(found.warnings) == 1 and "chmod 600" in found.warnings[0]
    await found.close()


async def test_after_a_failed_attempt_to_connect_its_reason_is_reported(tmp_path):
    path = tmp_path / "damaged.db"
    path.write_bytes(b"this is no database, and never was" * 100)
    found = SqliteStore(path, attempt_timeout_s=5.0)
    with pytest.raises(StoreError) as first:
        await found.connect()
    with pytest.raises(StoreError) as second:
        await found.get("/fabric/x")
    assert str(second.value) == str(first.value) and "connect()" not in str(second.value)
