"""The leader core: one job's membership, as the elected lighthouse decides it. Pure.

It holds the committed record, what sessions and pulses say, and at most one write in flight. After every
event ``_plan`` looks at all of it afresh and takes the first move that is due: start the job, evict the
dead, form again after an abort, decide a forced epoch, complete, drain, serve a newcomer, admit it.
Nothing is announced before the store has committed it (rule 1).
"""

import math
from collections.abc import Callable, Sized
from dataclasses import replace
from typing import Any

from fabric.model import Record
from fabric.protocol.leader import refusal
from fabric.protocol.leader.base import DEAF_S, EpochState, LeaderConfig
from fabric.protocol.leader.liveness import Peer
from fabric.protocol.leader.rebuilds import RingRebuilding
from fabric.protocol.leader.view import LeaderView
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.decide import Evict, Undecidable, decide
from fabric.protocol.rules.wait_graph import RingRebuilds

__all__ = ["LeaderConfig", "LeaderCore"]

# From so many replicas on, what they say often is looked at together, so many seconds after the first of it.
MANY = 256
TOGETHER_S = 0.05
# What tells nothing new of a member may wait for longer.
ROUTINE_S = 0.25
# Seconds between two events of steps that had no data.
EMPTY_S = 1.0
_FREQUENT = (
    io.FromMember,
    io.TrainerStatusSeen,
    io.SessionOpened,
    io.SessionClosed,
    io.TrainerStatusClosed,
    io.AcceptQueueFull,
)


class LeaderCore(RingRebuilding):
    """See the module. ``entropy`` makes nonces; nothing else here is random."""

    # --- the contract ----------------------------------------------------------------------------------

    def handle(self, event: io.Event, now: float) -> list[io.Effect]:
        """Take one event at time ``now`` (monotonic seconds); return the effects to perform in order."""
        if now - self._now > DEAF_S:
            # I was stopped myself: that I heard nothing meanwhile says nothing of the others.
            self.liveness.elected = now
        if isinstance(event, io.LeaderTick):
            self.liveness.tick_was_late(max(0.0, now - self._due), now)
        self._now = now
        self._effects = []
        _HANDLERS[type(event)](self, event)
        if self.leading and self.writing is None and not self.reading:
            self._plan_when_due(event)
        elif isinstance(event, io.LeaderTick):
            # The store's answer brings the next plan.
            self._plan_at, self._deadline = math.inf, self._now + TOGETHER_S
        return self._effects

    def _plan_when_due(self, event: io.Event) -> None:
        """A plan looks at every replica. Where they are thousands it is made for many events together, by the
        timer alone: then how late that is tells how late everything is that I hear."""
        if self._is_large and isinstance(event, _FREQUENT):
            patience_s = ROUTINE_S if self._is_routine(event) else TOGETHER_S
            self._plan_at = min(self._plan_at, self._now + patience_s)
            return
        self._plan_at = math.inf
        self._plan()
        self._deadline = self._next_deadline()

    @property
    def view(self) -> LeaderView:
        """What a shell may read of this core."""
        return LeaderView(self)

    @property
    def _is_large(self) -> bool:
        """By those who are here, and by those who were members when another led and come back now."""
        return len(self.liveness.peers) >= MANY or (
            self.record is not None and len(self.record.roster) >= MANY
        )

    def _is_routine(self, event: io.Event) -> bool:
        """Whether this says no more than that somebody lives and where it is, that one more has come, or one
        of those who all must answer has."""
        if isinstance(event, io.TrainerStatusSeen):
            return event.pulse.trainer == "running"
        if isinstance(event, io.FromMember):
            kind, record = type(event.message), self.record
            if kind is m.Heartbeat:
                return record is None or self._lists(event.replica)
            answers = _ANSWERS.get(kind)
            return answers is not None and record is not None and len(answers(self)) < len(record.roster)
        return isinstance(event, io.SessionOpened | io.AcceptQueueFull)

    def next_deadline(self) -> float | None:
        """When to call again with Tick at the latest."""
        if self.leading and self._deadline is not None and self._is_large:
            # However many events come meanwhile: what each of them would postpone would never be.
            due: float | None = min(self._deadline, self._plan_at)
        else:
            due = self._next_deadline()
        self._due = math.inf if due is None else due
        return due

    def _next_deadline(self) -> float | None:
        if not self.leading or (self.record is not None and self.record.complete):
            return None
        if self.record is not None and self.record.failed and not self.restart_after_failure:
            return None
        if self.record is None:
            return self._now + 0.5
        epoch, dues = self.epoch, [self.liveness.next_check(self.record.roster, self._now)]
        dues.append(self._now + DEAF_S / 2)
        if epoch.pending_evictions:
            dues.append(epoch.evictions_since + self.config.coalesce_s)
        if epoch.aborted:
            dues.append(self.rebuild_due)
        least_s = TOGETHER_S if self._is_large else 0.001
        return max(min(d for d in dues if d is not None), self._now + least_s)

    def _plan(self) -> None:
        record = self.record
        if record is None:
            self._start(None)
            return
        if record.complete or self._write_orders(record):
            return
        self._evict_slow_joiners(record)
        self._evict_unresponsive(record)
        if self._complete(record):
            return
        if self._fail(record):
            if self.restart_after_failure:
                self._start_again(record)
            return
        if self._evict(record) or self._rebuild_ring(record):
            return
        if record.is_forced and self.epoch.decision is None:
            self._decide(record)
        self._serve_blocking_joins(record)
        if self._is_settled(record):
            moved = self._rescale(record) or self._drain(record) or self._admit(record)
            if not moved:
                self._serve(record)
        self._notify_kept_out(record)

    def on_elected(self, event: io.Elected) -> None:
        """Full credit to everybody, and the record announced to whoever has a session."""
        self.leading = True
        self.store_id = event.store_id
        self.record = event.record
        self._unix = event.unix_s - self._now
        if event.record is not None:
            self._recall(event.record)
            self.data_slots = {x.replica: x.data_slot for x in event.record.roster}
        self.liveness.elected = self._now
        self.epoch = EpochState(self._now)
        if event.record is not None:
            self._announce(event.record, None)

    def on_tick(self, _: io.LeaderTick) -> None:
        pass

    def on_accept_queue_full(self, event: io.AcceptQueueFull) -> None:
        self.liveness.note_overload(self._now + event.seconds)

    # --- sessions and pulses ---------------------------------------------------------------------------

    def on_opened(self, event: io.SessionOpened) -> None:
        session = event.session
        if event.policy is not None:
            self.config = replace(self.config, policy=event.policy)
        refusal = self._refusal(session)
        if refusal is not None:
            self._emit(io.SendMember(session.replica, session.incarnation, refusal))
            self._record_event("session refused", session.replica, refusal.reason)
            return
        known = self.liveness.peers.get(session.replica)
        if (known is None or not known.connected) and self._lists(session.replica):
            self.liveness.came_back(self._now, first=known is None, one_of_many=self._is_large)
        self._take_session(session, known)
        self._note_step(self.liveness.peers[session.replica])
        if known is None or known.incarnation != session.incarnation:
            self.finished.pop(session.replica, None)
            self.draining.pop(session.replica, None)
            self.waiting_outside.pop(session.replica, None)
            self.serving.pop(session.replica, None)
            self._record_event("session opened", session.replica, f"incarnation {session.incarnation}")
        self.note_ended(session.replica, session.ended)
        if session.finished and self.record is not None and session.generation == self.record.generation:
            self.finished[session.replica] = session.step
        if self.record is not None and self.announcement is not None:
            self._send(session.replica, self.announcement.told_to(session))
            self._serve_again(session.replica)
            if self.record.complete:
                self._send(session.replica, m.Complete(self.record.fence, self.record.base.step))

    def _take_session(self, session: m.OpenSession, known: Peer | None) -> None:
        """What is known of the process that the record names outlives its replacement by another one."""
        member = self.record.member(session.replica) if self.record is not None else None
        if member is not None:
            self.liveness.note_end(member)  # perhaps by the word of the session that is replaced now
        records = [x for x in (self.record, self.writing) if x is not None]
        is_named = known is not None and any(x.lists(session.replica, known.incarnation) for x in records)
        self.liveness.opened(session, self._now, is_named)
        self.autonomy_s = max(self.autonomy_s, session.autonomy_s)

    def _refusal(self, session: m.OpenSession) -> m.Rejected | None:
        """Why this session cannot be: in a sentence that says what to do."""
        live, record = self.liveness, self.record
        replaced = refusal.replaced(session, live)
        if replaced:
            return m.Rejected(replaced)
        failed = self._refused_as_failed(session)
        if failed is not None:
            return failed
        why = refusal.taken(session, live, record, self._now) or refusal.unlike(session, live)
        return m.Rejected(why) if why else None

    def on_closed(self, event: io.SessionClosed) -> None:
        peer = self.liveness.peers.get(event.replica)
        if peer is not None and peer.incarnation == event.incarnation and peer.connected:
            peer.connected = False
            peer.closed = self._now

    def on_pulse(self, event: io.TrainerStatusSeen) -> None:
        pulse, member = event.pulse, self.record.member(event.pulse.replica) if self.record else None
        known = self.liveness.hear(pulse, member, self._now)
        if member is not None and pulse.trainer == "gone":
            self.liveness.note_end(member)
        listed = member is not None and member.incarnation == pulse.incarnation
        counts = listed or self.liveness.pulses_of(pulse.rank)[pulse.replica].says(pulse)
        if counts and (known is None or not known.says(pulse)) and pulse.trainer in ("gone", "stopped"):
            incident_id = self._pending() if listed and not (self.record and self.record.complete) else ""
            self._record_event(
                "trainer " + pulse.trainer, pulse.replica, "seen by its checkpoint server", incident_id
            )
        self.note_ended(pulse.replica, pulse.ended)
        self._record_durable(pulse, known)

    def on_pulse_closed(self, event: io.TrainerStatusClosed) -> None:
        member = self.record.member(event.replica) if self.record is not None else None
        pulse = self.liveness.pulse_closed(event.replica, event.ckpt, event.rank, member, self._now)
        if pulse is None:
            return
        belongs = event.replica in self.liveness.peers or self._lists(event.replica)
        if not (belongs or pulse.deaths or pulse.durable):
            del self.liveness.pulses_of(event.rank)[
                event.replica
            ]  # it was never let in, and leaves nothing to know

    def on_member(self, event: io.FromMember) -> None:
        peer = self.liveness.peers.get(event.replica)
        if peer is None or peer.incarnation != event.incarnation or not peer.connected:
            return
        peer.seen = self._now
        handler = _FROM_MEMBER.get(type(event.message))
        if handler is not None:
            handler(self, peer, event.message)

    # --- messages --------------------------------------------------------------------------------------

    def on_beat(self, peer: Peer, beat: m.Heartbeat) -> None:
        went_on = peer.beat is not None and beat.step > peer.beat.step
        if went_on and self._in_force(peer):
            self.stepped = self._now
        if went_on and self.ring_rebuilds.tries and self._in_force(peer):
            self.ring_rebuilds = RingRebuilds()
        if peer.beat is not None and beat.busy != peer.beat.busy:
            # What it announced is over, or something else begins: its time counts from now.
            self.stragglers.came(peer.session.replica)
        peer.beat = beat
        self._record_empty_step(peer, beat)
        self._note_return(peer, beat)
        if beat.times is not None:
            peer.times = beat.times
        self._note_step(peer)
        self._note_loaded(beat.generation)
        if self.writing is None or self.record is None or self.writing.generation == self.record.generation:
            # Else whoever is answered might go on in a generation that is over when the store has that.
            self._send(peer.session.replica, m.HeartbeatAck(beat.number))
        self._evict_stragglers(peer, beat)

    def _record_empty_step(self, peer: Peer, beat: m.Heartbeat) -> None:
        """Once per step, by the first member that says so. Of many in a second the newest is told."""
        newest = (beat.generation, beat.empty)
        if not 0 <= beat.empty <= beat.step or newest <= self.empty or self._now < self.empty_due:
            return
        if self._in_force(peer) and self._is_of_generation(peer):
            self.empty, self.empty_due = newest, self._now + EMPTY_S
            why = f"step {beat.empty} was committed with total weight 0: nobody had data for it"
            self._record_event("empty step", "", why)

    def _evict_stragglers(self, peer: Peer, beat: m.Heartbeat) -> None:
        """User code is no failure, but the others do not wait for ever: see ``user_code_s`` and ``busy``."""
        name = peer.session.replica
        if beat.step > self.stragglers.since.get(name, (beat.step, 0.0))[0]:
            self.stragglers.came(name)
        if (
            not beat.waiting_for
            or not self._in_force(peer)
            or beat.epoch != (self.record.epoch if self.record else 0)
        ):
            return
        for other in beat.waiting_for:
            late = self.liveness.peers.get(other)
            if (
                late is None
                or not self._lists(other)
                or self._is_blocking_join(other)
                or other in self.finished
            ):
                continue
            waited_s = self.stragglers.waited_s(other, beat.step, self._now)
            if waited_s >= self.patience_s(late) and self._is_spared_by(other):
                busy = late.beat.busy if late.beat is not None else ""
                doing = f"busy with {busy}" if busy else "in user code"
                self.evicted_in_user_code[late.session.replica, late.incarnation] = late.step
                self._schedule_eviction(other, f"it was {doing} while the others waited for {waited_s:.0f} s")

    def on_running(self, peer: Peer, message: m.Running) -> None:
        if self._is_mine(message.fence):
            self.epoch.running.setdefault(peer.session.replica, message.step)
            self._note_loaded(message.fence.generation)

    def on_report(self, peer: Peer, message: m.Report) -> None:
        if not self._is_mine(message.fence) or not self._in_force(peer):
            return
        self.epoch.reports.setdefault(peer.session.replica, message)
        self._note_loaded(message.state_generation)
        if self.epoch.decision is not None:
            self._send(peer.session.replica, self._row(peer.session.replica))

    # --- failures and decisions ------------------------------------------------------------------------

    def _evict(self, record: Record) -> bool:
        """Rule 2, and the wait for a cold start when nobody who knows the job's state is left."""
        for member in self.liveness.suspects(record.roster, self._now):
            if member.replica not in self.epoch.pending_evictions:
                verdict = self.liveness.failure_reason(member, self._now)
                if verdict:
                    self._schedule_eviction(member.replica, verdict)
        condemned = self.epoch.pending_evictions
        if not any(self._knows(x) for x in record.roster if x.replica not in condemned):
            self._cancel_evictions(record)
        if not condemned:
            return False
        left = tuple(x for x in record.roster if x.replica not in condemned)
        if not any(self._knows(x) for x in left):
            return self._start_again(record)
        if self._now - self.epoch.evictions_since < self.config.coalesce_s:
            return True
        why = "; ".join(f"{name} evicted: {reason}" for name, reason in sorted(condemned.items()))
        self._note_failures(record)
        self._write_epoch(record, left, forced=True, why=why)
        return True

    def _cancel_evictions(self, record: Record) -> None:
        """Nobody could take over: whoever is heard, and was not found wrong or fallen, goes on."""
        for member in record.roster:
            if (
                member.replica not in self.epoch.pending_evictions
                or member.replica in self.epoch.cannot_continue
            ):
                continue
            if not self.liveness.failure_reason(member, self._now):
                del self.epoch.pending_evictions[member.replica]
                self._record_event("heard again", member.replica, "it goes on, for nobody could take over")

    def _evict_unresponsive(self, record: Record) -> None:
        """Who lives and does not answer a forced epoch has as long as its user code, which may hold the
        interpreter's lock and so keep its control thread from answering; then the others go on."""
        reports, condemned = self.epoch.reports, self.epoch.pending_evictions
        if not record.is_forced or self.epoch.decision is not None:
            return
        answered = (x for x in record.roster if x.replica in reports and x.replica not in condemned)
        if not any(self._knows(x) for x in answered):
            return
        # Since this leader could hear it: not while it was itself stopped, or another led.
        waited_s = self._now - max(self.epoch.since, self.liveness.elected)
        for member in record.roster:
            peer = self.liveness.peers.get(member.replica)
            if member.replica in reports or peer is None or waited_s < self.patience_s(peer):
                continue
            self._schedule_eviction(
                member.replica, f"it lives, but did not answer epoch {record.epoch} for {waited_s:.0f} s"
            )

    def _decide(self, record: Record) -> None:
        """Rule 5."""
        reports = self.epoch.reports
        if any(x.replica not in reports for x in record.roster):
            return
        decision = decide(record, reports, self._micro_batches())
        if isinstance(decision, Evict):
            if decision.state:
                self._mistrust(decision.replicas, decision.reason)
            for name in decision.replicas:
                self.epoch.cannot_continue.add(name)
                self._schedule_eviction(name, decision.reason)
            self._evict(record)
        elif isinstance(decision, Undecidable):
            self._stop_job(record, decision.reason)
        else:
            self.epoch.decision, self.epoch.decided_at = decision, self._now
            self.epoch.rows = {
                a.replica: replace(decision, table=(a,)) for a in decision.table if a.drop or a.micro_batches
            }
            self.epoch.no_row = replace(decision, table=())
            self._record_event("resume", "", f"step {decision.step}: {decision.reason}", record.incident_id)
            for member in record.roster:
                self._send(member.replica, self._row(member.replica))

    def _row(self, replica: str) -> m.Resume:
        """The decision as this member is told it: most have nothing to add, and are told the same object."""
        assert self.epoch.no_row is not None
        return self.epoch.rows.get(replica, self.epoch.no_row)

    def _stop_job(self, record: Record, reason: str) -> None:
        """A person is needed: said once to everybody."""
        if self.epoch.stopped:
            return
        self.epoch.stopped = reason
        self._record_event("stopped", "", reason, record.incident_id)
        for member in record.roster:
            self._send(member.replica, m.Rejected(reason))

    def _is_settled(self, record: Record) -> bool:
        """Rule 4: every member runs in the current epoch, and nothing is outstanding."""
        if self.epoch.aborted or (record.is_forced and self.epoch.decision is None):
            return False
        return not record.missing(self.epoch.running.keys()) or self._is_parked(record)


# What every member says in an epoch, and those who have.
_ANSWERS: dict[type, Callable[[LeaderCore], Sized]] = {
    m.Report: lambda leader: leader.epoch.reports,
    m.Running: lambda leader: leader.epoch.running,
}

_HANDLERS: dict[type, Callable[[LeaderCore, Any], None]] = {
    io.Elected: LeaderCore.on_elected,
    io.SessionOpened: LeaderCore.on_opened,
    io.SessionClosed: LeaderCore.on_closed,
    io.FromMember: LeaderCore.on_member,
    io.TrainerStatusSeen: LeaderCore.on_pulse,
    io.TrainerStatusClosed: LeaderCore.on_pulse_closed,
    io.RecordWritten: LeaderCore.on_written,
    io.RecordRead: LeaderCore.on_read,
    io.WriteFailed: LeaderCore.on_write_failed,
    io.Operator: LeaderCore.on_operator,
    io.AcceptQueueFull: LeaderCore.on_accept_queue_full,
    io.LeaderTick: LeaderCore.on_tick,
}

_FROM_MEMBER: dict[type, Callable[[LeaderCore, Peer, Any], None]] = {
    m.Heartbeat: LeaderCore.on_beat,
    m.Running: LeaderCore.on_running,
    m.Aborted: LeaderCore.on_aborted,
    m.Report: LeaderCore.on_report,
    m.RequestRoster: LeaderCore.on_need_roster,
    m.RequestState: LeaderCore.on_need_state,
    m.SnapshotTaken: LeaderCore.on_taken,
    m.SnapshotMissed: LeaderCore.on_missed,
    m.Finished: LeaderCore.on_finished,
    m.CannotContinue: LeaderCore.on_cannot_continue,
    m.LoopFailed: LeaderCore.on_failed,
}
