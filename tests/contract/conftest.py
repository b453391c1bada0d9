"""The store under contract: the same tests over memory, SQLite and a real etcd."""

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from memory_store import MemorySpace, MemoryStore
from store_harness import Backend

from fabric.store import open_store
from fabric.store.base import Store


@pytest.fixture(params=["memory", "sqlite", pytest.param("etcd", marks=pytest.mark.etcd)])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    if request.param == "memory":
        space = MemorySpace()
        made = Backend("memory", lambda: MemoryStore(space))
    elif request.param == "sqlite":
        made = Backend("sqlite", lambda: open_store(f"sqlite://{tmp_path}/store.db"))
    else:
        url = request.getfixturevalue("etcd_url")
        made = Backend("etcd", lambda: open_store(url))
    yield made
    await made.close()


@pytest.fixture
async def store(backend: Backend) -> Store:
    return await backend.open()


@pytest.fixture
def prefix() -> str:
    """The prefix of this test's own keys, because all tests share one etcd."""
    return f"/test/{uuid.uuid4().hex}/"
