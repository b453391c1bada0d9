"""The stored state of a job: its membership record, and for people its events, ledger and records.

No decision waits for what is for people. Of these, a record that the store refuses stays in memory.
"""

import asyncio
import json
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from itertools import takewhile
from signal import Signals
from typing import Any

from msgspec import field

from fabric.errors import ProtocolError, StoreError, StoreIndefinite
from fabric.lighthouse.connections.validation import MAX_REPLICAS
from fabric.lighthouse.diagnosis.rank_probe import ProbeAccess
from fabric.lighthouse.diagnosis.status_text import left_by
from fabric.lighthouse.election import Commit, Term
from fabric.lighthouse.history.ledger import GoodputLedger, JobSample
from fabric.lighthouse.history.recovery import CAPACITY, NAMED, Recoveries, RecoveryRecord
from fabric.lighthouse.history.slowdowns import SlowdownRecord, Slowdowns
from fabric.lighthouse.telemetry import LighthouseMetrics, Traces
from fabric.model import Record, Value
from fabric.protocol.leader.core import LeaderConfig, LeaderCore
from fabric.protocol.messages import wire
from fabric.runtime.system_calls import seconds_since_boot
from fabric.runtime.tasks import Tasks
from fabric.store.base import Compare, Delete, Operation, Put, Store

# One job's membership record in the store: read it, and replace it under two guards.
#
# A write is applied only while this lighthouse's election key stands and the record is still the one that
# was read or written here last. So neither a deposed leader nor a stale leader can undo a write.


def records_prefix(namespace: str) -> str:
    """Return the prefix of the records of all jobs."""
    return f"/fabric/{namespace}/jobs/"


def record_key(namespace: str, job: str) -> str:
    """Return the key of the record of ``job``."""
    return f"{records_prefix(namespace)}{job}/record"


def job_of(namespace: str, key: str) -> str:
    """Invert ``record_key``; empty for a key of another kind."""
    name, _, kind = key.removeprefix(records_prefix(namespace)).partition("/")
    return name if kind == "record" else ""


# Kind of the records for people -> their class, and what an error calls one of them.
_KINDS: Mapping[str, tuple[type[RecoveryRecord | SlowdownRecord], str]] = {
    "recoveries": (RecoveryRecord, "recovery record"),
    "slowdowns": (SlowdownRecord, "slowdown record"),
}


def folder_of(namespace: str, kind: str, job: str) -> str:
    """Return the prefix of the keys of the ``recoveries`` or ``slowdowns`` of ``job``; a key ends with an id.

    They are not under the prefix of the jobs' records, which a new leader must read before it can lead.
    """
    return f"/fabric/{namespace}/{kind}/{job}/"


def ledger_of(namespace: str, job: str) -> str:
    """Return the key of the goodput ledger of ``job``."""
    return f"/fabric/{namespace}/ledgers/{job}"


class StoredRecord:
    """The record of ``job`` as one term sees it. ``revision``: of the last read or write, 0 for none."""

    def __init__(self, context: "TermContext", job: str, revision: int) -> None:
        self._store, self._commit, self._term = context.store, context.commit, context.term
        self._key = record_key(context.namespace, job)
        self._folders = {kind: folder_of(context.namespace, kind, job) for kind in _KINDS}
        self._ledger = ledger_of(context.namespace, job)
        self._revision = revision
        self._metrics, self._job = context.metrics, job

    async def write(self, record: Record) -> bool:
        """Replace the record; False when a guard refused. Raises as ``Store.commit`` does."""
        guards = [self._term.guard, Compare(self._key, mod_revision=self._revision)]
        begun = time.monotonic()
        outcome = "failed"
        try:
            revision = await self._commit(guards, [Put(self._key, wire.encode_record(record))])
            outcome = "refused" if revision is None else "written"
        except StoreIndefinite:
            outcome = "indefinite"
            raise
        finally:
            self._metrics.record_write(self._job, outcome, time.monotonic() - begun)
        if revision is None:
            return False
        self._revision = revision
        return True

    async def earlier(self, kind: str) -> list[Any]:
        """Return the records of this kind that are stored. Raises StoreError or ProtocolError."""
        entries, _ = await self._store.list(self._folders[kind])
        record, name = _KINDS[kind]
        return [wire.decode_value(record, entry.value, name) for entry in entries]

    async def keep(self, kind: str, record: RecoveryRecord | SlowdownRecord, ids: list[int]) -> None:
        """Write a record, and remove stored records older than the first of ``ids`` (ascending).
        Raises as ``Store.commit`` does; the store refuses a deposed leader's write, which is then dropped."""
        folder = self._folders[kind]
        body = json.dumps(record.to_json()).encode()
        operations: list[Operation] = [Put(f"{folder}{record.id:020d}", body)]
        if len(ids) >= CAPACITY and record.id == ids[-1]:
            entries, _ = await self._store.list(folder)
            old = [kv.key for kv in entries if kv.key < f"{folder}{ids[0]:020d}"]
            operations += [Delete(key) for key in old[:50]]
        await self._commit([self._term.guard], operations)

    async def delete(self) -> bool:
        """Remove all records and the ledger of a job that is over; False when a guard refused.
        Raises as ``Store.commit`` does."""
        for folder in self._folders.values():
            entries, _ = await self._store.list(folder)
            for first in range(0, len(entries), 50):
                some = [Delete(kv.key) for kv in entries[first : first + 50]]
                await self._commit([self._term.guard], some)
        guards = [self._term.guard, Compare(self._key, mod_revision=self._revision)]
        return await self._commit(guards, [Delete(self._key), Delete(self._ledger)]) is not None

    async def keep_ledger(self, saved: Mapping[str, object]) -> None:
        """Write the ledger; raises as ``Store.commit`` does. A deposed leader's write is dropped."""
        await self._commit([self._term.guard], [Put(self._ledger, json.dumps(saved).encode())])

    async def earlier_ledger(self) -> Any:
        """Return the stored ledger; None without one. Raises StoreError or ValueError."""
        entry = await self._store.get(self._ledger)
        return None if entry is None else json.loads(entry.value)

    async def read(self) -> Record | None:
        """Return the record as it is now.

        Raises StoreError when it cannot be read, ProtocolError when it is not a record, and Deposed when this
        term's election key is gone.
        """
        holder = await self._store.get(self._term.key)
        if holder is None or holder.create_revision != self._term.revision:
            raise Deposed("another lighthouse has been elected")
        entry = await self._store.get(self._key)
        record = None if entry is None else wire.decode_record(entry.value)
        self._revision = 0 if entry is None else entry.mod_revision
        return record


class Deposed(StoreError):
    """The election key is no longer this term's, so the store refuses all its writes."""


# A job's recent events, one line each, for people and for tools that follow them.
#
# The newest ``MOST_EVENTS`` events are kept. An id is the time in microseconds, raised where needed so that
# ids only grow. So a reader can go on at another lighthouse after a fail-over, with the id of its last
# event. An id is the time of day at which the log began plus the monotonic time since, so a clock change
# does not affect it.


MOST_EVENTS = 10_000
# The most events that one turn of the loop writes for a reader.
PIECE = 500
_MAX_WHY = 2000


class JobEvent(Value):
    """One event of a job."""

    id: int
    t: float  # time of the event, Unix seconds
    kind: str
    epoch: int
    about: str  # the replica that the event is about, or empty
    why: str  # why the event happened, in one sentence
    incident_id: str = ""  # id of the event's incident, if any; replicas and checkpoint servers log the id


class EventLog:
    """Append with ``add``; read with ``after``; ``follow`` waits for more until ``end_followers``."""

    def __init__(
        self,
        *,
        capacity: int = MOST_EVENTS,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = seconds_since_boot,
    ) -> None:
        self._kept: deque[JobEvent] = deque(maxlen=capacity)
        self._clock, self._steady = clock, steady
        self._ahead_s = clock() - steady()
        self._last = 0
        self._changed = asyncio.Event()
        self._round = 0

    def add(self, kind: str, epoch: int, about: str, why: str, incident_id: str = "") -> JobEvent:
        self._last = max(self._last + 1, round((self._steady() + self._ahead_s) * 1e6))
        event = JobEvent(self._last, self._clock(), kind, epoch, about, why[:_MAX_WHY], incident_id)
        self._kept.append(event)
        self._wake()
        return event

    @property
    def newest(self) -> int:
        """Id of the newest event, 0 before the first."""
        return self._last

    def after(self, last: int) -> list[JobEvent]:
        """Return the kept events with a greater id, oldest first."""
        newer = list(takewhile(lambda event: event.id > last, reversed(self._kept)))
        newer.reverse()
        return newer

    async def follow(self, last: int) -> AsyncGenerator[list[JobEvent], None]:
        """Yield batches of events after ``last``, and wait for more. Ends with ``end_followers``."""
        begun = self._round
        while True:
            changed = self._changed
            newer = self.after(last)[:PIECE]
            if newer:
                last = newer[-1].id
                yield newer
            elif self._round != begun:
                return
            else:
                await changed.wait()

    def end_followers(self) -> None:
        """Give followers the remaining events, and then the end."""
        self._round += 1
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


# The context that all jobs of one term share: the term, the leader's settings, metrics and tasks.


class TermContext(Value):
    """The context of one term."""

    term: Term
    store: Store
    commit: Commit  # does all writes
    namespace: str
    config: LeaderConfig
    metrics: LighthouseMetrics
    tasks: Tasks
    access_to: Callable[[str, bool], ProbeAccess] = lambda _job, _with_own: ProbeAccess()
    traces: Traces | None = None
    clock: Callable[[], float] = time.monotonic
    max_replicas: int = MAX_REPLICAS


def entropy() -> random.Random:
    """Return a source of nonces, by which a writer recognises its own record; each lighthouse has its own."""
    return random.Random(secrets.randbits(128))  # noqa: S311


log = logging.getLogger(__name__)

# Seconds between two samples of the ledger (more in a job of many connections), and between two writes of it
# (fewer when its state has changed).
SAMPLE_S = 0.25
_CONNECTIONS_PER_S = 4000
LEDGER_S = 60.0
_LEDGER_CHANGED_S = 5.0
# In a job of many members, the seconds between two looks at the recoveries.
_OBSERVE_S = 0.01
_KEEP_LARGE_S = 1.0


class JobPast(Value):
    """The past of a job, for people. It outlives a term, and so a short fault of the store."""

    events: EventLog = field(default_factory=EventLog)
    recoveries: Recoveries = field(default_factory=Recoveries)
    slowdowns: Slowdowns = field(default_factory=Slowdowns)


class JobHistory:
    """The history of one job in one term."""

    def __init__(self, job: str, context: TermContext, stored: StoredRecord, past: JobPast) -> None:
        self.ledger = GoodputLedger()
        self.left_by = 0  # the signal that ended all launchers, from ``absences.left_by``
        self.ledger_is_known = True  # False until the job has read what an earlier leader stored
        self.recoveries, self.slowdowns = past.recoveries, past.slowdowns
        self._job = job
        self._context = context
        self._stored = stored
        self._sampled_at = self._ledger_stored_at = context.clock()
        self._observed_at = 0.0
        self._unkept: dict[str, dict[int, RecoveryRecord | SlowdownRecord]] = {kind: {} for kind in _KINDS}

    def begin(self, record: Record | None) -> None:
        """Begin to lead the job from ``record``, which counts as no answer to a failure."""
        self.recoveries.record = record
        self.keep_slowdowns(self.slowdowns.begin(time.time()))

    def load(self) -> None:
        """Read what earlier leaders have stored. The store is asked only once, because it is for people."""
        self.ledger_is_known = False
        kinds = [kind for kind in _KINDS if not self._records(kind).kept]
        for work in (*map(self._load_records, kinds), self._load_ledger()):
            self._context.tasks.start(f"history of {self._job}", work)

    def _records(self, kind: str) -> Recoveries | Slowdowns:
        return self.recoveries if kind == "recoveries" else self.slowdowns

    async def _load_records(self, kind: str) -> None:
        """Take the records of earlier leaders, and end the slowdowns that they left open."""
        try:
            stored = await self._stored.earlier(kind)
        except (StoreError, ProtocolError, ValueError) as error:
            log.warning("job %s: its older %s are not shown: %s", self._job, kind, error)
            return
        if kind == "recoveries":
            self.recoveries.restore(stored)
            return
        self.keep_slowdowns(self.slowdowns.restore(stored, time.time()))

    async def _load_ledger(self) -> None:
        try:
            stored = await self._stored.earlier_ledger()
            if stored is not None:
                self.ledger.restore(stored, self._context.clock(), time.time())
                # The launchers told the earlier leader alone.
                self.left_by = Signals(signal) if (signal := stored.get("left_by", 0)) else 0
        except StoreError as error:
            log.warning("job %s: its ledger is not read, and not written in this term: %s", self._job, error)
            return
        except (ProtocolError, ValueError) as error:
            log.warning("job %s: its ledger begins anew: %s", self._job, error)
        self.ledger_is_known = True

    def is_sample_due(self, connections: int, now: float) -> bool:
        quiet_s = now - self._sampled_at
        return quiet_s >= SAMPLE_S and quiet_s >= connections / _CONNECTIONS_PER_S

    def sample(self, core: LeaderCore, now: float, *, keep: bool) -> GoodputLedger:
        """Count the job's time up to now; ``keep``: also store the ledger when a write is due."""
        record = core.state.record
        was_left_by, self.left_by = self.left_by, left_by(core, self.recoveries, now, self.left_by)
        is_on = record is not None and not (record.complete or record.failed or self.left_by)
        members = len(record.roster) if record is not None else 0
        before, self._sampled_at = self.ledger.state, now
        # Until a new leader has heard a member, it only knows the step at which the generation began.
        step = -1 if core.state.highest_step is None else core.state.highest_step
        generation = record.generation if record is not None else 0
        wanted = core.state.config.policy.start_replicas
        sample = JobSample(is_on, step, members, wanted, self.recoveries.is_recovering, generation)
        self.ledger.observe(sample, now)
        # A lost write does no harm: the next write holds the same sums.
        waits_s = LEDGER_S if self.ledger.state == before else _LEDGER_CHANGED_S
        is_due = self.left_by != was_left_by or now - self._ledger_stored_at >= waits_s
        if keep and self.ledger_is_known and is_due:
            self._ledger_stored_at = now
            saved = {**self.ledger.saved(time.time()), "left_by": self.left_by}
            self._context.tasks.start(f"keep the ledger of {self._job}", self._write_ledger(saved))
        return self.ledger

    def is_observation_due(self, now: float) -> bool:
        """Whether a job of many members should look at its recoveries again."""
        return now - self._observed_at >= _OBSERVE_S

    def observe(self, core: LeaderCore, newest_event: int, now: float) -> list[RecoveryRecord]:
        """Bring the recovery records up to date; return those that have changed."""
        self._observed_at = now
        changed = self.recoveries.observe(core, newest_event, time.time())
        for recovery in changed:
            self._context.metrics.recovery(self._job, recovery)
            self.keep(recovery)
        return changed

    def keep(self, recovery: RecoveryRecord) -> None:
        """Store this record from a task, and send it as a trace when it is complete."""
        if self._context.traces is not None:
            self._context.traces.recovery(self._job, recovery)
        self._keep("recoveries", recovery)

    def _keep(self, kind: str, record: RecoveryRecord | SlowdownRecord) -> None:
        is_idle = not self._unkept[kind]
        self._unkept[kind][record.id] = record
        if is_idle:
            self._context.tasks.start(f"keep {kind} of {self._job}", self._store(kind))

    async def _store(self, kind: str) -> None:
        """Store one record after the other; write a record again that has changed since."""
        unkept = self._unkept[kind]
        while unkept:
            record = unkept.pop(next(iter(unkept)))
            try:
                await self._stored.keep(kind, record, [x.id for x in self._records(kind).kept])
            except StoreError as error:
                log.warning("job %s: %d of its %s is not in the store: %s", self._job, record.id, kind, error)
            if isinstance(record, RecoveryRecord) and len(record.lost) > NAMED:
                await asyncio.sleep(_KEEP_LARGE_S)  # a large record changes at each return of a replica

    def keep_slowdowns(self, changed: Iterable[SlowdownRecord]) -> None:
        """Store these records from a task."""
        for slowdown in changed:
            self._keep("slowdowns", slowdown)

    async def _write_ledger(self, saved: dict[str, Any]) -> None:
        try:
            await self._stored.keep_ledger(saved)
        except StoreError as error:
            log.warning("job %s: its ledger is not in the store: %s", self._job, error)
