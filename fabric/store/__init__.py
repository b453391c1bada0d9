"""The control store: a few guarded keys behind one interface, in SQLite or in etcd.

``base`` has the interface and the values, ``open`` turns a URL into a store. The backends are
``sqlite_file`` (all lighthouses on one machine) and ``etcd`` with ``etcd_http`` and ``etcd_wire``.
"""

from fabric.errors import Compacted, LeaseGone, StoreError, StoreIndefinite, StoreUnavailable
from fabric.store.base import (
    STORE_ID_KEY,
    Compare,
    Delete,
    KeyValue,
    Lease,
    Operation,
    Put,
    Store,
    WatchEvent,
)
from fabric.store.etcd_http import EtcdAccess
from fabric.store.open import open_store, shown_url

__all__ = [
    "STORE_ID_KEY",
    "Compacted",
    "Compare",
    "Delete",
    "EtcdAccess",
    "KeyValue",
    "Lease",
    "LeaseGone",
    "Operation",
    "Put",
    "Store",
    "StoreError",
    "StoreIndefinite",
    "StoreUnavailable",
    "WatchEvent",
    "open_store",
    "shown_url",
]
