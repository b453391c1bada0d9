"""A real lighthouse for tests that only send requests, and an HTTP client."""

import uuid
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from lighthouse_support import LighthouseProcess


@pytest.fixture(scope="module")
def lighthouse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LighthouseProcess]:
    """One lighthouse on SQLite for the whole module; each test uses its own job. Its lease is long, so that
    it leads also on a busy machine.
    """
    folder = tmp_path_factory.mktemp("lighthouse")
    arguments = ("--limit", "start-wait-s=60", "--limit", "lease-s=60")
    with LighthouseProcess(folder, f"sqlite://{folder}/store.db", arguments=arguments) as process:
        yield process


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


@pytest.fixture
async def herd_http() -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP client without the usual limit of a hundred connections."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


@pytest.fixture
def job() -> str:
    return f"job-{uuid.uuid4().hex[:12]}"


@pytest.fixture(params=["sqlite", pytest.param("etcd", marks=pytest.mark.etcd)])
def store_url(request: pytest.FixtureRequest, tmp_path) -> str:
    """A store of the test's own, or the shared etcd (then a namespace of the test's own is needed)."""
    return (
        f"sqlite://{tmp_path}/store.db" if request.param == "sqlite" else request.getfixturevalue("etcd_url")
    )


@pytest.fixture
def namespace() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"
