"""What all parts of a leader core share: what it knows of a job, and the only way it writes.

A leader is built in layers, each calling only those below: this one, then starting, serving and admitting
(``leader_joins``), then the contract, failures and decisions (``leader``).
"""

import math
import random
from dataclasses import dataclass, field, replace

from fabric.model import (
    Death,
    Fence,
    HostFailure,
    HostHistory,
    Member,
    OperatorOverrides,
    Poison,
    Policy,
    Record,
    SnapshotRef,
    incident_id_of,
)
from fabric.protocol.leader.announcement import RosterAnnouncement
from fabric.protocol.leader.liveness import Liveness, LivenessConfig, Peer
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages import roster_delta
from fabric.protocol.rules import poison
from fabric.protocol.rules.assignment import seated, waits_for_data
from fabric.protocol.rules.link_graph import Healing
from fabric.protocol.rules.wait_graph import RingRebuilds, StragglerTracker

# Seconds without any event, though a deadline is due at least twice in them, after which a leader takes it
# that it was itself away.
DEAF_S = 1.2
# Seconds before members that all missed a step are asked for another one.
SERVE_AGAIN_S = 0.1
# Seconds that an evicted process waits before it is admitted again, doubled every time.
READMIT_S = 0.25
READMIT_LIMIT_S = 30.0
# Whoever held the others up for nothing waits so many times as long before it may do so again.
READMIT_STALLS = 4.0
# A newcomer whose distance to the job has not shrunk for so many steps will not get there by replay.
GAP_STEPS = 10
# A record stays small however many have something to say.
MAX_REASON_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class LeaderConfig:
    """Seconds. ``coalesce_s``: deaths noticed within it share one epoch. ``rebuild_s``: how long after an
    abort a death may still show itself before the same members form again; doubled per try. ``complaints_s``:
    how long after the first word of a missing link the others are waited for, as a cut mostly has many."""

    policy: Policy = field(default_factory=Policy)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    coalesce_s: float = 0.01
    rebuild_s: float = 0.1
    rebuild_limit_s: float = 5.0
    complaints_s: float = 0.3
    autonomy_s: float = 1800.0
    autonomy_margin_s: float = 60.0
    failures: int = 3  # so many within ``failures_s`` keep a replica or a host out (0: never)
    failures_s: float = 1800.0
    half_life_s: float = 86400.0  # after so long a failure makes its host half as suspect


@dataclass(slots=True)
class EpochState:
    """What is known about the epoch in force; begun anew with every record, at ``since``."""

    since: float
    reports: dict[str, m.Report] = field(default_factory=dict)
    decision: m.Resume | None = None
    rows: dict[str, m.Resume] = field(default_factory=dict)  # the decision as each is told it, where it adds
    no_row: m.Resume | None = None  # and as all others are told it
    stopped: str = ""  # why nobody can decide it: the job needs a person
    running: dict[str, int] = field(default_factory=dict)  # replica -> a round of it that it entered
    aborted: dict[str, m.Aborted] = field(default_factory=dict)
    aborted_at: float = 0.0
    unreachable: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by whom, whom
    complained_at: float = 0.0  # when somebody first said so, or the leader last waited for more
    cut_off: set[str] = field(default_factory=set)  # condemned for a missing link
    pending_evictions: dict[str, str] = field(default_factory=dict)
    decided_at: float = 0.0
    not_counted_as_failure: set[str] = field(
        default_factory=set
    )  # evicted because a person or a link says so
    slow_joiners: set[str] = field(default_factory=set)  # held the others up, and did not get in
    cannot_continue: set[str] = field(
        default_factory=set
    )  # their state is of no use: they said so, or it is wrong
    evictions_since: float = 0.0
    # (replica, incarnation) that an epoch since the last forced one listed, and that the record does not.
    departed: frozenset[tuple[str, int]] = frozenset()
    ended_at: float | None = None  # when all had finished but newcomers that take part in no round


@dataclass(slots=True)
class Serving:
    """A snapshot promised to one newcomer: the step, and who has answered how.

    ``tries`` counts the snapshots it was told of, ``gap`` is the smallest distance to the job's step that it
    had since the newest, ``gap_at`` the job's step then. ``fallback``: why it comes in while the others wait.
    """

    step: int = -1
    epoch: int = 0
    tries: int = 0
    again: bool = False
    gap: int = -1
    gap_at: int = 0
    blocking_reason: str = ""
    asked: set[str] = field(default_factory=set)
    taken: dict[str, str] = field(default_factory=dict)  # replica -> digest
    missed: set[str] = field(default_factory=set)
    has_sources: bool = False
    asked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often a process was evicted, and from when on it may be admitted again."""

    times: int = 0
    until: float = 0.0


class LeaderBase:
    """Knowledge and writes. Rule 1: at most one write in flight, announced only when committed."""

    def __init__(self, job: str, config: LeaderConfig, entropy: random.Random, now: float) -> None:
        self.job = job
        self.config = config
        self.entropy = entropy
        self.store_id = ""
        self.leading = False
        self.record: Record | None = None
        self.announcement: RosterAnnouncement | None = None
        self.writing: Record | None = None
        self.reading = False
        self.liveness = Liveness(config.liveness, now)
        self.epoch = EpochState(now)
        self.serving: dict[str, Serving] = {}
        self.finished: dict[str, int] = {}
        self.end_step: int | None = None  # where the job ended, as was seen when nobody led
        self.draining: dict[str, str] = {}
        self.ring_rebuilds = RingRebuilds()
        self.stragglers = StragglerTracker()
        self.readmission_backoff: dict[tuple[str, int], Backoff] = {}
        self.healing = Healing()
        self.stepped = now  # when a member last told of a further step
        # (replica, incarnation) -> the step that it stood at. The others would only wait for it again.
        self.evicted_in_user_code: dict[tuple[str, int], int] = {}
        self.waiting_since: float | None = None
        self.data_slots: dict[str, int] = {}  # replica -> where it sits, or sat when it was last a member
        self.empty = (0, -1)  # the generation and number of the newest step of weight 0 that was told of
        self.empty_due = 0.0  # when the next one may be told of
        self.failure = ""  # why the job must stop, until the record says it
        self.loss_incidents: dict[str, str] = {}  # replica that was left out -> the cause; until it is back
        self.notified_incarnation: dict[
            str, int
        ] = {}  # replica -> its newest process that heard of the failure
        self.restart_after_failure = False  # an operator wants the failed job to begin again
        self.forgiven_deaths: set[tuple[str, Death]] = set()
        self.unusable: dict[SnapshotRef, str] = {}  # what a generation could not begin from, and why
        self.highest_step: int | None = None  # of this generation; None: an earlier leader may know of more
        self.steps_lost: int | None = None  # steps that the newest cold start lost, where that is known
        self.silent_servers: set[str] = set()  # servers that delivered nothing, and are not heard
        self.mistrusted: dict[SnapshotRef, str] = {}  # snapshots of a state that was found wrong, and why
        self.base_loaded_generation = 0  # the newest generation whose base somebody has loaded
        self.overrides = OperatorOverrides()  # the record has them with the next write
        self.failures: tuple[HostFailure, ...] = ()  # likewise
        self.hosts: tuple[HostHistory, ...] = ()  # likewise
        self.autonomy_s = 0.0  # the longest that any session has named
        self.waiting_outside: dict[str, str] = {}  # newcomer -> why it is not let in, as it was told
        self._plan_at = math.inf  # when what came since the last plan is looked at, at the latest
        self._deadline: float | None = None
        self._due = math.inf  # when I asked to be called
        self._now = now
        self._unix = 0.0  # the time of day minus ``now``
        self._effects: list[io.Effect] = []

    # --- the record ------------------------------------------------------------------------------------

    def on_written(self, event: io.RecordWritten) -> None:
        if self.writing is not None and self.writing.nonce == event.nonce:
            self._adopt(self.writing)

    def on_write_failed(self, event: io.WriteFailed) -> None:
        """Rule 1: an indefinite write is re-read; so is a refused one, which tells who wrote instead."""
        if self.writing is not None and self.writing.nonce == event.nonce:
            self.reading = True
            self._emit(io.ReadRecord())

    def on_read(self, event: io.RecordRead) -> None:
        if not self.reading:
            return
        self.reading = False
        written, self.writing = self.writing, None
        found = event.record
        if written is not None and found is not None and found.nonce == written.nonce:
            self._adopt(found)
        elif (found.nonce if found else "") != (self.record.nonce if self.record else ""):
            self.leading = False
            self._emit(io.StepDown("another lighthouse has written the job's record"))

    def _write_complete(self, record: Record, step: int) -> None:
        base = replace(record.base, step=step)
        ended = self._now + self._unix
        self._write(replace(record, complete=True, base=base, reason=f"finished at step {step}", ended=ended))

    def _write_epoch(
        self, record: Record, roster: tuple[Member, ...], forced: bool, why: str, incident_id: str = ""
    ) -> None:
        epoch = record.epoch + 1
        proven = tuple(self._proven(x) for x in roster)
        self._write(
            replace(
                record,
                epoch=epoch,
                forced=epoch if forced else record.forced,
                nonce=self._nonce(),
                roster=seated(proven, self.data_slots, record.sharing),
                reason=why[:MAX_REASON_CHARACTERS],
                incident_id=incident_id or incident_id_of(epoch),
                poison=self._known_poison(record) if forced else record.poison,
                min_replicas=self.overrides.min_replicas,
            )
        )

    def _proven(self, member: Member) -> Member:
        knows, found = self._knows(member), self._addressed(member)
        awaited = member.blocking_join and not knows
        if (found.joining, found.blocking_join) == (not knows, awaited):
            return found  # nearly everybody: a new epoch of thousands copies hardly any entry
        return replace(found, joining=not knows, blocking_join=awaited)

    def _write(self, record: Record) -> None:
        nonce = record.nonce
        if self.record is not None and nonce == self.record.nonce:
            nonce = self._nonce()
        autonomy_s = max(self.autonomy_s, record.autonomy_s)
        record = replace(
            record,
            nonce=nonce,
            orders=self.overrides,
            failures=self.failures,
            hosts=self.hosts,
            autonomy_s=autonomy_s,
        )
        self.writing = record
        self._emit(io.WriteRecord(record, self.record))

    def _adopt(self, record: Record) -> None:
        """The store has committed it: now, and only now, it is announced."""
        if self.record is not None and self._says_the_same(record, self.record):
            self.record, self.writing = record, None  # only what concerns those to come has changed
            return
        if self.record is None or self.record.generation != record.generation:
            self.highest_step = record.base.step
            self.liveness.began = self._now
            self.finished.clear()
            self.end_step = None
        self._back_off(record)
        departed = self._departed(record)
        self.data_slots.update((x.replica, x.data_slot) for x in record.roster)
        if record.failed:
            self.finished.clear()
        self.failure, self.restart_after_failure, self.notified_incarnation = "", False, {}
        before, self.record, self.writing = self.record, record, None
        self.liveness.keep(record.roster)
        self.epoch = EpochState(self._now, departed=departed)
        for serving in self.serving.values():
            if not serving.has_sources:
                serving.asked.clear()
        self._forget_losses(record)
        self._record_event("complete" if record.complete else "epoch", "", record.reason, record.incident_id)
        self._announce(record, before)

    def _says_the_same(self, record: Record, other: Record) -> bool:
        """Whether it means the same to its members."""
        after = (record.fence, record.complete, record.failed)
        return after == (other.fence, other.complete, other.failed)

    def _back_off(self, record: Record) -> None:
        """Who is evicted waits before it is admitted again, longer every time: its return stops nobody,
        but its next eviction would."""
        for member in self.record.roster if self.record is not None else ():
            if record.lists(member.replica, member.incarnation) or member.leaving:
                continue
            self.loss_incidents[member.replica] = record.incident_id
            key = (member.replica, member.incarnation)
            if member.replica in self.epoch.cut_off:
                self.healing.left_out(key, self._now)
                continue
            times = self.readmission_backoff.get(key, Backoff()).times + 1
            wait_s = min(READMIT_S * 2 ** (times - 1), READMIT_LIMIT_S)
            if member.replica in self.epoch.slow_joiners:
                wait_s = max(wait_s, READMIT_STALLS * self._join_stall_s(member.replica))
            self.readmission_backoff[key] = Backoff(times, self._now + wait_s)

    def _departed(self, record: Record) -> frozenset[tuple[str, int]]:
        """Those that a planned epoch left out may still stand in a round of an epoch before it."""
        if record.is_forced or self.record is None:
            return frozenset()
        listed = ((x.replica, x.incarnation) for x in self.record.roster)
        return self.epoch.departed.union(x for x in listed if not record.lists(*x))

    def _forget_losses(self, record: Record) -> None:
        """What is told of a replica that was left out belongs to that loss, until it is back."""
        for member in record.roster:
            if not member.joining:
                self.loss_incidents.pop(member.replica, None)

    def _announce(self, record: Record, before: Record | None) -> None:
        """To everybody, as the difference to what was announced ``before`` where that is understood."""
        # As they were told it: its digest is known already.
        told = self.announcement.record if self.announcement is not None and before is not None else before
        self.announcement = RosterAnnouncement(roster_delta.for_members(record), told)
        rejected = m.Rejected(record.failed, poison=record.poison)
        complete = m.Complete(record.fence, record.base.step)
        for replica, peer in self.liveness.peers.items():
            if record.failed:
                if peer.connected and not self._suspicion(peer):
                    self.notified_incarnation[replica] = peer.incarnation
                self._send(replica, rejected)
                continue
            self._send(replica, self.announcement.change if peer.session.roster else self.announcement.whole)
            if record.complete:
                self._send(replica, complete)

    def on_need_roster(self, peer: Peer, message: m.RequestRoster) -> None:
        if self._is_mine(message.fence) and self.announcement is not None:
            self._send(peer.session.replica, self.announcement.whole)

    @property
    def is_changing(self) -> bool:
        """Whether a record is being written, or will be without those who are condemned."""
        return self.writing is not None or bool(self.epoch.pending_evictions)

    def top_step(self) -> int:
        """The highest step that a member has told of, else where the generation began; of a complete job its
        last. It looks at everybody."""
        record = self.record
        if record is None:
            return 0
        if record.complete:
            return record.base.step
        peers = self.liveness.peers.values()
        steps = [p.step for p in peers if p.generation == record.generation and self._in_force(p)]
        return max(steps, default=record.base.step)

    @property
    def out_of_sight_s(self) -> float:
        """Who has been out of contact for so long commits no more. A trainer has its own setting, and the
        record knows those of members that this leader has not heard."""
        named = self.record.autonomy_s if self.record is not None else 0.0
        return max(self.config.autonomy_s, self.autonomy_s, named) + self.config.autonomy_margin_s

    # --- small questions and moves ---------------------------------------------------------------------

    def _schedule_eviction(self, replica: str, reason: str) -> None:
        if replica in self.epoch.pending_evictions or not self._lists(replica):
            return
        if not self.epoch.pending_evictions:
            self.epoch.evictions_since = self._now
        self.epoch.pending_evictions[replica] = reason
        self._record_event("evicting", replica, reason, self._pending())

    def _send(self, replica: str, message: m.LeaderMessage) -> None:
        peer = self.liveness.peers.get(replica)
        if peer is not None and peer.connected:
            self._emit(io.SendMember(replica, peer.incarnation, message))

    def _record_event(self, kind: str, about: str, why: str, incident_id: str = "") -> None:
        incident_id = incident_id or self.loss_incidents.get(about, "")
        self._emit(io.RecordEvent(kind, self.record.epoch if self.record else 0, about, why, incident_id))

    def _pending(self) -> str:
        """The cause of what no epoch has answered yet."""
        return incident_id_of((self.record.epoch if self.record else 0) + 1)

    def _emit(self, effect: io.Effect) -> None:
        self._effects.append(effect)

    def _nonce(self) -> str:
        return f"{self.entropy.getrandbits(64):016x}"

    def _lists(self, replica: str) -> bool:
        return self.record is not None and self.record.member(replica) is not None

    def _in_force(self, peer: Peer) -> bool:
        record = self.record
        return record is not None and record.lists(peer.session.replica, peer.incarnation)

    def _is_mine(self, fence: object) -> bool:
        return self.record is not None and fence == self.record.fence

    def _join_stall_s(self, replica: str) -> float:
        """How long the others wait for this newcomer's state when it comes in by the fallback."""
        peer = self.liveness.peers.get(replica)
        return peer.session.exchange_s if peer is not None else 0.0

    @property
    def rebuild_due(self) -> float:
        """When the same members form again after an abort, unless a death shows itself before."""
        if self.epoch.unreachable:
            return self.epoch.complained_at + self.config.complaints_s
        delay_s = min(self.config.rebuild_s * 2**self.ring_rebuilds.tries, self.config.rebuild_limit_s)
        return self.epoch.aborted_at + float(delay_s)

    def patience_s(self, peer: Peer) -> float:
        """How long the others wait for this member's user code: as agreed, or as it has announced."""
        busy = peer.beat is not None and peer.beat.busy
        return peer.beat.busy_s if busy and peer.beat is not None else peer.session.user_code_s

    def _is_of_generation(self, peer: Peer) -> bool:
        return self.record is not None and peer.generation == self.record.generation

    def _is_recent(self, fence: Fence) -> bool:
        """Whether no forced epoch came since: what a member says of itself there still holds. At the end its
        links end because all go."""
        record = self.record
        if record is None or record.complete or fence.generation != record.generation:
            return False
        return record.forced <= fence.epoch <= record.epoch

    def _is_parked(self, record: Record) -> bool:
        """Whether its members stand still: they are too few, or none of them can read a part of the data."""
        if not self._is_decided(record):
            return False
        return self._is_short(record) or waits_for_data(record.sharing, record.roster)

    def _is_short(self, record: Record) -> bool:
        return len(record.roster) < (record.min_replicas or self.config.policy.min_replicas)

    def _is_decided(self, record: Record) -> bool:
        return not record.is_forced or self.epoch.decision is not None

    def _suspicion(self, peer: Peer) -> str:
        """Why this process would be evicted at once if it were in a roster, or empty."""
        return self.liveness.suspicion(peer.session, self._now)

    def _knows(self, member: Member) -> bool:
        """Whether it knows every step that may be committed: it is not fresh, or has entered a round of
        this epoch with its own state there, so that nothing is committed without it from then on."""
        if not member.joining:
            return True
        entered, peer = self.epoch.running.get(member.replica), self.liveness.peers.get(member.replica)
        if entered is None or peer is None or peer.incarnation != member.incarnation:
            return False
        return peer.step >= entered >= 0 and self._is_of_generation(peer)

    def _is_spared_by(self, replica: str) -> bool:
        """Whether the job goes on without this one: somebody else knows its state."""
        assert self.record is not None
        others = [x for x in self.record.roster if x.replica not in (replica, *self.epoch.pending_evictions)]
        return any(self._knows(x) for x in others)

    def _addressed(self, member: Member) -> Member:
        """With its checkpoint servers where they are now: one that died was started again elsewhere."""
        pulse = self.liveness.pulses.get(member.replica)
        if not member.ranks and (pulse is None or pulse.ckpt == member.ckpt):
            return member
        found = self.liveness.ckpts(member)
        if found == [a.ckpt for a in member.addresses]:
            return member
        ranks = tuple(replace(a, ckpt=url) for a, url in zip(member.ranks, found[1:], strict=True))
        return replace(member, ckpt=found[0], ranks=ranks)

    def _note_step(self, peer: Peer) -> None:
        if self._in_force(peer) and self._is_of_generation(peer):
            self.highest_step = max(self.highest_step or 0, peer.step)

    def _known_poison(self, record: Record) -> tuple[Poison, ...]:
        """What nobody computes from the next forced record on: what it was, and what was proven since."""
        if record.sharing.on_poison != "skip":
            return ()
        return poison.merged(record.poison, poison.proven(self._deaths(), self.forgiven_deaths))

    def _deaths(self) -> list[tuple[str, tuple[Death, ...]]]:
        """Which micro-batches processes died at, as their checkpoint servers say."""
        return [(replica, pulse.deaths) for replica, pulse in self.liveness.pulses.items() if pulse.deaths]

    def _micro_batches(self) -> int:
        return next(iter(self.liveness.peers.values())).session.micro_batches


def base_ref(record: Record) -> SnapshotRef:
    """The state that the record's generation begins from."""
    return SnapshotRef(record.base.generation, record.base.step, record.base.digest)
