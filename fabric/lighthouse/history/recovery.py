"""The cost of each failure: one recovery record per failure, filled in as the leader core learns of it.

A record begins when an eviction is pending or a member aborts. It is complete when a step has been committed
after the failure and every lost replica is a member again. Times are Unix seconds at which the lighthouse
learnt of the event: it learns of the first step after a failure from a heartbeat.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import Any

from msgspec import Struct, field, to_builtins
from msgspec.structs import replace

from fabric.model import Member, Record, Value, incident_id_of, shortened
from fabric.protocol.leader.core import LeaderCore
from fabric.protocol.leader.evidence import host_of

# The newest report or refusal of a failed attempt of each replica, until the replica attaches.


# The most reports that are kept; beyond it the oldest are forgotten.
_KEPT = 100
_MOST_ATTACHED = 20_000


class LaunchReport(Value):
    """How the newest attempt of a replica ended, in its launcher's words."""

    replica: str
    host: str
    why: str
    gave_up: bool  # the launcher starts the replica no more
    is_spare: bool
    at: float  # Unix seconds; `LaunchReports` keeps the time of the first failure in a row
    last_line: str = ""  # of the attempt's standard error; empty where the launcher does not know it
    stopped_by: int = 0  # the signal that ended the launcher, and ``why`` names it; 0: none
    is_refused: bool = False  # the lighthouse refused the attempt's session, and ``why`` says so

    @property
    def sentence(self) -> str:
        """Return the reason without the attempt's number, so that equal ends have equal sentences."""
        if self.stopped_by or not self.host:  # a refusal has no host
            return self.why
        return f"{self.why}; its launcher {'gave up' if self.gave_up else 'starts it again'}"


class LaunchReports:
    """The newest report of each replica that has not attached since."""

    def __init__(self) -> None:
        self.newest: dict[str, LaunchReport] = {}
        # The replicas that have attached since their last report: an eviction counts these attempts.
        self._attached: dict[str, None] = {}

    def since(self, replica: str, now: float) -> float:
        """Return when the first of the replica's failures in a row was reported."""
        before = self.newest.get(replica)
        return before.at if before is not None else now

    def ends_attached(self, replica: str) -> bool:
        """Whether the attempt that ended now had a session. The next attempt has none yet."""
        return self._attached.pop(replica, self) is None

    def forget_before(self, at: float) -> bool:
        """Forget the reports of earlier times; return whether there were any."""
        old = [name for name, report in self.newest.items() if report.at < at]
        for name in old:
            del self.newest[name]
        return bool(old)

    def take(self, report: LaunchReport) -> None:
        """Keep ``report`` in the place of the replica's earlier one."""
        refusal = self.newest.pop(report.replica, None)
        if refusal is not None and refusal.is_refused and not refusal.host:
            # The first report after a refusal is about the refused process, and the refusal says more.
            report = replace(report, why=refusal.why, last_line="", is_refused=True)
        self.newest[report.replica] = report
        while len(self.newest) > _KEPT:
            del self.newest[next(iter(self.newest))]

    def refuse(self, replica: str, why: str, at: float) -> None:
        """Note that the lighthouse has refused a session of the replica."""
        self.newest.pop(replica, None)
        self.take(LaunchReport(replica, "", f"refused: {why}", True, False, at, is_refused=True))

    def attached(self, replica: str) -> None:
        """Forget the report of a replica that has a session again."""
        self.newest.pop(replica, None)
        self._attached[replica] = None
        if len(self._attached) > _MOST_ATTACHED:
            del self._attached[next(iter(self._attached))]


# The number of newest records that are kept, in memory and in the store.
CAPACITY = 200
# A record names at most so many lost replicas and counts the others. A record with thousands of names would
# be too large for a store, and each return of a replica would write it again.
NAMED = 100
# With more members than this, open records are updated at intervals and not after every event.
_MANY = 100
_LOOK_S = 0.05
DOWN, OUTSIDE, LEFT = "down", "outside", "left"


class ReplicaReturn(Struct):
    """The times at which a lost replica came back; 0.0: not yet."""

    started: float = 0.0  # when a new process opened its session, or the evicted process learned of it
    has_state: float = 0.0
    joined: float = 0.0  # the time of the replica's first round
    why: str = ""  # why the replica was lost
    host: str = ""  # where the lost process ran
    replaced_by: str = ""  # the new replica that has taken its place, so that the job misses it no more


class RecoveryRecord(Struct):
    """One recovery. Times are Unix seconds, 0.0 until they come."""

    id: int  # the id of the event that began this recovery
    kind: str  # death, abort or cold start
    why: str
    step: int  # the newest step known at the failure, or the step from which the other replicas went on
    detected: float
    generation: int = 0
    epoch: int = 0
    lost: dict[str, ReplicaReturn] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)  # the incarnations of the lost replicas
    epoch_committed: float = 0.0
    links_up: float = 0.0
    step_committed: float = 0.0
    steps_lost: int = 0  # committed steps whose state only the lost processes held
    micro_batches_lost: int = 0
    incident_id: str = ""
    diagnosis: dict[str, Any] | None = None  # by `diagnosis.verdict`; None where no rank could be probed
    # How many lost and how many joined replicas an earlier leader counted without naming them.
    unnamed: dict[str, int] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return not self.step_committed or any(not back.joined for back in self.lost.values())

    def to_json(self) -> dict[str, Any]:
        """Return the form for the store and for people; it names at most NAMED lost replicas."""
        named = dict(list(self.lost.items())[:NAMED])
        incarnations = {name: x for name, x in self.incarnations.items() if name in named}
        others, unnamed = [back for name, back in self.lost.items() if name not in named], self.unnamed
        if others:
            unnamed = {"lost": len(others), "joined": sum(1 for back in others if back.joined)}
        body: dict[str, Any] = to_builtins(
            replace(self, lost=named, incarnations=incarnations, unnamed=unnamed)
        )
        return body


class Absence(Value):
    """A replica of the job that does not train with the others."""

    replica: str
    state: str  # down: no live process; outside: its process waits to join; left: it was drained
    why: str
    since: float  # Unix seconds
    host: str
    is_member: bool  # whether the roster still lists it
    last_line: str = ""  # of its last process's standard error, where its launcher knows it

    @property
    def sentence(self) -> str:
        """Return the replica, since when it is away, why, and its host."""
        at = datetime.fromtimestamp(self.since, UTC).strftime("%H:%M:%S UTC")
        last = f'its last line: "{self.last_line}"' if self.last_line else ""
        details = ", ".join(filter(None, (self.why, last, self.host)))
        return f"{self.replica} {self.state} since {at}" + (f" ({details})" if details else "")


class Recoveries:
    """The recovery records of one job, oldest first. Call ``observe`` after every event of its core."""

    def __init__(self) -> None:
        self.kept: list[RecoveryRecord] = []
        self._pending: list[RecoveryRecord] = []  # the open ones of ``kept``, looked at after every event
        # The last NAMED drained replicas that are away, as this leader saw them.
        self.left: dict[str, Absence] = {}
        self.launches = LaunchReports()
        self.record: Record | None = None  # the last one seen; the first of a term answers no failure
        self._looked = 0.0

    @property
    def is_recovering(self) -> bool:
        """Whether a failure waits for the next committed step."""
        return any(not recovery.step_committed for recovery in self._pending)

    def restore(self, stored: list[RecoveryRecord]) -> None:
        """Take the records of an earlier leader; this leader goes on with the open ones."""
        by_id = {recovery.id: recovery for recovery in (*stored, *self.kept)}
        self.kept = [by_id[number] for number in sorted(by_id)][-CAPACITY:]
        self._pending = [recovery for recovery in self.kept if recovery.is_open]

    def observe(self, core: LeaderCore, event: int, now: float) -> list[RecoveryRecord]:
        """Bring the records up to date; return those that changed. ``event``: the id of the newest event."""
        record, epoch = core.state.record, core.state.epoch
        changed: dict[int, RecoveryRecord] = {}
        if record is not None and record is not self.record:
            self._note_departures(record, now)
            for recovery in [*self._on_record(core, record, event, now), *self._note_replacements(record)]:
                changed[recovery.id] = recovery
            self.record = record
        elif record is not None and (epoch.pending_evictions or epoch.aborted) and not self._unanswered():
            condemned = epoch.pending_evictions
            reasons = condemned or {name: aborted.why for name, aborted in epoch.aborted.items()}
            why = "; ".join(f"{name}: {reason}" for name, reason in sorted(reasons.items()))
            kind, incident_id = "death" if condemned else "abort", incident_id_of(record.epoch + 1)
            recovery = self._open(event, kind, why, core.state.top_step(), now, incident_id)
            changed[recovery.id] = recovery
        few = record is None or len(record.roster) <= _MANY
        if few or changed or now - self._looked >= _LOOK_S:
            self._looked = now
            if changed:
                self._pending = [recovery for recovery in self.kept if recovery.is_open]
            top = cache(core.state.top_step)  # computed once for all lost replicas: it looks at every member
            changed |= {x.id: x for x in self._pending if _fill(x, core, now, top)}
        if changed:
            self._pending = [recovery for recovery in self.kept if recovery.is_open]
        return list(changed.values())

    def _note_departures(self, record: Record, now: float) -> None:
        before = self.record
        for member in before.roster if before is not None else ():
            if before is not None and member.leaving and not record.lists(*member.process):
                host = host_of(member)
                self.left[member.replica] = Absence(member.replica, LEFT, before.reason, now, host, False)
        for member in record.roster:
            self.left.pop(member.replica, None)
        self.left = dict(list(self.left.items())[-NAMED:])

    def _note_replacements(self, record: Record) -> list[RecoveryRecord]:
        """Let each replica of a new name take the place of the one that is away for longest."""
        if self.record is None:
            return []
        expected = {member.replica for member in self.record.roster}
        lost = [
            (recovery, name)
            for recovery in self.kept
            for name, back in recovery.lost.items()
            if not (back.joined or back.replaced_by)
        ]
        away = [x for x in lost if record.member(x[1]) is None]
        expected |= {name for _, name in lost}
        names = [member.replica for member in record.roster if member.replica not in expected]
        for newcomer, (recovery, name) in zip(names, away, strict=False):
            recovery.lost[name].replaced_by = newcomer
            self.launches.newest.pop(name, None)
        given_up = [name for name, report in self.launches.newest.items() if report.gave_up]
        for _, gone in zip(names[len(away) :], given_up, strict=False):  # the oldest report first
            del self.launches.newest[gone]
        return [recovery for recovery, _ in away[: len(names)]]

    def _unanswered(self) -> RecoveryRecord | None:
        """Return the newest recovery if no epoch has answered it yet."""
        newest = self.kept[-1] if self.kept else None
        return newest if newest is not None and not newest.epoch_committed else None

    def _open(
        self, event: int, kind: str, why: str, step: int, now: float, incident_id: str
    ) -> RecoveryRecord:
        recovery = RecoveryRecord(event, kind, shortened(why, 1000), step, now, incident_id=incident_id)
        self.kept = [*self.kept, recovery][-CAPACITY:]
        return recovery

    def _on_record(self, core: LeaderCore, record: Record, event: int, now: float) -> list[RecoveryRecord]:
        before = self.record
        if before is None or not record.is_forced or before.epoch == record.epoch:
            return []
        if self._unanswered() is None and _is_by_order(before, record):
            return []
        # An eviction may begin and end within one event.
        recovery = self._unanswered() or self._open(
            event, "abort", record.reason, core.state.top_step(), now, record.incident_id
        )
        recovery.epoch, recovery.generation = record.epoch, record.generation
        recovery.incident_id, recovery.epoch_committed = record.incident_id, now
        whys = {x.replica: x.why for x in reversed(record.failures) if x.epoch == before.epoch}
        for member in before.roster:
            if not record.lists(member.replica, member.incarnation) and not member.leaving:
                if recovery.kind == "abort" and recovery.why != shortened(record.reason, 1000):
                    # A peer noticed the failure first: put the epoch's reason before the peer's sentence.
                    recovery.why = shortened(f"{record.reason} ({recovery.why})", 1000)
                recovery.kind = "death"
                self._supersede(member, recovery, whys.get(member.replica, record.reason))
                recovery.incarnations[member.replica] = member.incarnation
        if record.generation != before.generation:
            recovery.kind = "cold start"
            seen = max(0, recovery.step - record.base.step)
            recovery.steps_lost = core.starts.steps_lost if core.starts.steps_lost is not None else seen
            peers = core.state.liveness.peers.values()
            micro_batches = max((peer.micro_batches for peer in peers), default=0)
            recovery.micro_batches_lost = recovery.steps_lost * micro_batches
            recovery.step = record.base.step
        return [recovery]

    def _supersede(self, member: Member, recovery: RecoveryRecord, why: str) -> None:
        """End the wait of older records for a replica that is lost again."""
        replica = member.replica
        for older in self.kept:
            if older is not recovery and replica in older.lost and not older.lost[replica].joined:
                del older.lost[replica]
        recovery.lost[replica] = ReplicaReturn(why=shortened(why, 200), host=host_of(member))


def _is_by_order(before: Record, record: Record) -> bool:
    """Whether the epoch stops or resumes the job only because the needed number of members has changed."""
    if record.generation != before.generation or record.min_replicas == before.min_replicas:
        return False
    members, others = ({(x.replica, x.incarnation) for x in r.roster} for r in (before, record))
    return members == others


def _fill(recovery: RecoveryRecord, core: LeaderCore, now: float, top: Callable[[], int]) -> bool:
    """Fill in the new facts; return whether there were any. ``top``: the job's newest step."""
    record, epoch = core.state.record, core.state.epoch
    if record is None or not recovery.epoch_committed:
        return False
    changed = False
    all_run = len(epoch.running) >= len(record.roster)
    if not recovery.links_up and (record.epoch > recovery.epoch or all_run):
        recovery.links_up, changed = now, True
    if not recovery.step_committed:
        if epoch.decision is not None and epoch.decision.step > recovery.step:
            # The others go on from this step; a new leader did not know a step at the failure.
            recovery.step, changed = epoch.decision.step, True
        # Before the resume decision, reported steps are older than the failure.
        is_decided = not record.is_forced or epoch.decision is not None
        if record.complete or (is_decided and top() > recovery.step):
            recovery.links_up = recovery.links_up or now
            recovery.step_committed, changed = now, True
    for replica in recovery.lost:
        changed = _fill_return(recovery, replica, core, record, now, top) or changed
    return changed


def _fill_return(
    recovery: RecoveryRecord,
    replica: str,
    core: LeaderCore,
    record: Record,
    now: float,
    top: Callable[[], int],
) -> bool:
    back, peer = recovery.lost[replica], core.state.liveness.peers.get(replica)
    if back.joined or peer is None or not peer.connected:
        return False
    # A lost process that still lives reports that it knows of the epoch without it. This process has its old
    # state, so its replica counts as restored only when it has caught up.
    is_lost_one = peer.incarnation == recovery.incarnations.get(replica)
    if is_lost_one and (peer.beat is None or peer.beat.epoch < recovery.epoch):
        return False
    is_near = not is_lost_one or top() - peer.step <= 1
    member = record.lists(replica, peer.incarnation)
    before = (back.started, back.has_state, back.joined)
    back.started = back.started or now
    if member or (is_near and peer.generation == record.generation):
        back.has_state = back.has_state or now
    if member and replica in core.state.epoch.running:
        back.joined = now
    return before != (back.started, back.has_state, back.joined)


def recoverable(core: LeaderCore, now: float) -> dict[str, Any] | None:
    """Return the freshest state of which checkpoint servers hold every lane, and its age.

    The age is in committed steps, and in seconds since it was the trainers' state."""
    roster = core.state.record.roster if core.state.record is not None else ()
    ref = core.state.liveness.servers.freshest(max((len(x.addresses) for x in roster), default=1))
    if ref is None:
        return None
    same = core.state.record is not None and core.state.record.generation == ref.generation
    age_s = core.state.liveness.servers.age_s(ref, now)
    return {
        **to_builtins(ref),
        "steps_behind": max(0, core.state.top_step() - ref.step) if same else None,
        "age_s": None if age_s is None else round(age_s, 3),
    }
