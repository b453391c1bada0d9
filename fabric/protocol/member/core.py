"""The member core: one replica's part in epochs, rounds, recovery and joining. Pure.

``handle(event, now)`` returns the effects to perform, ``next_deadline()`` when to call again with Tick.
The rules are those of docs/protocol.md, numbered alike. Three things move independently and meet here:
the main thread (user code, then waiting), the round (exchange and commit barrier), and the epochs that the
leader announces. After every event ``_advance`` starts whatever has become possible.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fabric.errors import IllegalTransition
from fabric.model import Fence, Record, SnapshotRef
from fabric.protocol.member.ending import Ending
from fabric.protocol.member.state import (
    Mode,
)
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages import roster_delta

# A newcomer asks itself so often whether it reaches the members: when all was well, and when it was not.
PROBE_S = 5.0
PROBE_AGAIN_S = 0.5
# In larger rosters only those are probed that could not be reached before.
MAX_PROBED = 64


class MemberCore(Ending):
    """See the module. ``snapshots`` are those that my checkpoint server still holds from before."""

    # --- the contract ----------------------------------------------------------------------------------

    def handle(self, event: io.Event, now: float) -> list[io.Effect]:
        """Take one event at time ``now`` (monotonic seconds); return the effects to perform in order."""
        self._now = now
        self._effects = []
        if not self.stopped:
            _HANDLERS[type(event)](self, event)
            self._advance()
            self._probe_when_due()
            self._beat_when_due()
        return self._effects

    def next_deadline(self) -> float | None:
        """When to call again with Tick at the latest."""
        next_beat = self.contact.next_beat if self.contact.connected else None
        next_probe = self.links.next_probe if self._may_probe() else None
        dues = [self.stall_deadline(), self.end_deadline(), next_beat, next_probe]
        return None if self.stopped else min((d for d in dues if d is not None), default=None)

    def _advance(self) -> None:
        """Start what the last event made possible; at most one thing for the main thread."""
        if self.waiting:
            self._advance_main()
        self._fetch_when_behind()
        self._contribute_when_computed()
        self._exchange_when_linked()
        self._hold_when_reduced()
        self._commit_when_agreed()
        self._abort_when_stalled()
        self._end_when_due()

    def _advance_main(self) -> None:
        if self.kept_gradient.stale:
            self._drop_kept()
        self._snapshot_when_due()
        if self._is_behind():
            self._catch_up_main()
        elif self.mode is Mode.CATCH_UP:
            assert self.resume is not None
            if self._is_at(self.resume.fence, self.resume.step):
                self._enter_mode(Mode.RUN)
        if self.waiting and self.mode is Mode.RUN and self.round is None:
            self._enter_round()

    def on_tick(self, _: io.Tick) -> None:
        pass

    # --- links -----------------------------------------------------------------------------------------

    def on_linked(self, event: io.Linked) -> None:
        self.links.up.add(event.epoch)
        self.links.flaps = False
        for record in (self.current, self.newest):
            if record is not None and record.epoch == event.epoch:
                self.links.silent.difference_update(record.names)

    def on_link_failed(self, event: io.LinkFailed) -> None:
        self.links.silent.update(event.unreachable)
        if self._runs(event.epoch):
            self._abort(event.why, event.about)
        elif self.newest is not None and event.epoch == self.newest.epoch:
            self._complain(event.why, event.about)

    def _complain(self, why: str, about: str) -> None:
        """The newest epoch cannot be linked."""
        assert self.newest is not None
        fence, step = self.newest.fence, self.state.step
        self._send_aborted(m.Aborted(fence, step, why, about, unreachable=self._unreachable()))

    def on_link_lost(self, event: io.LinkLost) -> None:
        if self._has_said_all(event.replica, event.incarnation):
            return  # it leaves, and no round needs it any more; a death is the leader's to tell
        if event.silent:
            self.links.silent.add(event.replica)
        for record in (self.current, self.newest):
            if record is not None and record.lists(event.replica, event.incarnation):
                self.links.up.discard(record.epoch)
                self.end.told.discard(record.epoch)
        running = self.mode in (Mode.RUN, Mode.CATCH_UP)
        if running and self.current is not None and self.current.lists(event.replica, event.incarnation):
            if not self.contact.finished:  # else I am in no round
                self._abort(f"the link to {event.replica} ended: {event.why}", event.replica)
            return
        newest = self.newest if self.mode is not Mode.OUTSIDE else None
        if newest is None or not newest.lists(event.replica, event.incarnation):
            return
        if event.silent:
            # Nothing is gained by another try first: the leader weighs all complaints of a cut together.
            self._complain(f"the link to {event.replica} ended: {event.why}", event.replica)
        self._emit(io.LinkUp(newest))

    def _may_probe(self) -> bool:
        links, newest = self.links, self.newest
        there = newest is not None and (len(newest.roster) <= MAX_PROBED or bool(links.silent))
        return self.mode is Mode.OUTSIDE and there and self.contact.connected and not links.probing

    def _probe_when_due(self) -> None:
        """From outside: whoever cannot reach a member would be left out again. Of thousands only those are
        probed that could not be reached before."""
        links, newest = self.links, self.newest
        if newest is None or self._now < links.next_probe or not self._may_probe():
            return
        links.probing = True
        links.silent.intersection_update(newest.names)
        many = len(newest.roster) > MAX_PROBED
        self._emit(io.Probe(tuple(x for x in newest.roster if not many or x.replica in links.silent)))

    def on_probed(self, event: io.Probed) -> None:
        links = self.links
        links.probing = False
        # A link that was cut may flap: it is looked at often until all links of an epoch have stood.
        links.flaps = links.flaps or bool(links.silent or event.unreachable)
        links.next_probe = self._now + (PROBE_AGAIN_S if links.flaps else PROBE_S)
        if self.mode is not Mode.OUTSIDE:
            return
        if links.silent != set(event.unreachable):
            links.silent = set(event.unreachable)
            self.contact.next_beat = self._now

    # --- the session with the leader -------------------------------------------------------------------

    def on_connected(self, _: io.LeaderConnected) -> None:
        """Every session begins with who I am; what else the leader must know is said again."""
        self.contact.connected = True
        self.contact.changes = False
        self.contact.next_beat = self._now
        me, state = self.identity, self.state
        self._emit(
            io.SendLeader(
                m.OpenSession(
                    replica=me.replica,
                    incarnation=me.incarnation,
                    generation=state.generation,
                    step=state.step,
                    digest=state.digest,
                    epoch=self.newest.epoch if self.newest is not None else 0,
                    link=me.link,
                    ckpt=me.ckpt,
                    micro_batches=me.micro_batches,
                    layout=me.layout,
                    tensors=me.tensors,
                    plane=me.plane,
                    durable=me.durable,
                    ended=me.ended,
                    data=me.data,
                    shares=me.shares,
                    snapshots=self.snapshots,
                    predecessors=me.predecessors,
                    predecessors_gone=bool(me.predecessors),
                    finished=self.contact.finished,
                    sharing=me.sharing,
                    data_slot=me.data_slot,
                    rack=me.rack,
                    ranks=me.ranks,
                    spare=me.spare,
                    secret=me.secret,
                    replay=self.config.replay,
                    exchange_s=self.config.exchange_s,
                    user_code_s=self.config.user_code_s,
                    autonomy_s=self.config.autonomy_s,
                    roster=self.newest.roster_digest if self.newest is not None else "none",
                )
            )
        )
        if self.contact.failed is not None:
            self._emit(io.SendLeader(self.contact.failed))
        if self.contact.unsaid:
            # The leader may have answered it already, and does not know that I had been in that round.
            self.contact.unsaid = False
            self._repeat_aborted()
        if self.fetch.doing == "asked":
            self.fetch.doing = ""

    def on_lost(self, _: io.LeaderLost) -> None:
        self.contact.connected = False

    def on_leader(self, event: io.FromLeader) -> None:
        _FROM_LEADER[type(event.message)](self, event.message)

    def on_rejected(self, message: m.Rejected) -> None:
        if message.retry:
            self._emit(io.WriteJournal("kept out", self._epoch(), self.state.step, message.reason))
        else:
            self._stop(1, message.reason, message.poison)

    def on_beat_reply(self, message: m.HeartbeatAck) -> None:
        sent = self.contact.sent.pop(message.number, None)
        if sent is not None:
            self.contact.last = max(self.contact.last, sent)
            self.contact.sent = {n: t for n, t in self.contact.sent.items() if n > message.number}
            unheeded, self.contact.unheeded = self.contact.unheeded, None
            if unheeded is not None:
                self.on_resume(unheeded)

    # --- epochs ----------------------------------------------------------------------------------------

    def on_epoch(self, message: m.Epoch) -> None:
        self.contact.changes = self.contact.changes or message.changes
        self._hear_of(message.record)

    def on_change(self, message: m.RosterDelta) -> None:
        """The same for who holds the roster before it; else it is asked for, unless it is of the past."""
        self.contact.changes = True
        record = roster_delta.applied(message, self.newest)
        if record is not None:
            self._hear_of(record)
        elif self.newest is None or not self._is_past(message.record.fence):
            self._emit(
                io.WriteJournal("roster", message.record.epoch, self.state.step, "it is asked for whole")
            )
            self._emit(io.SendLeader(m.RequestRoster(message.record.fence)))

    def _hear_of(self, record: Record) -> None:
        if not self._is_news(record):
            return
        if self.newest is not None and record.generation != self.newest.generation:
            self._want(None)  # what is on its way is a state of a generation that is over
        self.newest = record
        if self._is_leaving(record):
            self._emit(io.LinkUp(record))
            return
        if not record.lists(self.identity.replica, self.identity.incarnation):
            if self.mode is not Mode.OUTSIDE:
                self._leave(f"epoch {record.epoch} goes on without me: {record.reason}")
            # Only who is known to know the epoch is admitted to the next.
            self.contact.next_beat = self._now
            return
        if self.mode is Mode.OUTSIDE:
            self._join(record)
        if self.mode in (Mode.RUN, Mode.CATCH_UP):
            if not self._is_broken_by(record):
                self._emit(io.LinkUp(record))
                return
            self._abort(f"epoch {record.epoch}: {record.reason}", "")
            if record.is_forced:
                self._report(record)
        elif record.is_forced:
            self._report(record)
        elif self.mode is Mode.JOINED:
            self._emit(io.LinkUp(record))
            self._first_data()
        else:
            self._repeat_aborted()

    def _is_past(self, fence: Fence) -> bool:
        """Whether this store has said something newer. What another store says is never of the past."""
        newest = self.newest
        return newest is not None and fence.store_id == newest.store_id and fence < newest.fence

    def _is_news(self, record: Record) -> bool:
        newest = self.newest
        if newest is None:
            return True
        if record.store_id != newest.store_id:
            return self._begin_anew(record)
        if record.fence == newest.fence:
            self._repeat_answer()
        return record.fence > newest.fence

    def _begin_anew(self, record: Record) -> bool:
        """The store was wiped or replaced. Its record is another life of the job: nothing that was agreed in
        the last one counts, and my state only where the new life begins from it. Returns whether I go on."""
        assert self.newest is not None
        if self.mode is not Mode.OUTSIDE:
            self._leave("the control store was wiped or replaced: the job begins again")
        if self.stopped:
            return False
        if record.epoch <= self.newest.epoch:
            # Links and exchanges are named by epochs, which must only grow in the life of a process.
            self._stop(
                75,
                f"the control store was replaced by one whose job is at epoch {record.epoch}, and this "
                f"process was at epoch {self.newest.epoch} of the last one: it starts again",
            )
            return False
        self.newest = self.current = self.report = None
        self.last_round, self.disputed = (0, 0, ()), (0, 0)
        self.contact.aborted, self.contact.unsaid = None, False
        self.state.generation = 0
        self._want(None)
        return True

    def _join(self, record: Record) -> None:
        self._enter_mode(Mode.JOINED)
        self.end.took_part = -1
        if self.fetch.doing == "asked":
            self.fetch.doing = ""
        if self._is_awaited(record):
            # The others wait for me with a state of theirs: what I hold counts for nothing.
            self.state.generation = 0
            self._want(None)
        elif not record.is_forced and self.state.generation != record.generation:
            # Admitted for a state that I have lost since.
            self._cannot_catch_up("I hold no state of this generation any more")

    def _is_leaving(self, record: Record) -> bool:
        """A drained member stays in its round until everybody is ready for the epoch without it."""
        if record.is_forced or self.current is None or self.mode is not Mode.RUN:
            return False
        me = self.current.member(self.identity.replica)
        listed = record.lists(self.identity.replica, self.identity.incarnation)
        return me is not None and me.leaving and not listed and not self._is_broken_by(record)

    def _is_broken_by(self, record: Record) -> bool:
        """Rule 6: I missed a forced epoch, or somebody of my roster who was not leaving is gone."""
        current = self.current
        assert current is not None
        gone = [x for x in current.roster if not x.leaving and not record.lists(x.replica, x.incarnation)]
        return current.epoch < record.forced or bool(gone)

    def _repeat_answer(self) -> None:
        """Rule 6, same epoch announced again (a new leader asks): say again what was answered."""
        assert self.newest is not None
        if self.contact.fallen is not None:
            self._emit(io.SendLeader(self.contact.fallen))
        if self.mode is not Mode.OUTSIDE and self.newest.epoch not in self.links.up:
            self._emit(io.LinkUp(self.newest))
        if self.report is not None and self.report.fence == self.newest.fence:
            self._send_report(self.report, self.newest)
        if self.mode is Mode.ABORTED:
            self._repeat_aborted()
        elif self.mode is Mode.RUN and self.current is not None and self.last_round[0] == self.current.epoch:
            self._emit(io.SendLeader(m.Running(self.current.fence, self.last_round[1])))

    def _repeat_aborted(self) -> None:
        if self.contact.aborted is not None:
            self._emit(io.SendLeader(self.contact.aborted))

    def _report(self, record: Record) -> None:
        """Rule 7: built once per forced epoch, a promise to take no part in older ones."""
        if self.mode is not Mode.REPORTED or self.report is None or self.report.fence != record.fence:
            self._enter_mode(Mode.REPORTED)
        prepared = self.prepared
        epoch, step, roster = self.last_round
        entry = record.member(self.identity.replica)
        self.report = m.Report(
            fence=record.fence,
            state_generation=self.state.generation,
            step=self.state.step,
            digest=self.state.digest,
            round_epoch=epoch,
            round_step=step,
            round_roster=roster,
            prepared=prepared is not None and (prepared.epoch, prepared.step) == (epoch, step),
            gradient_digest=prepared.gradient_digest if prepared is not None else "",
            disputed=self.disputed == (epoch, step),
            outvoted=self.state.outvoted,
            parted=self.state.parted,
            unconfirmed=entry is not None and self.agreed < entry.since,
            # What the main thread is computing is promised: it is finished before I contribute again.
            have=() if self.kept_gradient.stale else tuple(sorted(self.kept_gradient.have)),
            committed_digest=self.state.committed_digest,
        )
        self._send_report(self.report, record)
        self._emit(io.LinkUp(record))

    def _send_report(self, report: m.Report, record: Record) -> None:
        """In short where the leader understands that: whom of this epoch the round lacked."""
        if self.contact.changes:
            there = frozenset(report.round_roster)
            lacked = tuple(n for n in record.names if n not in there) if report.round_epoch else ()
            report = replace(report, round_roster=(), round_lacked=lacked)
        self._emit(io.SendLeader(report))

    def on_resume(self, message: m.Resume) -> None:
        """Rule 8."""
        record = self.newest
        if self.mode is not Mode.REPORTED or record is None or message.fence != record.fence:
            return
        assert record.is_forced
        if self._now - self.contact.last > self.config.autonomy_s:
            # It may be of long ago, and a new generation have begun since: an answered beat tells.
            self.contact.unheeded = message
            self.contact.next_beat = self._now
            return
        self.resume = message
        self._go_to(record)
        self._emit(io.WriteJournal("resume", record.epoch, message.step, message.reason))
        outdated = self.state.generation != record.generation and not self._is_awaited(record)
        if record.cold == record.epoch or outdated:
            # The second: the cold start's own decision never reached me, or my fetch of its base failed.
            self._start_generation(record)
        prepared = self.prepared
        if prepared is not None and self._may_commit(prepared, message):
            self._commit(prepared)
        self.prepared = None
        if any(a.replica == self.identity.replica and a.drop for a in message.table):
            self._drop_kept()
        if self.state.step > message.step and self.state.generation == record.generation:
            raise IllegalTransition(f"told to resume at {message.step} with the state at {self.state.step}")
        there = self._is_at(record, message.step)
        if not there and self._is_awaited(record):
            self.state.generation = 0
            self._want(None)
            self._emit(
                io.WriteJournal("blocking join", record.epoch, message.step, "the others wait for my state")
            )
        self._enter_mode(Mode.RUN if there else Mode.CATCH_UP)

    def _is_at(self, where: Record | Fence, step: int) -> bool:
        return (self.state.generation, self.state.step) == (where.generation, step)

    def _may_commit(self, prepared: io.PreparedRound, message: m.Resume) -> bool:
        assert self.newest is not None
        return (
            self.state.step == prepared.step == message.step - 1
            and prepared.epoch >= self.newest.cold
            and prepared.gradient_digest == message.commit_digest
        )

    def _start_generation(self, record: Record) -> None:
        """Rule 6 of the leader: keep my state if it is the base, else fetch that."""
        base = record.base
        self.prepared, self.contact.fallen = None, None
        self._drop_kept()
        if self.identity.storage_unread and not base.generation:
            # Nobody else has read it either, and it may hold what this job has come to.
            self._stop(75, "the job would begin from nothing, and durable storage has not been read here")
            return
        same = self.state.step == base.step and base.digest in ("", self.state.digest)
        if same and self.fetch.doing != "install":
            self.state.generation = record.generation
            self.state.committed_digest, self.state.outvoted = "", False
        else:
            self.state.generation = 0
            self._want(SnapshotRef(base.generation, base.step, base.digest), base.sources)


_HANDLERS: dict[type, Callable[[MemberCore, Any], None]] = {
    io.Ready: MemberCore.on_ready,
    io.Digested: MemberCore.on_digested,
    io.Streaming: MemberCore.on_streaming,
    io.Computed: MemberCore.on_computed,
    io.Installed: MemberCore.on_installed,
    io.InstallFailed: MemberCore.on_install_failed,
    io.Closing: MemberCore.on_closing,
    io.Busy: MemberCore.on_busy,
    io.LoopRaised: MemberCore.on_failed,
    io.Linked: MemberCore.on_linked,
    io.LinkFailed: MemberCore.on_link_failed,
    io.LinkLost: MemberCore.on_link_lost,
    io.Probed: MemberCore.on_probed,
    io.Exchanged: MemberCore.on_exchanged,
    io.ExchangeFailed: MemberCore.on_exchange_failed,
    io.FromPeer: MemberCore.on_peer,
    io.FromLeader: MemberCore.on_leader,
    io.LeaderConnected: MemberCore.on_connected,
    io.LeaderLost: MemberCore.on_lost,
    io.StateFetched: MemberCore.on_state_fetched,
    io.FetchFailed: MemberCore.on_fetch_failed,
    io.GradientFetched: MemberCore.on_gradient,
    io.GradientGone: MemberCore.on_gradient_gone,
    io.Snapshotted: MemberCore.on_snapshotted,
    io.Tick: MemberCore.on_tick,
}

_FROM_LEADER: dict[type, Callable[[MemberCore, Any], None]] = {
    m.Epoch: MemberCore.on_epoch,
    m.RosterDelta: MemberCore.on_change,
    m.Resume: MemberCore.on_resume,
    m.TakeSnapshotFor: MemberCore.on_serve,
    m.StopServing: MemberCore.on_serve_end,
    m.StateSources: MemberCore.on_sources,
    m.Complete: MemberCore.on_complete,
    m.Rejected: MemberCore.on_rejected,
    m.HeartbeatAck: MemberCore.on_beat_reply,
}
