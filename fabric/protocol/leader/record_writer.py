"""The only way to the record: one guarded write at a time, announced when the store has it."""

import random
from dataclasses import dataclass, field, replace

from fabric.model import Member, Record, incident_id_of
from fabric.protocol.leader.evidence import FailureEvidence
from fabric.protocol.leader.liveness import Peer
from fabric.protocol.leader.outbox import LeaderOutbox
from fabric.protocol.leader.state import JobState, RosterLimits
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages import roster_delta
from fabric.protocol.rules.assignment import seated

# A record stays small however many have something to say.
MAX_REASON_CHARACTERS = 1000


class RosterAnnouncement:
    """The record in force as the messages that tell it, made once: all members get the same objects."""

    def __init__(self, record: Record, before: Record | None) -> None:
        self.record = record
        self.whole = m.Epoch(record, changes=True)
        self._again = roster_delta.change(record, record)
        self.change = self.whole if before is None else roster_delta.change(before, record)

    def told_to(self, session: m.OpenSession) -> m.Epoch | m.RosterDelta:
        """The message for a session that begins: no more of the roster than it lacks."""
        for message in (self._again, self.change):
            if isinstance(message, m.RosterDelta) and message.before == session.roster:
                return message
        return self.whole


@dataclass(slots=True, eq=False)
class RecordWriter:
    """Rule 1: at most one write in flight, announced only when committed."""

    state: JobState
    outbox: LeaderOutbox
    limits: RosterLimits
    evidence: FailureEvidence
    entropy: random.Random
    writing: Record | None = None
    reading: bool = False
    announcement: RosterAnnouncement | None = None
    data_slots: dict[str, int] = field(default_factory=dict)  # replica -> its newest data slot

    def resolve(self, record: Record | None) -> Record | None:
        """The write in flight, if this record, read from the store, is the one that was written."""
        self.reading = False
        written, self.writing = self.writing, None
        is_mine = written is not None and record is not None and record.nonce == written.nonce
        return record if is_mine else None

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
        )
        self.writing = record
        self.outbox.emit(io.WriteRecord(record, self.state.record))

    def write_epoch(
        self, record: Record, roster: tuple[Member, ...], forced: bool, why: str, incident_id: str = ""
    ) -> None:
        epoch = record.epoch + 1
        proven = tuple(self.state.proven(x) for x in roster)
        self.write(
            replace(
                record,
                epoch=epoch,
                forced=epoch if forced else record.forced,
                nonce=self.nonce(),
                roster=seated(proven, self.data_slots, record.sharing),
                reason=why[:MAX_REASON_CHARACTERS],
                incident_id=incident_id or incident_id_of(epoch),
                poison=self.evidence.known_poison(record) if forced else record.poison,
                min_replicas=self.limits.overrides.min_replicas,
            )
        )

    def write_complete(self, record: Record, step: int) -> None:
        base = replace(record.base, step=step)
        ended = self.state.unix_now
        self.write(replace(record, complete=True, base=base, reason=f"finished at step {step}", ended=ended))

    def nonce(self) -> str:
        return f"{self.entropy.getrandbits(64):016x}"

    def announce(self, record: Record, before: Record | None) -> None:
        """To everybody, as the difference to what was announced ``before`` where that is understood."""
        # As they were announced it: its digest is known already.
        announced = (
            self.announcement.record if self.announcement is not None and before is not None else before
        )
        self.announcement = RosterAnnouncement(roster_delta.for_members(record), announced)
        if record.failed:
            return  # its replicas are rejected instead
        complete = m.Complete(record.fence, record.base.step)
        for replica, peer in self.state.liveness.peers.items():
            self.outbox.send(
                replica, self.announcement.change if peer.session.roster else self.announcement.whole
            )
            if record.complete:
                self.outbox.send(replica, complete)

    @property
    def has_unwritten_overrides(self) -> bool:
        """Whether a leader that followed now would not know them."""
        record = self.state.record
        return record is None or (self.limits.overrides, self.evidence.failures, self.evidence.hosts) != (
            record.overrides,
            record.failures,
            record.hosts,
        )

    def write_overrides(self, record: Record) -> bool:
        """Write within the epoch what concerns newcomers only: the members need not notice."""
        if not self.has_unwritten_overrides:
            return False
        self.write(record)
        return True

    @staticmethod
    def says_the_same(record: Record, other: Record) -> bool:
        """Whether it means the same to its members."""
        after = (record.fence, record.complete, record.failed)
        return after == (other.fence, other.complete, other.failed)

    def on_request_roster(self, peer: Peer, message: m.RequestRoster) -> None:
        if self.state.is_current(message.fence) and self.announcement is not None:
            self.outbox.send(peer.session.replica, self.announcement.whole)

    @property
    def is_changing(self) -> bool:
        """Whether a record is being written, or will be without those who are condemned."""
        return self.writing is not None or bool(self.state.epoch.pending_evictions)
