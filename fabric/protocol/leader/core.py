"""The leader core: one job's membership, as the elected lighthouse decides it. Pure.

Its parts own their fields and take each other as arguments: the job's state, evidence, the writer of the
record, and one part for each kind of move. After every event the core goes through ``plan.PLAN_RULES`` and
makes the first move that is due. It announces no record before the store has committed it (rule 1).
"""

import math
import random
from collections.abc import Callable, Sized
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from fabric.model import Record
from fabric.protocol.leader import admission, plan
from fabric.protocol.leader.adaptations import Adaptations, Relayouts
from fabric.protocol.leader.admission import Admission
from fabric.protocol.leader.base_choice import BaseChoice
from fabric.protocol.leader.evictions import Evictions, RingRebuilder
from fabric.protocol.leader.evidence import FailureEvidence
from fabric.protocol.leader.job_endings import Endings
from fabric.protocol.leader.joins import Joins
from fabric.protocol.leader.liveness import STOP_CALM_S, LastStatus, Peer, stops_after
from fabric.protocol.leader.orders import OperatorOrders
from fabric.protocol.leader.record_writer import RecordWriter
from fabric.protocol.leader.starts import Starts
from fabric.protocol.leader.state import (
    MANY,
    JobState,
    LeaderConfig,
    LeaderOutbox,
    Mark,
    RosterLimits,
)
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.decide import Evict, Undecidable, decide

# The decision of a forced epoch, from the reports to the members.


class Decisions(Struct, eq=False):
    """Rule 5: decides from the reports of all members."""

    state: JobState
    outbox: LeaderOutbox
    bases: BaseChoice
    evictions: Evictions

    def on_report(self, peer: Peer, message: m.Report) -> None:
        if not self.state.is_current(message.fence) or not self.state.in_force(peer):
            return
        row = self.state.epoch.on_report(peer.session.replica, message)
        self.bases.note_loaded(message.state_generation)
        if row is not None:
            self.outbox.send(peer.session.replica, row)

    def decide_epoch(self, record: Record) -> None:
        epoch, reports = self.state.epoch, self.state.epoch.reports
        if not record.is_forced or epoch.decision is not None:
            return
        if any(x.replica not in reports for x in record.roster):
            return
        decision = decide(record, reports)
        if isinstance(decision, Evict):
            if decision.state:
                self.bases.mistrust(decision.replicas, decision.reason)
            for name in decision.replicas:
                if decision.state and not epoch.has(name, Mark.USELESS):
                    # It has not heard the others' reports: tell it once that its state is wrong.
                    self.outbox.send(name, m.Rejected(decision.reason, retry=True, outvoted=True))
                self.evictions.schedule(name, decision.reason, Mark.USELESS)
            self.evictions.evict(record)
        elif isinstance(decision, Undecidable):
            if not epoch.stopped:  # the job stops until an operator acts
                epoch.stop(decision.reason)
                self.outbox.record_event("stopped", "", decision.reason, record.incident_id)
                for member in record.roster:
                    self.outbox.send(member.replica, m.Rejected(decision.reason))
        else:
            epoch.decide(decision, self.state.now)
            if not epoch.running:  # else the members follow an earlier leader's decision
                text = f"step {decision.step}: {decision.reason}"
                self.outbox.record_event("resume", "", text, record.incident_id)
            for member in record.roster:
                self.outbox.send(member.replica, epoch.row(member.replica))


__all__ = ["MANY", "LeaderConfig", "LeaderCore"]

# If no event comes for this many seconds, although two deadlines fall due, the leader itself was stopped.
DEAF_S = 1.2
# In a large job the leader collects frequent events for this many seconds, and then plans once.
TOGETHER_S = 0.05
SOON_S = 0.001  # the shortest time from one tick to the next
# Routine events may wait for this many seconds.
ROUTINE_S = 0.25
_FREQUENT = (
    io.FromMember,
    io.TrainerStatusSeen,
    io.StatusesUnchanged,
    io.SessionOpened,
    io.SessionClosed,
    io.TrainerStatusClosed,
    io.AcceptQueueFull,
)


class LeaderCore:
    """Takes events and returns effects. ``entropy`` makes nonces; nothing else here is random.

    A lighthouse may read the parts and their fields, and writes none of them.
    """

    def __init__(self, job: str, config: LeaderConfig, entropy: random.Random, now: float) -> None:
        state = JobState(job, config, now)
        outbox = LeaderOutbox(state)
        limits = RosterLimits(state)
        evidence = FailureEvidence(state)
        writer = RecordWriter(state, outbox, limits, evidence, entropy)
        self.state: JobState = state
        self.outbox: LeaderOutbox = outbox
        self.limits: RosterLimits = limits
        self.evidence: FailureEvidence = evidence
        self.writer: RecordWriter = writer
        self.bases: BaseChoice = BaseChoice(state)
        self.endings: Endings = Endings(state, outbox, evidence, writer)
        self.starts: Starts = Starts(state, limits, evidence, writer, self.bases, self.endings)
        self.orders: OperatorOrders = OperatorOrders(state, outbox, limits, writer)
        self.admission: Admission = Admission(state, outbox, limits, evidence, self.orders, self.endings)
        self.evictions: Evictions = Evictions(
            state, outbox, writer, evidence, self.starts, self.admission, self.endings
        )
        self.joins: Joins = Joins(state, outbox, limits, writer, self.admission, evidence, self.bases)
        self.rebuilds: RingRebuilder = RingRebuilder(state, outbox, writer, self.evictions)
        self.decisions: Decisions = Decisions(state, outbox, self.bases, self.evictions)
        self.adaptations: Adaptations = Adaptations(state, outbox, limits, writer)
        self.relayouts: Relayouts = Relayouts(self.adaptations)
        self.plan_at = math.inf  # the latest time to plan for the events since the last plan
        self._deadline: float | None = None  # the time for which the last plan asked for the next plan
        self._due = math.inf  # the time for which the leader asked for a tick

    # --- the contract ----------------------------------------------------------------------------------

    def handle(self, event: io.Event, now: float) -> list[io.Effect]:
        """Take one event at time ``now`` (monotonic seconds); return the effects to perform in order."""
        state = self.state
        if now - state.now > DEAF_S:
            # The leader itself was stopped, so messages of the members may lie unread.
            state.liveness.begin_term(now)
        if isinstance(event, io.LeaderTick):
            state.liveness.tick_was_late(max(0.0, now - self._due), now)
        state.advance(now)
        self.outbox.begin()
        _HANDLERS[type(event)](self, event)
        if state.leading and self.writer.writing is None and not self.writer.reading:
            self._plan_when_due(event)
        elif isinstance(event, io.LeaderTick):
            # The leader plans again when the store has answered.
            self.plan_at, self._deadline = math.inf, state.now + TOGETHER_S
        return self.outbox.effects

    def _plan_when_due(self, event: io.Event) -> None:
        """Plan now, or in a large job when the timer is due, because a plan looks at every replica.

        How late the timer comes shows how late every message comes.
        """
        if self.state.is_large and isinstance(event, _FREQUENT):
            patience_s = ROUTINE_S if self._is_routine(event) else TOGETHER_S
            self.plan_at = min(self.plan_at, self.state.now + patience_s)
            return
        self.plan_at = math.inf
        plan.make_plan(self)
        self._deadline = self._next_deadline()

    def _is_routine(self, event: io.Event) -> bool:
        """Whether the event only shows life, opens a session, or is an answer that every member must give."""
        if isinstance(event, io.FromMember):
            kind, record = type(event.message), self.state.record
            if kind is m.Heartbeat:
                return record is None or record.member(event.replica) is not None
            answers = _ANSWERS.get(kind)
            return answers is not None and record is not None and len(answers(self)) < len(record.roster)
        if isinstance(event, io.TrainerStatusSeen):
            return event.status.trainer == "running"
        return isinstance(event, io.SessionOpened | io.AcceptQueueFull | io.StatusesUnchanged)

    def next_deadline(self) -> float | None:
        """Return the latest time at which the shell must send a tick."""
        if self.state.leading and self._deadline is not None and self.state.is_large:
            # Events before this deadline do not postpone it, or the deadline would never be due.
            due: float | None = min(self._deadline, self.plan_at)
        else:
            due = self._next_deadline()
        self._due = math.inf if due is None else due
        return due

    def _next_deadline(self) -> float | None:
        state = self.state
        record, epoch, now = state.record, state.epoch, state.now
        if not state.leading or (record is not None and record.complete):
            return None
        if record is not None and record.failed and not self.endings.restart_after_failure:
            return None
        if record is None:
            return now + 0.5
        dues = [state.liveness.next_check(record.roster, now), now + DEAF_S / 2]
        if epoch.pending_evictions:
            # Their epoch, and from then on a look whether a cold start may begin.
            dues += [epoch.evictions_since + state.config.coalesce_s, now + state.config.liveness.lost_s / 2]
        if epoch.aborted:
            dues.append(self.rebuilds.rebuild_due)
        least_s = TOGETHER_S if state.is_large else SOON_S
        # The plan has looked after an earlier time, and waits for something else.
        return max(min(d for d in dues if d is not None and d > now - SOON_S), now + least_s)

    # --- the record ------------------------------------------------------------------------------------

    def on_elected(self, event: io.Elected) -> None:
        """Begin a term with all that the record knows, and announce it to all sessions."""
        self.state.lead(event)
        record = event.record
        if record is not None:
            self.limits.recall_overrides(record)
            self.limits.recall(record)
            self.evidence.recall(record)
            self.writer.recall(record)
            self._announce(record, None)

    def on_written(self, event: io.RecordWritten) -> None:
        writing = self.writer.writing
        if writing is not None and writing.nonce == event.nonce:
            self._adopt(writing)

    def on_write_failed(self, event: io.WriteFailed) -> None:
        """Rule 1: read the record again after an indefinite or a refused write."""
        if self.writer.fail(event):
            self.outbox.emit(io.ReadRecord())

    def on_read(self, event: io.RecordRead) -> None:
        if not self.writer.reading:
            return
        written, record = self.writer.resolve(event.record), self.state.record
        if written is not None:
            self._adopt(written)
        elif (event.record.nonce if event.record else "") != (record.nonce if record else ""):
            self.state.step_down()
            self.outbox.emit(io.StepDown("another lighthouse has written the job's record"))
        elif record is not None:
            self.evidence.take_back(record)
            if self.writer.unsettled:
                self.writer.write(record)  # no earlier write can land after this one

    def _adopt(self, record: Record) -> None:
        """Announce a record that the store has committed."""
        state, before = self.state, self.state.record
        self.writer.settle(record)
        after = (record.fence, record.complete, record.failed)
        if before is not None and after == (before.fence, before.complete, before.failed):
            state.amend(record)
            return
        is_new_generation = before is None or before.generation != record.generation
        if is_new_generation:
            self.state.begin_generation(record.base.step)
            state.liveness.begin_generation(state.now)
            self.evictions.begin_generation()
            self.rebuilds.start_over()
        self.admission.back_off(record)
        self.endings.begin_epoch(record, is_new_generation)
        state.begin_epoch(record)
        self.limits.recall(record)
        self.limits.forget_gone()
        self.joins.begin_epoch()
        self.outbox.forget_losses(record)
        kind = "complete" if record.complete else "epoch"
        self.outbox.record_event(kind, "", record.reason, record.incident_id)
        self._announce(record, before)

    def _announce(self, record: Record, before: Record | None) -> None:
        self.writer.announce(record, before)
        if record.failed:
            self.endings.reject_all(record)

    # --- operators -------------------------------------------------------------------------------------

    def on_operator(self, event: io.Operator) -> None:
        if event.action == "retry":
            self.endings.retry(event)
        elif event.action == "admit":
            self.evidence.forgive_past(event.replica)
            self.admission.readmit(event.replica)
        elif event.action not in ("drain", "evict", "end"):
            self.limits.apply(event)
        elif objection := self.orders.objection(event):
            self.outbox.record_event(f"not {event.action}ed", event.replica, objection)
        elif event.action == "end":
            self.endings.end(event)
        elif event.host_is_gone:
            member = self.state.record.member(event.replica) if self.state.record is not None else None
            assert member is not None  # the objection says so otherwise
            self.limits.note_gone(member.process, f"its host is gone, says {event.who}: {event.why}")
        elif event.action == "drain":
            self.orders.ask_to_drain(event.replica, f"drained by {event.who} ({event.why})")
        else:
            why = f"evicted by {event.who}: {event.why}"
            self.evictions.schedule(event.replica, why, Mark.EXCUSED)

    # --- sessions and trainer statuses -----------------------------------------------------------------

    def on_opened(self, event: io.SessionOpened) -> None:
        session = event.session
        rejected = self._refusal(session)
        if rejected is not None:
            self.outbox.emit(io.SendMember(session.replica, session.incarnation, rejected))
            self.outbox.record_event("session refused", session.replica, rejected.reason)
            return
        live, former = self.state.liveness, self.state.liveness.peers.get(session.replica)
        if (former is None or not former.connected) and self.state.lists(session.replica):
            live.came_back(self.state.now, first=former is None, one_of_many=self.state.is_large)
        member = self.state.record.member(session.replica) if self.state.record is not None else None
        if member is not None:
            live.note_end(member)  # the session's end may prove that the process has ended
        # Keep the facts about a replaced process while the record names that process.
        records = [x for x in (self.state.record, self.writer.writing) if x is not None]
        is_named = former is not None and any(x.lists(*former.process) for x in records)
        peer = live.opened(event, self.state.now, is_named)
        self.state.note_session(peer)
        self.limits.forget_gone()
        self.limits.hear(peer)
        self.admission.refuse_unlike(session)
        self.state.note_step(peer)
        if former is None or former.incarnation != session.incarnation:
            for part in (self.endings, self.orders, self.admission, self.joins):
                part.forget(session.replica)
            self.evictions.stragglers.forget(session.replica)
            self.rebuilds.ring_rebuilds.forget(session.replica)
            self.outbox.record_event("session opened", session.replica, f"incarnation {session.incarnation}")
        self.endings.note_ended(session.replica, session.ended)
        self._greet(session)

    def _greet(self, session: m.OpenSession) -> None:
        """Send the record in force to a new session."""
        record, announcement = self.state.record, self.writer.announcement
        if record is None:
            return
        if session.finished and session.generation == record.generation:
            self.endings.note_finished(session.replica, session.step)
        if announcement is not None:
            self.outbox.send(session.replica, announcement.for_session(session))
            self.joins.take_over(session)
            self.joins.serve_again(session.replica)
            if record.complete:
                self.outbox.send(session.replica, m.Complete(record.fence, record.base.step))

    def _refusal(self, session: m.OpenSession) -> m.Rejected | None:
        """The refusal of this session, with a sentence that says what to do; None: the session may stand."""
        live, record = self.state.liveness, self.state.record
        replaced = admission.replaced(session, live)
        if replaced:
            above = admission.number_to_pass(session, live, record, self.state.now)
            behind = (
                f"the clock of this host is behind that of the host where {session.replica} ran before: this "
                "process starts again with a higher incarnation"
            )
            return m.Rejected(behind if above else replaced, above=above)
        failed = self.endings.refusal_as_failed(session)
        if failed is not None:
            return failed
        why = admission.taken(session, live, record, self.state.now)
        why = why or admission.unlike(session, live, record)
        if why:
            return m.Rejected(why)
        why = admission.unheard(session, live, record, self.state.now)
        return m.Rejected(why, retry=True) if why else None

    def on_closed(self, event: io.SessionClosed) -> None:
        peer = self.state.liveness.peers.get(event.replica)
        if peer is not None and peer.incarnation == event.incarnation and peer.connected:
            peer.close(self.state.now)
            self.state.liveness.forget_strangers(self.state.record.names if self.state.record else ())

    def on_status(self, event: io.TrainerStatusSeen) -> None:
        status, record = event.status, self.state.record
        member = record.member(status.replica) if record is not None else None
        before = self.state.liveness.hear(status, member, self.state.now)
        self.limits.forget_gone()
        if member is not None and status.trainer == "gone":
            self.state.liveness.note_end(member)
        listed = member is not None and member.incarnation == status.incarnation
        counts = listed or self.state.liveness.servers.of_rank(status.rank)[status.replica].says(status)
        if counts:
            answered = listed and not (record is not None and record.complete)
            self._record_trainer(status, before, answered)
        self.endings.note_ended(status.replica, status.ended)
        if status.durable and (before is None or status.durable != before.durable):
            why = f"the checkpoint of step {status.durable[-1].step} is complete"
            self.outbox.record_event("durable", status.replica, why)
        if status.durable_error and (before is None or status.durable_error != before.durable_error):
            self.outbox.record_event("durable failed", status.replica, status.durable_error)

    def on_unchanged(self, event: io.StatusesUnchanged) -> None:
        live, record = self.state.liveness, self.state.record
        for status, ago_s in zip(event.statuses, event.ago_s, strict=True):
            # While the record names a replica, the end of its trainer is noted each time.
            is_end = status.trainer == "gone" and record is not None and status.replica in record.names
            if is_end or not live.hear_again(status, self.state.now):
                aged = replace(status, ages_s=tuple(age_s + ago_s for age_s in status.ages_s))
                self.on_status(io.TrainerStatusSeen(aged))

    def _record_trainer(self, status: m.TrainerStatus, before: LastStatus | None, answered: bool) -> None:
        """Report a death, the first of several stops, and their end. An epoch answers if ``answered``."""
        stops = stops_after(before, status, self.state.now)
        earlier = before.stops if before is not None and before.incarnation == status.incarnation else 0
        is_news = before is None or not before.says(status)
        if is_news and status.trainer == "gone" and self.state.liveness.servers.says_other_gone(status):
            return  # the ranks of a replica end together: one event says so
        incident_id = self.state.next_incident_id() if answered else ""
        why = "seen by its checkpoint server"
        if (status.trainer == "gone" and is_news) or (stops and not earlier):
            self.outbox.record_event("trainer " + status.trainer, status.replica, why, incident_id)
        elif earlier and not stops and status.trainer == "running":
            why = f"it has run for {STOP_CALM_S:g} s without a stop, after {earlier} stops"
            self.outbox.record_event("trainer running", status.replica, why)

    def on_status_closed(self, event: io.TrainerStatusClosed) -> None:
        member = self.state.record.member(event.replica) if self.state.record is not None else None
        status = self.state.liveness.servers.closed(
            event.replica, event.ckpt, event.rank, member, self.state.now
        )
        if status is not None and event.rank >= self.state.liveness.ranks_of(event.replica, member):
            self.state.liveness.servers.forget_stranger(event.replica, event.rank)

    def on_member(self, event: io.FromMember) -> None:
        peer = self.state.liveness.peers.get(event.replica)
        if peer is None or peer.session.incarnation != event.incarnation or not peer.connected:
            return
        peer.hear(self.state.now)
        handler = _FROM_MEMBER.get(type(event.message))
        if handler is not None:
            handler(self)(peer, event.message)

    # --- messages --------------------------------------------------------------------------------------

    def on_beat(self, peer: Peer, beat: m.Heartbeat) -> None:
        went_on = peer.beat is not None and beat.step > peer.beat.step and self.state.in_force(peer)
        if went_on:
            self.rebuilds.note_step()
        if peer.beat is not None and beat.busy != peer.beat.busy:
            # The work that the member announced has ended, or other work with a time limit of its own begins.
            self.evictions.stragglers.came(peer.session.replica)
        peer.take(beat)
        self.state.note_named(peer)
        if beat.empty >= 0:
            self.outbox.record_empty_step(peer, beat)
        self.admission.note_return(peer, beat)
        self.state.note_step(peer, went_on)
        if beat.generation != self.bases.base_loaded_generation:
            self.bases.note_loaded(beat.generation)
        writing, record = self.writer.writing, self.state.record
        if writing is None or record is None or writing.generation == record.generation:
            # Rule 1: no answer during a write of a new generation, or a member might go on in the old one.
            ack, session = self.orders.heed(peer, m.HeartbeatAck(beat.number)), peer.session
            self.outbox.emit(io.SendMember(session.replica, session.incarnation, ack))
        self.evictions.evict_stragglers(peer, beat)

    def on_running(self, peer: Peer, message: m.Running) -> None:
        if self.state.note_running(peer, message):
            self.bases.note_loaded(message.fence.generation)

    def on_cannot_continue(self, peer: Peer, message: m.CannotContinue) -> None:
        record, name = self.state.record, peer.session.replica
        if record is None or not self.state.in_force(peer) or not self.state.is_recent(message.fence):
            return
        self.bases.note_cannot_load(message, record)
        marks = [Mark.USELESS, Mark.EXCUSED, *([Mark.SLOW] if self.state.is_blocking_join(name) else [])]
        self.evictions.schedule(name, f"it cannot go on: {message.why}", *marks)


# Kind of answer that every member of an epoch gives -> the members that have given this answer.
_ANSWERS: dict[type, Callable[[LeaderCore], Sized]] = {
    m.Report: lambda leader: leader.state.epoch.reports,
    m.Running: lambda leader: leader.state.epoch.running,
}

_HANDLERS: dict[type, Callable[[LeaderCore, Any], None]] = {
    io.Elected: LeaderCore.on_elected,
    io.SessionOpened: LeaderCore.on_opened,
    io.SessionClosed: LeaderCore.on_closed,
    io.FromMember: LeaderCore.on_member,
    io.TrainerStatusSeen: LeaderCore.on_status,
    io.StatusesUnchanged: LeaderCore.on_unchanged,
    io.TrainerStatusClosed: LeaderCore.on_status_closed,
    io.RecordWritten: LeaderCore.on_written,
    io.RecordRead: LeaderCore.on_read,
    io.WriteFailed: LeaderCore.on_write_failed,
    io.Operator: LeaderCore.on_operator,
    io.LaunchFailed: lambda core, event: core.evidence.note_launch(event.replica, event.host, event.why),
    io.HostReplaced: lambda core, event: core.joins.expect(event.replica),
    io.AcceptQueueFull: lambda core, event: core.state.liveness.note_overload(core.state.now + event.seconds),
    io.SharesAdvised: lambda core, event: core.adaptations.on_advised(event),
    io.LayoutAdvised: lambda core, event: core.relayouts.on_advised(event),
    io.LeaderTick: lambda core, event: None,  # the plan looks at what is due after every event
}

# Kind of message from a member -> the part of the core that takes this message.
_FROM_MEMBER: dict[type, Callable[[LeaderCore], Callable[[Peer, Any], None]]] = {
    m.Heartbeat: lambda leader: leader.on_beat,
    m.Running: lambda leader: leader.on_running,
    m.Aborted: lambda leader: leader.rebuilds.on_aborted,
    m.Report: lambda leader: leader.decisions.on_report,
    m.RequestRoster: lambda leader: leader.writer.on_request_roster,
    m.RequestState: lambda leader: leader.joins.on_request_state,
    m.SnapshotTaken: lambda leader: leader.joins.on_taken,
    m.Finished: lambda leader: leader.endings.on_finished,
    m.CannotContinue: lambda leader: leader.on_cannot_continue,
    m.LoopFailed: lambda leader: leader.endings.on_failed,
}
