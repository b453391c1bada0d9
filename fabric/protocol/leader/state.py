"""The facts that a leader has about one job: its record, its processes, the answers in this epoch."""

from collections.abc import Iterable, Sequence
from enum import Enum, IntEnum

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.model import (
    Death,
    Fence,
    GoneHost,
    Member,
    OperatorOverrides,
    Policy,
    Record,
    ReplicaProcess,
    Value,
    incident_id_of,
)
from fabric.protocol.leader.liveness import Liveness, LivenessConfig, Peer
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.assignment import waits_for_data

# The longest reason in a record: the reasons of many members would make the record large.
MAX_REASON_CHARACTERS = 1000
# In a job of at least this many replicas the leader plans once for many frequent events.
MANY = 256


class LeaderConfig(Value):
    """Settings of a leader; times in seconds."""

    policy: Policy = field(default_factory=Policy)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    coalesce_s: float = 0.01  # deaths that the leader notices within this time share one epoch
    rebuild_s: float = 0.1  # pause from an abort to a new ring of the same members; doubled with every try
    rebuild_limit_s: float = 5.0
    complaints_s: float = 0.3  # from the first complaint about a missing link until the answer
    autonomy_s: float = 1800.0
    autonomy_margin_s: float = 60.0
    failures: int = 3  # this many failures within ``failures_s`` keep a replica or a host out; 0: never
    failures_s: float = 1800.0
    half_life_s: float = 86400.0  # after this time the weight of a host's failure is halved
    actions_per_hour: int = 6  # how often leaders may lower shares or order layouts within an hour
    # An ordered layout is taken back after this time. Only a try shows whether its cause is gone, because the
    # times of another layout, or of a rank that does not run, say nothing about the usual layout.
    trial_s: float = 3600.0


class Mark(Enum):
    """A fact about a member that an epoch leaves out."""

    EXCUSED = "an operator, a link or a state is the reason: it did not fail"
    CUT_OFF = "a link is missing"
    SLOW = "the others waited too long for its state in a blocking join"
    USELESS = "its state is of no use, or wrong"


class EpochState(Struct):
    """The answers in the epoch in force. Each new record begins an empty ``EpochState`` at ``since``."""

    since: float
    reports: dict[str, m.Report] = field(default_factory=dict)
    decision: m.Resume | None = None
    rows: dict[str, m.Resume] = field(default_factory=dict)  # the decision for each member with a row
    no_row: m.Resume | None = None  # the decision for all members without a row
    stopped: str = ""  # why the leader cannot decide this epoch: the job needs an operator
    running: dict[str, int] = field(default_factory=dict)  # replica -> a round of this epoch that it entered
    aborted: dict[str, m.Aborted] = field(default_factory=dict)
    aborted_at: float = 0.0
    unreachable: dict[str, tuple[str, ...]] = field(default_factory=dict)  # replica -> the members it misses
    complained_at: float = 0.0  # when the first complaint came, or the leader last waited for more
    pending_evictions: dict[str, str] = field(default_factory=dict)  # replica -> why it is left out
    marks: dict[str, set[Mark]] = field(default_factory=dict)  # by replica that is left out
    decided_at: float = 0.0
    evictions_since: float = 0.0
    ended_at: float | None = None  # when all members but newcomers without a round had finished

    def on_report(self, replica: str, report: m.Report) -> m.Resume | None:
        """Take the first report of a member; return the decision for it, if there is one."""
        self.reports.setdefault(replica, report)
        return self.row(replica) if self.decision is not None else None

    def on_aborted(self, replica: str, message: m.Aborted, now: float) -> bool:
        """Take an abort, and the links that it misses; return whether it is the member's first."""
        earlier = self.unreachable.get(replica, ())
        if set(message.unreachable) - set(earlier):
            self.complained_at = self.complained_at if self.unreachable else now
            self.unreachable[replica] = tuple(dict.fromkeys((*earlier, *message.unreachable)))
        if replica in self.aborted:
            return False
        self.aborted_at = self.aborted_at if self.aborted else now
        self.aborted[replica] = message
        return True

    def decide(self, decision: m.Resume, now: float) -> None:
        self.decision, self.decided_at = decision, now
        rows = (a for a in decision.table if a.drop or a.micro_batches)
        self.rows = {a.replica: replace(decision, table=(a,)) for a in rows}
        self.no_row = replace(decision, table=())

    def row(self, replica: str) -> m.Resume:
        """The decision with this member's row of the table; all members without a row get the same object."""
        assert self.no_row is not None
        return self.rows.get(replica, self.no_row)

    def stop(self, reason: str) -> None:
        self.stopped = reason

    def leave_out(self, replica: str, reason: str, now: float) -> None:
        if not self.pending_evictions:
            self.evictions_since = now
        self.pending_evictions[replica] = reason

    def keep(self, replica: str) -> None:
        del self.pending_evictions[replica]

    def mark(self, replica: str, marks: Iterable[Mark]) -> None:
        self.marks.setdefault(replica, set()).update(marks)

    def has(self, replica: str, mark: Mark) -> bool:
        return mark in self.marks.get(replica, ())

    def wait_for_verdict(self, now: float) -> None:
        """Wait again for complaints, because a silent member may be dead."""
        self.complained_at = now

    def finished_for_s(self, now: float) -> float:
        """For how long all members have finished, but for newcomers without a round."""
        if self.ended_at is None:
            self.ended_at = now
        return now - self.ended_at


class JobState:
    """The committed record, all processes, and the answers in the epoch in force."""

    def __init__(self, job: str, config: LeaderConfig, now: float) -> None:
        self.job = job
        self.config = config
        self.store_id = ""
        self.leading = False
        self.record: Record | None = None  # the record that the store holds
        self.liveness = Liveness(config.liveness, now)
        self.epoch = EpochState(now)
        self.autonomy_s = 0.0  # the longest ``autonomy_s`` that any session has named
        self.named_by_sessions = (0, 0)  # newest generation and epoch of this store
        self.highest_step: int | None = None  # of this generation; None: not known to this leader
        self.last_step_at = now  # when a heartbeat last showed that a member has committed a step
        self.now = now
        self.unix_offset_s = 0.0  # the time of day minus ``now``

    @property
    def unix_now(self) -> float:
        """The time of day, in Unix seconds."""
        return self.now + self.unix_offset_s

    def begin_generation(self, step: int) -> None:
        """Begin a generation from the state at ``step``."""
        self.highest_step = step

    def advance(self, now: float) -> None:
        self.now = now

    def lead(self, event: io.Elected) -> None:
        """Begin a term. Every member gets the full grace period."""
        self.leading, self.store_id, self.record = True, event.store_id, event.record
        self.unix_offset_s = event.unix_s - self.now
        self.liveness.begin_term(self.now)
        self.epoch = EpochState(self.now)

    def step_down(self) -> None:
        self.leading = False

    def amend(self, record: Record) -> None:
        self.record = record

    def begin_epoch(self, record: Record) -> None:
        """Hold a record that the store has committed."""
        self.record, self.epoch = record, EpochState(self.now)
        self.liveness.keep(record.roster)

    def take_policy(self, policy: Policy) -> None:
        start_wait_s = self.config.policy.start_wait_s
        self.config = replace(self.config, policy=replace(policy, start_wait_s=start_wait_s))

    def note_running(self, peer: Peer, message: m.Running) -> bool:
        """Note that a member has entered a round; return whether it is one of the epoch in force."""
        if not self.is_current(message.fence):
            return False
        self.epoch.running.setdefault(peer.session.replica, message.step)
        return True

    def note_session(self, peer: Peer) -> None:
        self.autonomy_s = max(self.autonomy_s, peer.session.autonomy_s)
        self.note_named(peer)

    def note_step(self, peer: Peer, went_on: bool = False) -> None:
        """Note the step of a process; ``went_on``: a heartbeat shows that this member has committed it."""
        self.last_step_at = self.now if went_on else self.last_step_at
        is_higher = self.highest_step is None or peer.step > self.highest_step
        if is_higher and self.in_force(peer) and self.is_of_generation(peer):
            self.highest_step = peer.step

    def top_step(self) -> int:
        """The highest step of this generation; else the base's step; for a complete job its last step."""
        record = self.record
        if record is None:
            return 0
        return record.base.step if record.complete else max(record.base.step, self.highest_step or 0)

    @property
    def out_of_sight_s(self) -> float:
        """After this time out of contact a process has stopped itself, so it commits nothing any more.

        Each trainer has its own ``autonomy_s``. The record holds the longest, for members not heard yet.
        """
        named = self.record.autonomy_s if self.record is not None else 0.0
        return max(self.config.autonomy_s, self.autonomy_s, named) + self.config.autonomy_margin_s

    def note_named(self, peer: Peer) -> None:
        """Note the newest generation and epoch that this process knows."""
        if peer.session.store_id == self.store_id:
            generation, epoch = self.named_by_sessions
            generation = max(generation, peer.session.known_generation)
            self.named_by_sessions = (generation, max(epoch, peer.newest_epoch))

    def next_epoch(self, record: Record) -> int:
        """The number of the next epoch: above all that any session names, also after a restored store."""
        return max(record.epoch, self.named_by_sessions[1]) + 1

    def lists(self, replica: str) -> bool:
        return self.record is not None and self.record.member(replica) is not None

    def in_force(self, peer: Peer) -> bool:
        record, session = self.record, peer.session
        return record is not None and record.lists(session.replica, session.incarnation)

    @property
    def is_complete(self) -> bool:
        return self.record is not None and self.record.complete

    def is_current(self, fence: object) -> bool:
        return self.record is not None and fence == self.record.fence

    def join_stall_s(self, replica: str) -> float:
        """How long the others wait for this newcomer's state in a blocking join."""
        peer = self.liveness.peers.get(replica)
        return peer.session.exchange_s if peer is not None else 0.0

    def patience_s(self, peer: Peer) -> float:
        """How long the others wait for this member's user code: the setting, or the announced time."""
        busy = peer.beat is not None and peer.beat.busy
        return peer.beat.busy_s if busy and peer.beat is not None else peer.session.user_code_s

    def is_of_generation(self, peer: Peer) -> bool:
        return self.record is not None and peer.generation == self.record.generation

    def is_recent(self, fence: Fence) -> bool:
        """Whether a member's message about ``fence`` still counts: no forced epoch came after that fence.

        At the end of the job no such message counts, because links end there as all members leave.
        """
        record = self.record
        if record is None or record.complete or fence.generation != record.generation:
            return False
        return record.forced <= fence.epoch <= record.epoch

    def is_parked(self, record: Record) -> bool:
        """Rule 7: whether the members stand still: they are too few, or none can read a part of the data."""
        if not self.is_decided(record):
            return False
        return self.is_short(record) or waits_for_data(record.sharing, record.roster)

    def is_short(self, record: Record) -> bool:
        return len(record.roster) < (record.min_replicas or self.config.policy.min_replicas)

    def is_decided(self, record: Record) -> bool:
        return not record.is_forced or self.epoch.decision is not None

    def is_settled(self, record: Record) -> bool:
        """Rule 4: every member runs in the current epoch, and nothing is outstanding."""
        if self.epoch.aborted or (record.is_forced and self.epoch.decision is None):
            return False
        return not record.missing(self.epoch.running.keys()) or self.is_parked(record)

    def suspicion(self, peer: Peer) -> str:
        """Why this process would be evicted at once if it were in a roster, or empty."""
        return self.liveness.suspicion(peer.session, self.now)

    def knows(self, member: Member) -> bool:
        """Whether this member knows every step that may be committed.

        A joining member knows them once it has entered a round of this epoch with its own state at that step.
        After that no step is committed without it.
        """
        if not member.joining:
            return True
        entered, peer = self.epoch.running.get(member.replica), self.liveness.peers.get(member.replica)
        if entered is None or peer is None or peer.incarnation != member.incarnation:
            return False
        return peer.step >= entered >= 0 and self.is_of_generation(peer)

    def is_spared_by(self, replica: str) -> bool:
        """Whether the job goes on without this member, because another one knows the state."""
        assert self.record is not None
        others = [x for x in self.record.roster if x.replica not in (replica, *self.epoch.pending_evictions)]
        return any(self.knows(x) for x in others)

    def addressed(self, member: Member) -> Member:
        """The member's entry with the present URLs of its checkpoint servers, which may have changed."""
        status = self.liveness.servers.of_rank(0).get(member.replica)
        if not member.ranks and (status is None or status.ckpt == member.ckpt):
            return member
        urls = self.liveness.servers.urls_of(member)
        if urls == [a.ckpt for a in member.addresses]:
            return member
        ranks = tuple(replace(a, ckpt=url) for a, url in zip(member.ranks, urls[1:], strict=True))
        return replace(member, ckpt=urls[0], ranks=ranks)

    def proven(self, member: Member) -> Member:
        """The member's entry for the next epoch: no longer ``joining`` once the member knows every step."""
        knows, entry = self.knows(member), self.addressed(member)
        awaited = member.blocking_join and not knows
        if (entry.joining, entry.blocking_join) == (not knows, awaited):
            return entry  # nearly every entry stays: a new epoch of thousands of members copies few
        return replace(entry, joining=not knows, blocking_join=awaited)

    def deaths(self) -> list[tuple[str, tuple[Death, ...]]]:
        """The micro-batches at which processes died, by replica, as the checkpoint servers say."""
        statuses = self.liveness.servers.of_rank(0).items()
        return [(replica, status.deaths) for replica, status in statuses if status.deaths]

    def micro_batches(self, record: Record) -> int:
        """The micro-batches of a step of this roster now, by its members' newest messages."""
        peers = [self.liveness.peers.get(name) for name in record.names]
        return max((peer.micro_batches for peer in peers if peer is not None), default=1)

    def next_incident_id(self) -> str:
        """The id of an incident that no epoch has answered yet."""
        return incident_id_of(self.next_epoch(self.record) if self.record else 1)

    @property
    def is_large(self) -> bool:
        """Whether there are many sessions, or many ranks of them or of members that may still come back."""
        roster = self.record.roster if self.record is not None else ()
        peers = self.liveness.peers
        return (
            len(peers) >= MANY
            or len(roster) >= MANY
            or sum(1 + len(x.ranks) for x in roster) >= MANY
            or sum(1 + len(x.session.ranks) for x in peers.values()) >= MANY
        )

    def is_blocking_join(self, replica: str) -> bool:
        member = self.record.member(replica) if self.record is not None else None
        return member is not None and member.blocking_join

    def blocking_joiners(self, record: Record) -> list[str]:
        """The newcomers for whose state the others wait in the decided round."""
        if self.epoch.decision is None:
            return []
        return [x.replica for x in record.roster if x.blocking_join and x.replica not in self.epoch.running]


class Standing(IntEnum):
    """How much a process counts in what a job's replicas must have in common; more than those below."""

    NOBODY = 0  # no process has spoken
    STRANGER = 1  # the record does not name its replica
    RETURNING = 2  # the record lists another process of its replica
    LISTED = 3  # the record lists this process
    RECORD = 4  # the record itself


def standing(process: ReplicaProcess, record: Record | None) -> Standing:
    """How much this process counts, by the record."""
    if record is None or record.member(process.replica) is None:
        return Standing.STRANGER
    return Standing.LISTED if record.lists(*process) else Standing.RETURNING


class RosterLimits(Struct, eq=False):
    """How many members a job needs and may have, by operators' overrides, else by the sessions."""

    state: JobState
    overrides: OperatorOverrides = field(default_factory=OperatorOverrides)  # in the next record
    source: Standing = Standing.NOBODY  # who said the policy in force

    def recall_overrides(self, record: Record) -> None:
        """Take over the orders that earlier leaders heard, and the ends that operators have named."""
        self.overrides = record.overrides
        for gone in record.overrides.gone:
            self.state.liveness.note_proof(gone.process, gone.why)

    def note_gone(self, process: ReplicaProcess, why: str) -> None:
        """Note in the record, for every later leader, that the host of this process is gone."""
        self.state.liveness.note_proof(process, why)
        gone = [x for x in self.overrides.gone if x.process != process]
        gone.append(GoneHost(*process, why[:MAX_REASON_CHARACTERS]))
        self.overrides = replace(self.overrides, gone=tuple(gone))

    def forget_gone(self) -> None:
        """Drop the word about each process that was heard again, or that the record names no more."""
        ends = self.state.liveness.proven_ends
        if any(x.process not in ends for x in self.overrides.gone):
            gone = tuple(x for x in self.overrides.gone if x.process in ends)
            self.overrides = replace(self.overrides, gone=gone)

    def recall(self, record: Record) -> None:
        """Take the policy of the record, on which the job's replicas have agreed."""
        if record.policy is not None:
            self._take(record.policy, Standing.RECORD)

    def hear(self, peer: Peer) -> None:
        """Take a session's policy, unless a process that counts as much has said another one before."""
        record, live = self.state.record, self.state.liveness
        how = standing(peer.process, record)
        if record is not None and record.policy is not None and how is Standing.LISTED:
            self.recall(record)
        is_alone = self.source is not Standing.RECORD and not any(
            x.connected for x in live.peers.values() if x is not peer
        )
        if peer.policy is not None and (how > self.source or is_alone):
            self._take(peer.policy, how)

    def choose(self, peers: Sequence[Peer]) -> None:
        """Take the policy of the processes that begin a generation: all of them may have new settings."""
        record = self.state.record
        asked = [x for x in peers if x.policy is not None]
        peer = max(asked, key=lambda x: (standing(x.process, record), -x.opened), default=None)
        if peer is not None and peer.policy is not None:
            self._take(peer.policy, standing(peer.process, record))

    def _take(self, policy: Policy, source: Standing) -> None:
        self.state.take_policy(policy)
        self.source = source

    @property
    def agreed(self) -> Policy | None:
        """The policy for the next record. The word of a stranger does not count in a job that runs."""
        record = self.state.record
        least = Standing.STRANGER if record is None else Standing.RETURNING
        if self.source >= least:
            return self.state.config.policy
        return record.policy if record is not None else None

    @property
    def least_of_epoch(self) -> int:
        """How many members the next epoch needs, for its record; 0: no process has said a number."""
        return self.overrides.min_replicas or (self.agreed.min_replicas if self.agreed is not None else 0)

    @property
    def least(self) -> int:
        """How many members the job needs to step, from the next epoch on."""
        return self.overrides.min_replicas or self.state.config.policy.min_replicas

    @property
    def most(self) -> int:
        return self.overrides.max_replicas or max(
            self.state.config.policy.max_replicas, self.overrides.min_replicas
        )

    @property
    def full(self) -> int:
        """The number of members from which on the job needs no spare."""
        return min(self.overrides.max_replicas or self.state.config.policy.start_replicas, self.most)

    def apply(self, event: io.Operator) -> None:
        """Pause, resume, scale or adapt; the same order again changes nothing."""
        orders, by = self.overrides, f"by {event.who}: {event.why}"
        if event.action == "pause":
            orders = orders if orders.paused else replace(orders, paused=by)
        elif event.action == "resume":
            orders = replace(orders, paused="")
        elif event.action == "scale":
            least = orders.min_replicas if event.min_replicas is None else event.min_replicas
            most = orders.max_replicas if event.max_replicas is None else event.max_replicas
            if (least, most) != (orders.min_replicas, orders.max_replicas):
                scaled = by if least or most else ""
                orders = replace(orders, min_replicas=least, max_replicas=most, scaled=scaled)
        elif event.action == "adapt":
            orders = replace(orders, adapt=event.mode)
        elif event.action == "veto":
            orders = replace(orders, vetoed=tuple(sorted({*orders.vetoed, event.replica})))
        elif event.action == "allow":
            orders = replace(orders, vetoed=tuple(x for x in orders.vetoed if x != event.replica))
        self.overrides = orders


# Seconds between two log events about steps without data.
EMPTY_S = 1.0


class LeaderOutbox(Struct, eq=False):
    """Collects effects; every part of the leader sends through it."""

    state: JobState
    effects: list[io.Effect] = field(default_factory=list)
    loss_incidents: dict[str, str] = field(default_factory=dict)  # by evicted replica, until it is back
    empty: tuple[int, int] = (0, -1)  # generation and number of the newest step without data in an event
    empty_due: float = 0.0  # the time from which another event about a step without data may follow

    def begin(self) -> None:
        self.effects = []

    def emit(self, effect: io.Effect) -> None:
        self.effects.append(effect)

    def send(self, replica: str, message: m.LeaderMessage) -> None:
        peer = self.state.liveness.peers.get(replica)
        if peer is not None and peer.connected:
            self.emit(io.SendMember(replica, peer.incarnation, message))

    def record_event(self, kind: str, about: str, why: str, incident_id: str = "") -> None:
        """Write an event for operators. Without an incident id the event belongs to the loss of ``about``."""
        incident_id = incident_id or self.loss_incidents.get(about, "")
        epoch = self.state.record.epoch if self.state.record else 0
        self.emit(io.RecordEvent(kind, epoch, about, why, incident_id))

    def note_loss(self, replica: str, incident_id: str) -> None:
        self.loss_incidents[replica] = incident_id

    def forget_losses(self, record: Record) -> None:
        """Forget the loss of each replica that takes part again: later events do not belong to that loss."""
        for member in record.roster:
            if not member.joining:
                self.loss_incidents.pop(member.replica, None)

    def record_empty_step(self, peer: Peer, beat: m.Heartbeat) -> None:
        """Write an event about a step without data: once per step, and at most once a second."""
        newest = (beat.generation, beat.empty)
        if not 0 <= beat.empty <= beat.step or newest <= self.empty or self.state.now < self.empty_due:
            return
        if self.state.in_force(peer) and self.state.is_of_generation(peer):
            self.empty, self.empty_due = newest, self.state.now + EMPTY_S
            why = f"step {beat.empty} was committed with total weight 0: no member had data for it"
            self.record_event("empty step", "", why)
