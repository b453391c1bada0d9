"""The cost of each slowdown: one record per slow replica or job, from its first report to its end.

A record is for people, like a recovery record. Times are Unix seconds. The costs are estimates: replicas
report the times of some of their steps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field, to_builtins

from fabric.health.detector import MOST_BEHIND
from fabric.health.localise import Slowdown
from fabric.lighthouse.history.recovery import CAPACITY
from fabric.model import Value, shortened

# The most actions that one record lists.
MOST_ACTIONS = 20
# Events that the record's own fields show, and stops of the trainer, which say nothing new.
_OWN_KINDS = ("slow", "no longer slow", "slow part", "trainer stopped", "trainer running")
VERDICT = "slowness "  # the kind of the event of a micro-benchmark's verdict, which follows
_NEW_LEADER = "another lighthouse leads, which does not know whether it lasts"


class SlowdownAction(Value):
    """One event about the replica while it was slow: advice, a verdict, or a remedy."""

    t: float
    kind: str
    why: str


class SlowdownRecord(Struct):
    """One slowdown. Times are Unix seconds, 0.0 until they come."""

    id: int  # id of the event that began this slowdown
    replica: str  # empty: the whole job
    scope: str
    detected: float
    step: int  # newest step when it was reported
    ranks: list[int] = field(default_factory=list)
    factor: float = 1.0  # the largest factor
    cause: str = ""
    verdict: str = ""  # the micro-benchmark's verdict: confirmed, refuted or no answer; empty: none was run
    actions: list[SlowdownAction] = field(default_factory=list)
    steps: int = 0
    cost_s: float = 0.0
    ended: float = 0.0
    ended_step: int = 0
    ended_why: str = ""

    @property
    def is_open(self) -> bool:
        return not self.ended

    def take(self, slowdown: Slowdown, ranks: Sequence[int]) -> bool:
        """Bring this record up to date; return whether more than its factor has changed."""
        before, now = (self.scope, self.ranks), (str(slowdown.scope), list(ranks))
        if slowdown.factor > self.factor or now != before:
            (self.scope, self.ranks), self.cause = now, shortened(slowdown.evidence, 1000)
        self.factor = round(max(self.factor, slowdown.factor), 3)
        return now != before

    def to_json(self) -> dict[str, Any]:
        """Return the form for the store and for people."""
        body: dict[str, Any] = to_builtins(self)
        return body | {"cost_s": round(self.cost_s, 3)}


def _leave(records: list[SlowdownRecord], unix_s: float) -> None:
    for record in records:
        record.ended, record.ended_step = unix_s, record.step + record.steps
        record.ended_why = _NEW_LEADER


class Slowdowns:
    """The slowdown records of one job, oldest first."""

    def __init__(self) -> None:
        self.kept: list[SlowdownRecord] = []
        self.total_s = 0.0  # the cost of all slowdowns that this process has seen
        self.counts: dict[str, int] = {}  # scope -> number of slowdowns that this process has seen
        self._open: dict[str, SlowdownRecord] = {}  # by replica
        self._counted: dict[str, int] = {}  # the newest step that an open record counts, by replica

    def restore(self, stored: list[SlowdownRecord], unix_s: float) -> list[SlowdownRecord]:
        """Take the records of an earlier leader; return those that it left open, which end now."""
        new = {record.id for record in self.kept}
        older = [record for record in stored if record.id not in new]
        self.kept = sorted([*older, *self.kept], key=lambda record: record.id)[-CAPACITY:]
        left = [record for record in older if record.is_open]
        _leave(left, unix_s)
        return left

    def begin(self, unix_s: float) -> list[SlowdownRecord]:
        """Begin a term: end the open records, because their slowdowns may be over. Return these records."""
        left, self._open = list(self._open.values()), {}
        _leave(left, unix_s)
        return left

    def count(self, replica: str, step: int, lost_s: float) -> None:
        """Count a step that took longer by ``lost_s``; steps without a report since the last one did too."""
        if (record := self._open.get(replica)) is not None:
            newest = self._counted.get(replica, step - 1)
            steps, self._counted[replica] = max(0, min(step - newest, MOST_BEHIND)), step
            record.steps, record.cost_s = record.steps + steps, record.cost_s + steps * lost_s
            self.total_s += steps * lost_s

    def observe(
        self, slow: Mapping[str, tuple[Slowdown, Sequence[int]]], event: int, step: int, unix_s: float
    ) -> list[SlowdownRecord]:
        """Bring the records up to date; return those to store: begun, ended, or of another scope.

        ``slow``: the present slowdowns with their ranks, by replica. ``event``: the id of the newest event.
        """
        changed = []
        for name in [name for name in self._open if name not in slow]:
            record = self._open.pop(name)
            record.ended, record.ended_step = unix_s, step
            record.ended_why = "it takes as long as predicted again"
            changed.append(record)
        for name, (slowdown, ranks) in slow.items():
            is_new = name not in self._open
            record = self._open.get(name) or self._begin(slowdown, event + len(changed), step, unix_s)
            if record.take(slowdown, ranks) or is_new:
                changed.append(record)
        return changed

    def _begin(self, slowdown: Slowdown, event: int, step: int, unix_s: float) -> SlowdownRecord:
        latest, scope = self.kept[-1].id if self.kept else 0, str(slowdown.scope)
        record = SlowdownRecord(max(event, latest + 1), slowdown.replica, scope, unix_s, step)
        self.kept = [*self.kept, record][-CAPACITY:]
        self._open[slowdown.replica] = record
        self._counted.pop(slowdown.replica, None)
        self.counts[scope] = self.counts.get(scope, 0) + 1
        return record

    def note(self, kind: str, about: str, why: str, unix_s: float) -> list[SlowdownRecord]:
        """Add an event about a slow replica to its record; return the record if it has changed."""
        record = self._open.get(about)
        if record is None or kind in _OWN_KINDS:
            return []
        if kind.startswith(VERDICT):
            record.verdict = kind.removeprefix(VERDICT)
        elif len(record.actions) >= MOST_ACTIONS:
            return []
        record.actions.append(SlowdownAction(unix_s, kind, why[:300]))
        return [record]
