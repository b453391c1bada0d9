"""The control store: one record under compare-and-set, and the election key that guards every write.

A write may be refused, may succeed with its answer lost, and may land long after its writer gave up.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sim.checkers import Checks
from sim.clockwork import Clockwork

from fabric.model import Record
from fabric.protocol.messages import wire

LEASE_S = 1.0


# Records are immutable and checked after every action, so each record is decoded once.
decode_record = lru_cache(maxsize=64)(wire.decode_record)


class Store:
    """The store; ``mishaps`` is the probability that an operation fails, and ``down`` fails all
    operations.
    """

    def __init__(self, clockwork: Clockwork, checks: Checks) -> None:
        self.clockwork = clockwork
        self.checks = checks
        self.name = "store"  # the store's id, which changes with every wipe
        self.stored = b""  # the record as bytes of the shipping codec
        self.revision = 0  # of the election key; grows with every election
        self.holder = ""
        self.expires = 0.0
        self.mishaps = 0.05
        self.down = False
        self.starts = 0
        self.refusing = False  # whether the store answers but refuses writes, as with a full disk
        self.cut: set[str] = set()  # lighthouses that do not reach the store, but that members reach
        # called before a write with the number of the writer's election
        self.before_write: Callable[[int], None] | None = None
        self.under_way = 0
        self.lease_s = LEASE_S

    @property
    def record(self) -> Record | None:
        return decode_record(self.stored) if self.stored else None

    def crash(self) -> None:
        """Crash: operations under way are lost. After the restart the committed record is there, and the
        lease begins again.
        """
        self.down = True
        self.starts += 1
        self.clockwork.counts["store: operations lost in a crash"] += self.under_way
        self.under_way = 0

    def restart(self) -> None:
        self.down = False
        if self.holder and self.clockwork.now < self.expires:
            self.expires = self.clockwork.now + self.lease_s

    def wipe(self, name: str) -> None:
        """Replace the store by an empty one, without record and election key."""
        self.name, self.stored, self.holder = name, b"", ""
        self.revision += 1

    def restore(self, copy: bytes) -> None:
        """Replace the contents by an older copy of the same store, without an election key."""
        self.stored, self.holder = copy, ""
        self.revision += 1

    def _soon(self, action: Callable[[], None], lost: Callable[[], None]) -> None:
        """Perform the operation at the store, or call ``lost`` if the store has crashed meanwhile."""
        starts = self.starts
        self.under_way += 1

        def arrive() -> None:
            if self.starts == starts:
                self.under_way -= 1
                action()
            else:
                lost()

        self.clockwork.at(self._delay(), arrive)

    def acquire(self, name: str, answer: Callable[[int], None]) -> None:
        """Create the election key if it is absent; answer its revision, or 0."""

        def apply() -> None:
            if self.down or (self.holder and self.clockwork.now < self.expires):
                answer(0)
                return
            self.revision += 1
            self.holder, self.expires = name, self.clockwork.now + self.lease_s
            self.clockwork.counts["elections"] += 1
            self.checks.elected(self.revision)
            answer(self.revision)

        self._soon(apply, lambda: None)

    def renew(self, revision: int, answer: Callable[[bool], None]) -> None:
        """Keep the lease alive."""

        def apply() -> None:
            if self.down:
                return
            mine = self.revision == revision and self.clockwork.now < self.expires
            if mine:
                self.expires = self.clockwork.now + self.lease_s
            answer(mine)

        self._soon(apply, lambda: None)

    def resign(self, revision: int) -> None:
        if self.revision == revision:
            self.holder = ""

    def read(self, answer: Callable[[Record | None], None]) -> None:
        """Read the record; the caller's shell retries, so the answer comes once, late at worst."""

        def apply() -> None:
            if self.down:
                self.clockwork.at(0.2, apply)
            else:
                answer(decode_record(self.stored) if self.stored else None)

        self._soon(apply, apply)

    def write(
        self, record: Record, previous: Record | None, revision: int, answer: Callable[[str], None]
    ) -> None:
        """Write under the guard of the election key and the old record; answer ok, refused or indefinite."""
        if self.checks.penalties is not None:
            self.checks.penalties.asked(record)
        if self.before_write is not None:
            crash, self.before_write = self.before_write, None
            self.clockwork.at(0.0, lambda: crash(revision))
            late = self.clockwork.between(0.9, 2.0)
            self.clockwork.at(late, lambda: self._apply_late(record, previous, revision))
        elif self.refusing:
            self.clockwork.counts["store: a write was refused for good"] += 1
            self._soon(lambda: answer("refused"), lambda: answer("indefinite"))
        elif self.down:
            self.clockwork.at(0.3, lambda: answer("indefinite"))
        elif not self.clockwork.chance(self.mishaps):
            self._soon(
                lambda: answer(self._apply(record, previous, revision)),
                lambda: self.clockwork.at(0.3, lambda: answer("indefinite")),
            )
        else:
            self._mishap(record, previous, revision, answer)

    def _mishap(
        self, record: Record, previous: Record | None, revision: int, answer: Callable[[str], None]
    ) -> None:
        clockwork = self.clockwork
        timeout = clockwork.between(0.05, 0.3)
        clockwork.at(timeout, lambda: answer("indefinite"))
        kind = clockwork.random.randrange(3)
        if kind == 0:
            clockwork.counts["store: write lost"] += 1
        elif kind == 1:
            clockwork.counts["store: answer lost"] += 1
            clockwork.at(timeout / 2, lambda: self._apply(record, previous, revision))
        else:
            clockwork.at(
                timeout + clockwork.between(0.0, 1.5), lambda: self._apply_late(record, previous, revision)
            )

    def _apply_late(self, record: Record, previous: Record | None, revision: int) -> None:
        landed = self._apply(record, previous, revision) == "ok"
        self.clockwork.counts["store: late write " + ("landed" if landed else "refused")] += 1

    def _apply(self, record: Record, previous: Record | None, revision: int) -> str:
        if self.down:
            return "indefinite"
        if not self._leads(revision):
            self.clockwork.counts["store: deposed writer refused"] += 1
            return "refused"
        if (self.record.nonce if self.record else "") != (previous.nonce if previous else ""):
            return "refused"
        self.checks.written(self.record, record, revision)
        for path in self.checks.paths(self.record, record):
            self.clockwork.counts[path] += 1
        self.stored = wire.encode_record(record)
        self.clockwork.show("store", ">", record)
        return "ok"

    def _leads(self, revision: int) -> bool:
        return self.revision == revision and bool(self.holder) and self.clockwork.now < self.expires

    def _delay(self) -> float:
        return self.clockwork.between(0.001, 0.02)


class Reach:
    """The store as one lighthouse reaches it; while cut off, answers come late or never."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @property
    def _is_cut(self) -> bool:
        return self._name in self._store.cut

    def acquire(self, name: str, answer: Callable[[int], None]) -> None:
        if not self._is_cut:
            self._store.acquire(name, answer)
        else:
            self._store.clockwork.at(0.1, lambda: answer(0))

    def renew(self, revision: int, answer: Callable[[bool], None]) -> None:
        if not self._is_cut:
            self._store.renew(revision, answer)

    def resign(self, revision: int) -> None:
        if not self._is_cut:
            self._store.resign(revision)

    def read(self, answer: Callable[[Record | None], None]) -> None:
        if self._is_cut:
            self._store.clockwork.at(0.2, lambda: self.read(answer))
        else:
            self._store.read(answer)

    def write(
        self, record: Record, previous: Record | None, revision: int, answer: Callable[[str], None]
    ) -> None:
        if self._is_cut:
            self._store.clockwork.counts["store: a write did not arrive"] += 1
            self._store.clockwork.at(0.3, lambda: answer("indefinite"))
        else:
            self._store.write(record, previous, revision, answer)
