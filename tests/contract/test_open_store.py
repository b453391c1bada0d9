"""A store's URL opens the right store, and a wrong URL is refused before any file or server is touched."""

from pathlib import Path

import pytest

from fabric.errors import ConfigError
from fabric.store import open_store
from fabric.store.etcd import EtcdStore
from fabric.store.sqlite_file import SqliteStore


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("sqlite:///var/x.db", Path("/var/x.db")),
        ("sqlite:////var/x.db", Path("/var/x.db")),
        ("sqlite://x y%20?.db", Path.cwd() / "x y%20?.db"),
        ("sqlite://sub/x.db", Path.cwd() / "sub/x.db"),
    ],
)
def test_an_sqlite_url_names_a_file(url: str, expected: Path) -> None:
    store = open_store(url)
    assert isinstance(store, SqliteStore)
    assert store._path == expected


@pytest.mark.parametrize(
    ("url", "endpoints"),
    [
        ("etcd://a:1,b:2", ("http://a:1", "http://b:2")),
        ("etcd://a", ("http://a:2379",)),
        ("etcd://[::1]:5,10.0.0.1:6", ("http://[::1]:5", "http://10.0.0.1:6")),
    ],
)
def test_an_etcd_url_names_endpoints(url: str, endpoints: tuple[str, ...]) -> None:
    store = open_store(url)
    assert isinstance(store, EtcdStore)
    assert store._endpoints == endpoints


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "memory:",
        "sqlite:",
        "sqlite:x.db",
        "sqlite://",
        "sqlite:///",
        "sqlite:///directory/",
        "sqlite:///a\0b",
        "etcd:",
        "etcd://",
        "etcd://,",
        "etcd://a,,b",
        "etcd://a:port",
        "etcd://a:0",
        "etcd://a:70000",
        "etcd://a:1/path",
        "etcd://a:1?x=1",
        "etcd://a b:1",
        "etcd://[::1:5",
        "http://a:1",
        "postgres://a",
        "/var/x.db",
    ],
)
def test_an_impossible_store_url_is_one_sentence(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".")
    assert "write" in text


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    for url in ("etcd://root:hunter2@a:1", "postgres://root:hunter2@a", "etcd://b:x,root:hunter2@a:1"):
        with pytest.raises(ConfigError) as caught:
            open_store(url)
        assert "hunter2" not in str(caught.value)
