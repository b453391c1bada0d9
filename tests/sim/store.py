"""The control store: one record under compare-and-set, and the election key that guards every write.

A write may be refused, may succeed with its answer lost, and may land long after its writer gave up.
"""

from collections.abc import Callable

from sim.checkers import Checks
from sim.clockwork import Clockwork

from fabric.model import Record

LEASE_S = 1.0


class Store:
    """``mishaps`` is how often an operation goes wrong; ``down`` fails all of them."""

    def __init__(self, clockwork: Clockwork, checks: Checks) -> None:
        self.clockwork = clockwork
        self.checks = checks
        self.record: Record | None = None
        self.revision = 0  # of the election key; grows with every election
        self.holder = ""
        self.expires = 0.0
        self.mishaps = 0.05
        self.down = False

    def acquire(self, name: str, answer: Callable[[int], None]) -> None:
        """Create the election key if it is absent; answers its revision, or 0."""

        def apply() -> None:
            if self.down or (self.holder and self.clockwork.now < self.expires):
                answer(0)
                return
            self.revision += 1
            self.holder, self.expires = name, self.clockwork.now + LEASE_S
            self.clockwork.counts["elections"] += 1
            answer(self.revision)

        self.clockwork.at(self._delay(), apply)

    def renew(self, revision: int, answer: Callable[[bool], None]) -> None:
        """Keep the lease alive."""

        def apply() -> None:
            if self.down:
                return
            mine = self.revision == revision and self.clockwork.now < self.expires
            if mine:
                self.expires = self.clockwork.now + LEASE_S
            answer(mine)

        self.clockwork.at(self._delay(), apply)

    def resign(self, revision: int) -> None:
        if self.revision == revision:
            self.holder = ""

    def read(self, answer: Callable[[Record | None], None]) -> None:
        """Retried by the caller's shell until it works, so it answers once, late at worst."""

        def apply() -> None:
            if self.down:
                self.clockwork.at(0.2, apply)
            else:
                answer(self.record)

        self.clockwork.at(self._delay(), apply)

    def write(
        self, record: Record, previous: Record | None, revision: int, answer: Callable[[str], None]
    ) -> None:
        """Guarded by the election key and the record as it was; answers ok, refused or indefinite."""
        if self.down:
            self.clockwork.at(0.3, lambda: answer("indefinite"))
        elif not self.clockwork.chance(self.mishaps):
            self.clockwork.at(self._delay(), lambda: answer(self._apply(record, previous, revision)))
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
        held = self.revision == revision and bool(self.holder) and self.clockwork.now < self.expires
        if not held:
            self.clockwork.counts["store: deposed writer refused"] += 1
            return "refused"
        if (self.record.nonce if self.record else "") != (previous.nonce if previous else ""):
            return "refused"
        self.checks.written(self.record, record)
        for path in self.checks.paths(self.record, record):
            self.clockwork.counts[path] += 1
        self.record = record
        self.clockwork.trace("store", f"{record.epoch} {record}")
        return "ok"

    def _delay(self) -> float:
        return self.clockwork.between(0.001, 0.02)
