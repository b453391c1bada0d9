"""The decision of a forced epoch, from the reports to the members."""

from dataclasses import dataclass, replace

from fabric.model import Record
from fabric.protocol.leader.base_choice import BaseChoice
from fabric.protocol.leader.evictions import Evictions
from fabric.protocol.leader.liveness import Peer
from fabric.protocol.leader.state import JobState, LeaderOutbox
from fabric.protocol.messages import network as m
from fabric.protocol.rules.decide import Evict, Undecidable, decide


@dataclass(slots=True, eq=False)
class Decisions:
    """Rule 5: decides from the reports of all members."""

    state: JobState
    outbox: LeaderOutbox
    bases: BaseChoice
    evictions: Evictions

    def on_report(self, peer: Peer, message: m.Report) -> None:
        if not self.state.is_current(message.fence) or not self.state.in_force(peer):
            return
        self.state.epoch.reports.setdefault(peer.session.replica, message)
        self.bases.note_loaded(message.state_generation)
        if self.state.epoch.decision is not None:
            self.outbox.send(peer.session.replica, self.row(peer.session.replica))

    def decide_epoch(self, record: Record) -> None:
        reports = self.state.epoch.reports
        if not record.is_forced or self.state.epoch.decision is not None:
            return
        if any(x.replica not in reports for x in record.roster):
            return
        decision = decide(record, reports, self.state.micro_batches(record))
        if isinstance(decision, Evict):
            if decision.state:
                self._tell_outvoted(decision)
                self.bases.mistrust(decision.replicas, decision.reason)
            for name in decision.replicas:
                self.state.epoch.cannot_continue.add(name)
                self.evictions.schedule(name, decision.reason)
            self.evictions.evict(record)
        elif isinstance(decision, Undecidable):
            self._stop_job(record, decision.reason)
        else:
            self.state.epoch.decision, self.state.epoch.decided_at = decision, self.state.now
            self.state.epoch.rows = {
                a.replica: replace(decision, table=(a,)) for a in decision.table if a.drop or a.micro_batches
            }
            self.state.epoch.no_row = replace(decision, table=())
            if not self.state.epoch.running:  # else the members follow an earlier leader's decision
                text = f"step {decision.step}: {decision.reason}"
                self.outbox.record_event("resume", "", text, record.incident_id)
            for member in record.roster:
                self.outbox.send(member.replica, self.row(member.replica))

    def _tell_outvoted(self, decision: Evict) -> None:
        """Tell each member once that its state is wrong: it has not heard the others' reports."""
        for name in decision.replicas:
            if name not in self.state.epoch.cannot_continue:
                self.outbox.send(name, m.Rejected(decision.reason, retry=True, outvoted=True))

    def row(self, replica: str) -> m.Resume:
        """The decision with this member's row of the table; all members without a row get the same object."""
        assert self.state.epoch.no_row is not None
        return self.state.epoch.rows.get(replica, self.state.epoch.no_row)

    def _stop_job(self, record: Record, reason: str) -> None:
        """Tell every member once that the job stops until an operator acts."""
        if self.state.epoch.stopped:
            return
        self.state.epoch.stopped = reason
        self.outbox.record_event("stopped", "", reason, record.incident_id)
        for member in record.roster:
            self.outbox.send(member.replica, m.Rejected(reason))
