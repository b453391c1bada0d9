"""The control store: a few guarded keys behind one interface, in SQLite or in etcd.

``base`` has the interface and the values, ``open_store`` turns a URL into a store. The backends are
``sqlite_file`` (all lighthouses on one machine) and ``etcd`` with ``etcd_http``.
"""

from pathlib import Path
from urllib.parse import urlsplit

from msgspec.structs import replace

from fabric.errors import ConfigError
from fabric.store.base import Store
from fabric.store.etcd import EtcdStore
from fabric.store.etcd_http import EtcdAccess
from fabric.store.sqlite_file import SqliteStore

__all__ = ["EtcdAccess", "open_store", "shown_url"]

# Opens a store by its URL; refuses an invalid URL before it touches a file or a server.


ATTEMPT_TIMEOUT_S = 3.0
ETCD_PORT = 2379

_EXAMPLES = "sqlite:///var/lib/fabric/store.db, etcd://host:2379,other:2379 or etcds://host:2379"


def open_store(
    url: str,
    *,
    attempt_timeout_s: float = ATTEMPT_TIMEOUT_S,
    access: EtcdAccess | None = None,
) -> Store:
    """Return a store that is not connected yet.

    ``sqlite:`` is followed by ``//`` and a path, absolute when it begins with a slash; several slashes count
    as one. ``etcd://`` is followed by comma-separated ``host[:port]``; ``etcds://`` is the same over TLS.
    ``access`` holds the credentials for etcd (the URL sets its ``tls``). ``attempt_timeout_s`` bounds each
    attempt at an endpoint, or the wait for a file's lock. Raises ConfigError.
    """
    scheme, _, rest = url.partition(":")
    if access is not None and access != EtcdAccess() and scheme not in ("etcd", "etcds"):
        raise ConfigError(
            f"Certificates and users are for etcd, the store is {shown_url(url)!r}: leave them out."
        )
    if scheme == "sqlite" and rest.startswith("//"):
        text = rest[2:]
        if not text.strip("/") or text.endswith("/") or "\0" in text:
            raise ConfigError(f"The store {shown_url(url)!r} names no file: write it like {_EXAMPLES}.")
        path = Path("/" + text.lstrip("/") if text.startswith("/") else text).absolute()
        return SqliteStore(path, attempt_timeout_s=attempt_timeout_s)
    if scheme in ("etcd", "etcds") and rest.startswith("//"):
        tls = scheme == "etcds"
        return EtcdStore(
            tuple(_endpoint(url, part, "https" if tls else "http") for part in rest[2:].split(",")),
            attempt_timeout_s=attempt_timeout_s,
            access=replace(access or EtcdAccess(), tls=tls),
        )
    raise ConfigError(f"The store {shown_url(url)!r} is not one we know: write it like {_EXAMPLES}.")


def _endpoint(url: str, text: str, scheme: str) -> str:
    # A password in a URL ends up in process lists and logs, so the store refuses and does not repeat it.
    if "@" in text:
        raise ConfigError(
            "The store's URL holds a user or password: they show in process lists, so give a user and a "
            "password file instead."
        )
    try:
        parts = urlsplit(f"http://{text}")
        host, port = parts.hostname, parts.port
        plain = not (parts.path or parts.query or parts.fragment or any(mark.isspace() for mark in text))
    except ValueError:
        host, port, plain = None, None, False
    if not host or not plain or port == 0:
        raise ConfigError(
            f"The store {shown_url(url)!r} has a bad address {text[:80]!r}: write host:port, without a path."
        )
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port or ETCD_PORT}"


def shown_url(url: str) -> str:
    """Return the URL for people, without a user and a password."""
    return url[:200] if "@" not in url else url.partition("//")[0] + "//..."
