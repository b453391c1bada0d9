"""The only part that writes the record: one guarded write at a time, announced once it is committed."""

import random

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.model import Adaptation, Member, Record, incident_id_of
from fabric.protocol.leader.evidence import FailureEvidence
from fabric.protocol.leader.liveness import Peer
from fabric.protocol.leader.state import MAX_REASON_CHARACTERS, JobState, LeaderOutbox, RosterLimits
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages import roster_delta
from fabric.protocol.rules.assignment import asked_share, for_roster, lost_parts, seated, with_shares

# The record remembers the replicas on this many data slots, the lowest ones.
MAX_SEATS = 4096


class RosterAnnouncement:
    """The messages that announce the record in force. They are made once, for all members."""

    def __init__(self, record: Record, before: Record | None) -> None:
        self.record = record
        self.whole = m.Epoch(record)
        self._again = roster_delta.change(record, record)
        self.change = self.whole if before is None else roster_delta.change(before, record)

    def for_session(self, session: m.OpenSession) -> m.Epoch | m.RosterDelta:
        """The message for a session that begins, with the part of the roster that it lacks."""
        for message in (self._again, self.change):
            if isinstance(message, m.RosterDelta) and message.before == session.roster:
                return message
        return self.whole


class RecordWriter(Struct, eq=False):
    """Rule 1: at most one write in flight, announced only when committed."""

    state: JobState
    outbox: LeaderOutbox
    limits: RosterLimits
    evidence: FailureEvidence
    entropy: random.Random
    writing: Record | None = None
    reading: bool = False
    unsettled: set[str] = field(default_factory=set)  # nonces of writes that may still land
    announcement: RosterAnnouncement | None = None
    data_slots: dict[str, int] = field(default_factory=dict)  # replica -> its newest data slot

    def fail(self, event: io.WriteFailed) -> bool:
        """Note the failure of a write; return whether it was the one in flight: the record must be read."""
        if self.writing is None or self.writing.nonce != event.nonce:
            return False
        self.reading = True
        if not event.definite:
            self.unsettled.add(event.nonce)
        return True

    def settle(self, record: Record) -> None:
        """Note that the store has this record: no earlier write can land any more."""
        self.writing = None
        self.data_slots.update((x.replica, x.data_slot) for x in record.roster)
        self.unsettled.clear()

    def resolve(self, record: Record | None) -> Record | None:
        """Forget the write in flight; return ``record``, as read from the store, if this leader wrote it."""
        self.reading = False
        written, self.writing = self.writing, None
        own = self.unsettled | ({written.nonce} if written is not None else set())
        return record if record is not None and record.nonce in own else None

    def write(self, record: Record) -> None:
        nonce = record.nonce
        if self.state.record is not None and nonce == self.state.record.nonce:
            nonce = self.nonce()
        autonomy_s = max(self.state.autonomy_s, record.autonomy_s)
        record = replace(
            record,
            nonce=nonce,
            overrides=self.limits.overrides,
            failures=self.evidence.failures,
            hosts=self.evidence.hosts,
            autonomy_s=autonomy_s,
            policy=self.limits.agreed,
            seats=self._seats(record),
        )
        self.writing = record
        self.outbox.emit(io.WriteRecord(record, self.state.record))

    def recall(self, record: Record) -> None:
        """Take over the data slots that earlier leaders chose, also those of replicas that are away."""
        self.data_slots = {name: slot for slot, name in enumerate(record.seats) if name}
        self.data_slots |= {x.replica: x.data_slot for x in record.roster}

    def _seats(self, record: Record) -> tuple[str, ...]:
        """The replica on each data slot, where data slots matter. A member goes before a replica away."""
        if record.sharing.policy != "shrink" and not record.sharing.readers:
            return ()
        names = {slot: name for name, slot in self.data_slots.items() if 0 <= slot < MAX_SEATS}
        names |= {x.data_slot: x.replica for x in record.roster if 0 <= x.data_slot < MAX_SEATS}
        return tuple(names.get(slot, "") for slot in range(max(names, default=-1) + 1))

    def write_epoch(
        self,
        record: Record,
        roster: tuple[Member, ...],
        forced: bool,
        why: str,
        incident_id: str = "",
        adaptation: Adaptation | None = None,
    ) -> None:
        epoch = self.state.next_epoch(record)
        adaptation = for_roster(adaptation or record.adaptation, roster)
        asked = [self.asked(record, x) for x in roster]
        proven = with_shares([self.state.proven(x) for x in roster], asked, adaptation)
        seats = seated(proven, self.data_slots, record.sharing)
        # A planned epoch's first round has no share for a joining member, also where it alone reads a part.
        lost = lost_parts(record.sharing, [x for x in seats if not x.joining])
        forced = forced or len(lost) > len(lost_parts(record.sharing, seats))
        self.write(
            replace(
                record,
                epoch=epoch,
                forced=epoch if forced else record.forced,
                nonce=self.nonce(),
                roster=seats,
                reason=why[:MAX_REASON_CHARACTERS],
                incident_id=incident_id or incident_id_of(epoch),
                poison=self.evidence.known_poison(record) if forced else record.poison,
                min_replicas=self.limits.least_of_epoch,
                adaptation=adaptation,
            )
        )

    def asked(self, record: Record, member: Member) -> int:
        """The share that this process asked for: by its session, else by ``record``."""
        peer = self.state.liveness.peers.get(member.replica)
        if peer is not None and peer.incarnation == member.incarnation:
            return peer.session.shares
        return asked_share(record, member)

    def write_complete(self, record: Record, step: int, why: str = "") -> None:
        base = replace(record.base, step=step)
        ended = self.state.unix_now
        reason = why or f"finished at step {step}"
        self.write(replace(record, complete=True, failed="", base=base, reason=reason, ended=ended))

    def nonce(self) -> str:
        return f"{self.entropy.getrandbits(64):016x}"

    def announce(self, record: Record, before: Record | None) -> None:
        """Announce ``record`` to every session, as a delta from ``before``."""
        announced = before
        if self.announcement is not None and before is not None:
            announced = self.announcement.record  # the same roster, with its digest cached
        self.announcement = RosterAnnouncement(roster_delta.for_members(record), announced)
        if record.failed:
            return  # for a failed job the leader announces no epoch, but rejects the sessions
        complete = m.Complete(record.fence, record.base.step)
        for replica in self.state.liveness.peers:
            self.outbox.send(replica, self.announcement.change)
            if record.complete:
                self.outbox.send(replica, complete)

    @property
    def has_unwritten_overrides(self) -> bool:
        """Whether the record lacks overrides or evidence that this leader knows."""
        record, evidence = self.state.record, (self.evidence.failures, self.evidence.hosts)
        if record is None or self.limits.overrides != record.overrides:
            return True
        return evidence != (record.failures, record.hosts)

    def write_overrides(self, record: Record) -> bool:
        """Write, within the epoch, changes that concern newcomers only."""
        if not self.has_unwritten_overrides:
            return False
        self.write(record)
        return True

    def on_request_roster(self, peer: Peer, message: m.RequestRoster) -> None:
        if self.state.is_current(message.fence) and self.announcement is not None:
            self.outbox.send(peer.session.replica, self.announcement.whole)

    @property
    def is_changing(self) -> bool:
        """Whether a record is being written, or an eviction is pending."""
        return self.writing is not None or bool(self.state.epoch.pending_evictions)
