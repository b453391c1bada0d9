"""The cost of each slowdown: one record per slow replica or job, from its first report to its end.

A record is for people, like a recovery record. Times are Unix seconds. The costs are estimates: replicas
report the times of some of their steps.
"""

from collections.abc import Iterable
from typing import Any

from msgspec import Struct, field, to_builtins
from msgspec.structs import replace

from fabric.health.detector import MOST_BEHIND
from fabric.lighthouse.history.recovery import CAPACITY
from fabric.model import Value, shortened

# The most actions that one record lists.
MOST_ACTIONS = 20
# Events that the record's own fields show, and stops of the trainer, which say nothing new.
_OWN_KINDS = ("slow", "no longer slow", "slow part", "trainer stopped", "trainer running")
VERDICT = "slowness "  # the kind of the event of a micro-benchmark's verdict, which follows
_NEW_LEADER = "another lighthouse leads, which does not know whether it lasts"


class SlowdownState(Value):
    """A slowdown as it is now."""

    replica: str  # empty: the whole job
    scope: str = ""  # rank, stage, link, replica or job
    ranks: tuple[int, ...] = ()  # the slow ranks; empty: all
    factor: float = 1.0  # time of the slow units over the time of equal units
    cause: str = ""  # the evidence, in a sentence
    steps: int = 0  # steps since its beginning
    cost_s: float = 0.0  # seconds by which these steps took longer
    newest: int | None = None  # the newest counted step

    def counted(self, step: int, seconds: float) -> "SlowdownState":
        """Count a step that took ``seconds``; steps without a report since the last one took as long."""
        steps = 1 if self.newest is None else max(0, min(step - self.newest, MOST_BEHIND))
        cost_s = self.cost_s + steps * seconds * (1.0 - 1.0 / self.factor)
        return replace(self, steps=self.steps + steps, cost_s=cost_s, newest=step)


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

    def take(self, state: SlowdownState) -> bool:
        """Bring this record up to date; return whether more than its cost has changed."""
        before = (self.scope, self.ranks)
        if state.factor > self.factor or (state.scope, list(state.ranks)) != before:
            self.scope, self.ranks, self.cause = state.scope, list(state.ranks), shortened(state.cause, 1000)
        self.factor = round(max(self.factor, state.factor), 3)
        self.steps, self.cost_s = state.steps, round(state.cost_s, 3)
        return (self.scope, self.ranks) != before

    def to_json(self) -> dict[str, Any]:
        """Return the form for the store and for people."""
        body: dict[str, Any] = to_builtins(self)
        return body


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

    def observe(
        self, states: Iterable[SlowdownState], event: int, step: int, unix_s: float
    ) -> list[SlowdownRecord]:
        """Bring the records up to date; return those to store: begun, ended, or of another scope.

        ``event``: the id of the newest event."""
        changed, present = [], {state.replica: state for state in states}
        for name in [name for name in self._open if name not in present]:
            record = self._open.pop(name)
            record.ended, record.ended_step = unix_s, step
            record.ended_why = "it takes as long as predicted again"
            changed.append(record)
        for name, state in present.items():
            record = self._open.get(name) or self._begin(state, event + len(changed), step, unix_s)
            is_new = not record.cause
            self.total_s += max(0.0, state.cost_s - record.cost_s)
            if record.take(state) or is_new:
                changed.append(record)
        return changed

    def _begin(self, state: SlowdownState, event: int, step: int, unix_s: float) -> SlowdownRecord:
        latest = self.kept[-1].id if self.kept else 0
        record = SlowdownRecord(max(event, latest + 1), state.replica, state.scope, unix_s, step)
        self.kept = [*self.kept, record][-CAPACITY:]
        self._open[state.replica] = record
        self.counts[state.scope] = self.counts.get(state.scope, 0) + 1
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
