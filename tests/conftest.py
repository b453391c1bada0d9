"""What every suite may use."""

from collections.abc import Iterator

import etcd_process
import pytest


@pytest.fixture(scope="session")
def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one real etcd, shared by the whole session: use keys of your own."""
    with etcd_process.running_etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd.url
