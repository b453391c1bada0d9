"""The control store: what the lighthouse keeps, and the operations it may rely on.

The problem: several lighthouses decide about one job, any of them may die in mid-write, and a write whose
answer is lost may still be applied. The mechanism is small on purpose. The store holds a few small keys, each
with the revisions of its creation and of its last change. A transaction applies all of its operations or
none, guarded by those revisions. The end of a lease deletes the keys put under it. A reader that waits for a
change asks again and again. The backends (SQLite, etcd, and one in memory for tests) keep the same promises
and pass the same contract suite.

The error of a write is *definite* (``StoreError``: the store did not apply the write) or *indefinite*
(``StoreIndefinite``: the outcome is unknown, so read again before deciding anything). A failed guard is a
result, not an error.

A lease alone does not keep a former holder from writing: the store may end it long after its TTL. So the
holder steps down by its own monotonic clock, counted from before the call that renewed the lease. A guard on
the holder's own key protects every write.
"""

import secrets
from collections.abc import Sequence
from typing import Protocol

from fabric.errors import LeaseGone, StoreError, StoreIndefinite
from fabric.model import Value

# The key under which ``Store.connect`` keeps the store's random id.
STORE_ID_KEY = "/fabric/store-id"

# By default etcd allows 1.5 MiB, 128 operations and 128 comparisons per request; a guard takes up to two
# comparisons. All backends have the same bounds, so a job that runs on one of them runs on the others.
MAX_KEY_BYTES = 1024
MAX_VALUE_BYTES = 1 << 20
MAX_REQUEST_BYTES = 1_400_000
MAX_OPERATIONS = 100
MAX_COMPARES = 60
MAX_LISTED_KEYS = 65_536


class KeyValue(Value):
    """One key as it was read; ``lease`` is 0 for a key without a lease. Revisions start at 1."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


class Compare(Value):
    """A guard: the key's revisions must be exactly these; 0 means that the key does not exist.

    Raises ValueError when it names no revision.
    """

    key: str
    create_revision: int | None = None
    mod_revision: int | None = None

    def __post_init__(self) -> None:
        if self.create_revision is None and self.mod_revision is None:
            raise ValueError(f"the guard on {self.key!r} names neither create_revision nor mod_revision")

    def holds(self, create_revision: int, mod_revision: int) -> bool:
        """Whether a key with these revisions (0, 0 when absent) passes."""
        return self.create_revision in (None, create_revision) and self.mod_revision in (None, mod_revision)


class Put(Value):
    """Set a key; ``lease`` 0 detaches it from any lease it had."""

    key: str
    value: bytes
    lease: int = 0


class Delete(Value):
    """Remove a key; a missing key is not an error, and no change."""

    key: str


Operation = Put | Delete


class Lease(Value):
    """A lease and the TTL that was granted, in seconds, which may be longer than was asked for."""

    id: int
    ttl_s: float


class Store(Protocol):
    """A handle on one store. ``connect`` first; all other methods raise StoreError before that.

    Every method raises StoreUnavailable when the store cannot be reached (nothing was applied) and
    StoreError when it answers with an error or a bound of this module is exceeded.
    """

    @property
    def warnings(self) -> list[str]:
        """Sentences for the operator about this store, known after ``connect``."""

    async def connect(self) -> str:
        """Reach the store and return its id: random, written once by the first handle.

        A wiped or replaced store has another id, and none of the old store's keys or revisions.
        """

    async def get(self, key: str) -> KeyValue | None:
        """Return the key's newest committed value (linearizable), or None."""

    async def list(self, prefix: str) -> tuple[list[KeyValue], int]:
        """Return all keys with the prefix, in key order, at one revision, and that revision."""

    async def commit(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> int | None:
        """Apply all operations if all guards hold, atomically; no key may occur in two operations.

        Returns the store's revision afterwards, or None when a guard failed. Raises LeaseGone when a
        Put names a lease that has ended, StoreIndefinite when the outcome is not known.
        """

    async def grant_lease(self, ttl_s: float) -> Lease:
        """Return a new lease. A lost answer leaves at most an unused lease, which ends after its TTL."""

    async def keep_alive(self, lease_id: int) -> float:
        """Renew a lease; returns the TTL in seconds. Raises LeaseGone when it has ended."""

    async def revoke(self, lease_id: int) -> None:
        """End a lease now and delete its keys; one that has already ended is fine."""

    async def close(self) -> None:
        """Give up connections and threads. Leases run out later."""


def key_bytes(key: str) -> bytes:
    """Return the key as UTF-8. Raises StoreError when it is empty, too long or not text."""
    try:
        encoded = key.encode()
    except UnicodeEncodeError as error:
        raise StoreError(f"The key {key!r} is not valid Unicode text: use another key.") from error
    if not encoded or len(encoded) > MAX_KEY_BYTES or b"\0" in encoded:
        raise StoreError(f"The key {key[:80]!r} must have 1 to {MAX_KEY_BYTES} bytes and no zero byte.")
    return encoded


def key_text(key: bytes) -> str:
    """Invert ``key_bytes``, also for another program's keys."""
    return key.decode("utf-8", "surrogateescape")


def key_range(prefix: str) -> tuple[bytes, bytes]:
    """Return the half-open range of keys with a prefix; an end of one zero byte means "no upper end"."""
    if not prefix:
        return b"\0", b"\0"
    start = key_bytes(prefix)
    # UTF-8 never contains 0xff, so the last byte can always be raised.
    return start, start[:-1] + bytes([start[-1] + 1])


def check_transaction(compares: Sequence[Compare], operations: Sequence[Operation]) -> None:
    """Refuse a transaction that one of the backends could not apply. Raises StoreError."""
    if len(compares) > MAX_COMPARES or len(operations) > MAX_OPERATIONS:
        raise StoreError(
            f"A transaction of {len(compares)} guards and {len(operations)} operations was refused: "
            f"at most {MAX_COMPARES} and {MAX_OPERATIONS} are possible, split it."
        )
    total = 0
    written = set()
    for compare in compares:
        total += len(key_bytes(compare.key))
    for operation in operations:
        if operation.key in written:
            raise StoreError(f"The key {operation.key!r} occurs twice in one transaction: write it once.")
        written.add(operation.key)
        total += len(key_bytes(operation.key))
        if isinstance(operation, Put):
            total += len(operation.value)
            if len(operation.value) > MAX_VALUE_BYTES:
                raise StoreError(
                    f"The value for {operation.key!r} has {len(operation.value)} bytes, more than the "
                    f"{MAX_VALUE_BYTES} that a store takes: store less."
                )
    if total > MAX_REQUEST_BYTES:
        raise StoreError(
            f"A transaction of {total} bytes was refused: {MAX_REQUEST_BYTES} are possible, split it."
        )


def check_ttl(ttl_s: float) -> float:
    """Return the TTL, or ValueError for one that is not a positive number of at most a day."""
    if not 0 < ttl_s <= 86_400:
        raise ValueError(f"a lease lasts more than 0 and at most 86400 seconds, not {ttl_s}")
    return ttl_s


def lease_gone(lease_id: int) -> LeaseGone:
    return LeaseGone(f"The lease {lease_id} has ended, with its keys: ask for a new one and start over.")


async def settle_store_id(store: Store) -> str:
    """Return the store's id; write a new one where there is none. All callers get the same id.

    Raises StoreError when the key holds something else, StoreIndefinite when three attempts leave no id.
    """
    lost: StoreIndefinite | None = None
    for _ in range(3):
        entry = await store.get(STORE_ID_KEY)
        if entry is not None:
            return _checked_store_id(entry.value)
        new = Put(STORE_ID_KEY, secrets.token_hex(8).encode())
        try:
            await store.commit([Compare(STORE_ID_KEY, create_revision=0)], [new])
        except StoreIndefinite as error:
            lost = error
    raise StoreIndefinite(
        f"The store did not keep its id under {STORE_ID_KEY!r} in three attempts: check its health."
    ) from lost


def _checked_store_id(value: bytes) -> str:
    text = value[:64].decode("ascii", "replace")
    if not (0 < len(value) <= 64 and text.isascii() and text.isalnum()):
        raise StoreError(
            f"The key {STORE_ID_KEY!r} does not hold a store id of ours: this store belongs to something "
            "else, use another one or delete that key."
        )
    return text
