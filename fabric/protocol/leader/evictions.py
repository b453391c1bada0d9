"""The members that the next epoch leaves out."""

from dataclasses import dataclass, field

from fabric.model import Record
from fabric.protocol.leader.admission import Admission
from fabric.protocol.leader.evidence import FailureEvidence
from fabric.protocol.leader.job_endings import Endings
from fabric.protocol.leader.liveness import Peer
from fabric.protocol.leader.record_writer import RecordWriter
from fabric.protocol.leader.starts import Starts
from fabric.protocol.leader.state import JobState, LeaderOutbox
from fabric.protocol.messages import network as m
from fabric.protocol.rules.wait_graph import StragglerTracker


@dataclass(slots=True, eq=False)
class Evictions:
    """Rule 2: schedules evictions, and writes the forced epoch without the evicted members."""

    state: JobState
    outbox: LeaderOutbox
    writer: RecordWriter
    evidence: FailureEvidence
    starts: Starts
    admission: Admission
    endings: Endings
    stragglers: StragglerTracker = field(default_factory=StragglerTracker)

    def schedule(self, replica: str, reason: str) -> None:
        """Leave this member out of the next epoch."""
        epoch = self.state.epoch
        if replica in epoch.pending_evictions or not self.state.lists(replica):
            return
        if not epoch.pending_evictions:
            epoch.evictions_since = self.state.now
        epoch.pending_evictions[replica] = reason
        self.outbox.record_event("evicting", replica, reason, self.state.next_incident_id())

    def cancel(self, record: Record) -> None:
        """Cancel the eviction of each member heard again with a good state, because none could replace it."""
        epoch = self.state.epoch
        for member in record.roster:
            if member.replica not in epoch.pending_evictions or member.replica in epoch.cannot_continue:
                continue
            if not self.state.liveness.failure_reason(member, self.state.now):
                del epoch.pending_evictions[member.replica]
                why = "it goes on, because no other member could take over"
                self.outbox.record_event("heard again", member.replica, why)

    def evict(self, record: Record) -> bool:
        """Rule 2: write the epoch without these members. If no other knows the state, try a cold start."""
        for member in self.state.liveness.suspects(record.roster, self.state.now):
            if member.replica not in self.state.epoch.pending_evictions:
                reason = self.state.liveness.failure_reason(member, self.state.now)
                if reason:
                    self.schedule(member.replica, reason)
        pending = self.state.epoch.pending_evictions
        if not any(self.state.knows(x) for x in record.roster if x.replica not in pending):
            self.cancel(record)
        if not pending:
            return False
        left = tuple(x for x in record.roster if x.replica not in pending)
        if not any(self.state.knows(x) for x in left):
            return self.starts.start_again(record)
        if self.state.now - self.state.epoch.evictions_since < self.state.config.coalesce_s:
            return True
        why = "; ".join(f"{name} evicted: {reason}" for name, reason in sorted(pending.items()))
        self.evidence.note_failures(record)
        self.writer.write_epoch(record, left, forced=True, why=why)
        return True

    def evict_unresponsive(self, record: Record) -> None:
        """Evict a living member whose report takes longer than its user code may take.

        User code may hold the interpreter's lock, so the other members wait for that long.
        """
        reports, pending = self.state.epoch.reports, self.state.epoch.pending_evictions
        if not record.is_forced or self.state.epoch.decision is not None:
            return
        answered = (x for x in record.roster if x.replica in reports and x.replica not in pending)
        if not any(self.state.knows(x) for x in answered):
            return
        # Count seconds only while this leader could hear the member: not while stopped or not yet elected.
        waited_s = self.state.now - max(self.state.epoch.since, self.state.liveness.elected)
        for member in record.roster:
            peer = self.state.liveness.peers.get(member.replica)
            if member.replica in reports or peer is None or waited_s < self.state.patience_s(peer):
                continue
            self.schedule(
                member.replica, f"it lives, but did not answer epoch {record.epoch} for {waited_s:.0f} s"
            )

    def evict_stragglers(self, peer: Peer, beat: m.Heartbeat) -> None:
        """Evict members whose user code takes longer than ``user_code_s``, or than ``busy`` announced."""
        name = peer.session.replica
        if beat.step > self.stragglers.since.get(name, (beat.step, 0.0))[0]:
            self.stragglers.came(name)
        record = self.state.record
        if not beat.waiting_for or record is None or beat.epoch != record.epoch:
            return
        if not record.lists(*peer.process):
            return
        self.stragglers.report(name, beat.waiting_for)
        for other in beat.waiting_for:
            late, excused = self.state.liveness.peers.get(other), other in self.endings.finished
            if late is None or excused or not self.state.lists(other) or self.state.is_blocking_join(other):
                continue
            waited_s = self.stragglers.waited_s(other, beat.step, self.state.now)
            if waited_s >= self.state.patience_s(late) and self.state.is_spared_by(other):
                busy = late.beat.busy if late.beat is not None else ""
                doing = f"busy with {busy}" if busy else "in user code"
                self.admission.evicted_in_user_code[late.process] = late.step
                self.schedule(other, f"it was {doing} while the others waited for {waited_s:.0f} s")

    def evict_slow_joiners(self, record: Record) -> None:
        """Evict members in a blocking join whose state does not arrive within the time of one exchange."""
        for name in self.state.blocking_joiners(record):
            limit_s = self.state.join_stall_s(name)
            if self.state.now - self.state.epoch.decided_at >= limit_s:
                self.state.epoch.slow_joiners.add(name)
                self.schedule(name, f"the others waited {limit_s:g} s for its state, which did not arrive")
