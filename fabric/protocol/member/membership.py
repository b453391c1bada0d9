"""A member's answers to epochs: join, leave, report, resume. Rules 6 to 9 of docs/protocol.md."""

from msgspec import Struct
from msgspec.structs import replace

from fabric.errors import IllegalTransition
from fabric.exit_codes import RESTART
from fabric.model import Record, SnapshotRef
from fabric.protocol.member.catch_up import CatchUp
from fabric.protocol.member.rounds import Rounds
from fabric.protocol.member.serving import SnapshotServing
from fabric.protocol.member.session import LighthouseSession
from fabric.protocol.member.state import CoreContext, KnownEpochs, MemberMemory, Mode
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages import roster_delta


class Membership(Struct, eq=False):
    """Answers the epochs that the leader announces."""

    _context: CoreContext
    _memory: MemberMemory
    _epochs: KnownEpochs
    _session: LighthouseSession
    _serving: SnapshotServing
    _rounds: Rounds
    _catch_up: CatchUp

    def _leave(self, why: str) -> None:
        """Rule 6, not in the roster: drop the prepared round and the kept gradient, keep the state."""
        if self._rounds.round is not None and self._epochs.current is not None:
            self._context.emit(io.AbortExchange(self._epochs.current.epoch, why))
        me = self._epochs.current.member(self._context.replica) if self._epochs.current is not None else None
        if me is not None and me.leaving:
            self._context.leave(me)
            return
        self._epochs.enter_mode(Mode.OUTSIDE)
        self._session.has_answer()
        self._rounds.leave()
        self._serving.leave()
        self._memory.leave()
        self._catch_up.want(None)
        self._epochs.journal("outside", why)

    def first_data(self) -> None:
        """Rule 9: as a newcomer, learn the step under way from the first contribution of the epoch."""
        record = self._epochs.newest
        if self._epochs.mode is not Mode.JOINED or record is None or record.is_forced:
            return
        steps = [
            key[1]
            for key, events in self._epochs.links.early.items()
            if key[0] == record.epoch and any(self._epochs.by_veteran(record, e) for e in events)
        ]
        if not steps:
            return
        step = min(steps)
        if self._memory.state.step > step:
            self._leave(f"my step {self._memory.state.step} is ahead of the job's {step}")
            return
        self._rounds.go_to(record)
        self._epochs.enter_mode(Mode.RUN)
        self._rounds.open_round(step, ())

    def on_beat_reply(self, message: m.HeartbeatAck) -> None:
        self._session.ask_measure(message.measure, message.echo)
        self._serving.heed(message)
        unheeded = self._session.answered(message.number)
        if unheeded is not None:
            self.on_resume(unheeded)

    def on_change(self, message: m.RosterDelta) -> None:
        """Rule 6: apply a roster delta; ask for the whole epoch if I do not hold the roster before it."""
        newest, fence = self._epochs.newest, message.record.fence
        record = roster_delta.applied(message, newest)
        if record is not None:
            self.hear_of(record)
        elif newest is None or fence.store_id != newest.store_id or fence >= newest.fence:
            self._context.emit(
                io.WriteJournal("roster", message.record.epoch, self._memory.state.step, "I request it whole")
            )
            self._context.emit(io.SendLeader(m.RequestRoster(message.record.fence)))

    def hear_of(self, record: Record) -> None:
        if not self._is_news(record):
            return
        if self._epochs.newest is not None and record.generation != self._epochs.newest.generation:
            self._catch_up.want(None)  # the fetch under way is of a state whose generation is over
        self._epochs.learn(record)
        if self._is_leaving(record):
            self._context.emit(io.LinkUp(record))
            return
        if not record.lists(self._context.replica, self._context.identity.incarnation):
            if self._epochs.mode is not Mode.OUTSIDE:
                self._leave(f"epoch {record.epoch} goes on without me: {record.reason}")
            # Rule 4 of the leader: it admits only newcomers that know the newest epoch.
            self._session.hurry()
            return
        if self._epochs.mode is Mode.OUTSIDE:
            self._join(record)
        if self._epochs.mode in (Mode.RUN, Mode.CATCH_UP):
            if not self._is_broken_by(record):
                self._context.emit(io.LinkUp(record))
                return
            self._rounds.abort(f"epoch {record.epoch}: {record.reason}", "")
            if record.is_forced:
                self._report(record)
        elif record.is_forced:
            self._report(record)
        elif self._epochs.mode is Mode.JOINED:
            self._context.emit(io.LinkUp(record))
            self.first_data()
        else:
            self._session.repeat_aborted()

    def _is_news(self, record: Record) -> bool:
        newest = self._epochs.newest
        if newest is None:
            return True
        if record.store_id != newest.store_id:
            return self._begin_another_life(record)
        if record.fence == newest.fence:
            self._repeat_answer()
        return record.fence > newest.fence

    def _begin_another_life(self, record: Record) -> bool:
        """Rule 6, another store: forget the job of the former store; return whether I go on."""
        assert self._epochs.newest is not None
        if self._epochs.mode is not Mode.OUTSIDE:
            self._leave("the control store was wiped or replaced: the job begins again")
        if self._context.stopped:
            return False
        if record.epoch <= self._epochs.newest.epoch:
            # Epoch numbers name links and exchanges, so they must only grow in the life of a process.
            self._context.stop(
                RESTART,
                f"the control store was replaced by one whose job is at epoch {record.epoch}, and this "
                f"process was at epoch {self._epochs.newest.epoch} of the last one: it starts again",
            )
            return False
        self._epochs.forget()
        self._rounds.forget()
        self._session.forget()
        self._memory.distrust()
        self._catch_up.want(None)
        return True

    def _join(self, record: Record) -> None:
        self._epochs.enter_mode(Mode.JOINED)
        self._catch_up.forget_request()
        if self._epochs.is_awaited(record):
            # The other members wait with their own state, so this member's state does not count.
            self._memory.distrust()
            self._catch_up.want(None)
        elif not record.is_forced and self._memory.state.generation != record.generation:
            # The leader admitted this member for a state that the member has lost since.
            self._catch_up.cannot_catch_up("I hold no state of this generation any more")

    def _is_leaving(self, record: Record) -> bool:
        """Whether I am drained. I then stay in my round until all are ready for the epoch without me."""
        if record.is_forced or self._epochs.current is None or self._epochs.mode is not Mode.RUN:
            return False
        me = self._epochs.current.member(self._context.replica)
        listed = record.lists(self._context.replica, self._context.identity.incarnation)
        return me is not None and me.leaving and not listed and not self._is_broken_by(record)

    def _is_broken_by(self, record: Record) -> bool:
        """Rule 6: whether I missed a forced epoch, or a member of my roster that was not leaving is gone."""
        current = self._epochs.current
        assert current is not None
        gone = [x for x in current.roster if not x.leaving and not record.lists(x.replica, x.incarnation)]
        return current.epoch < record.forced or bool(gone)

    def _repeat_answer(self) -> None:
        """Rule 6, the same epoch again: repeat my answers, because a new leader asks."""
        epochs, mode, last_round = self._epochs, self._epochs.mode, self._rounds.last_round
        assert epochs.newest is not None
        if self._session.contact.fallen is not None:
            self._context.emit(io.SendLeader(self._session.contact.fallen))
        if mode is not Mode.OUTSIDE and epochs.newest.epoch not in epochs.links.up:
            self._context.emit(io.LinkUp(epochs.newest))
        if epochs.report is not None and epochs.report.fence == epochs.newest.fence:
            self._context.emit(io.SendLeader(epochs.report))
        if mode is Mode.ABORTED:
            self._session.repeat_aborted()
        elif mode is Mode.RUN and epochs.current is not None and last_round.epoch == epochs.current.epoch:
            self._context.emit(io.SendLeader(m.Running(epochs.current.fence, last_round.step)))

    def _report(self, record: Record) -> None:
        """Rule 7: build the report, a promise to take no part in older epochs."""
        before = self._epochs.report
        if self._epochs.mode is not Mode.REPORTED or before is None or before.fence != record.fence:
            self._epochs.enter_mode(Mode.REPORTED)
            if self._epochs.current is not None:
                self._serving.keep_for_lost(self._epochs.current, record)
        prepared = self._rounds.prepared
        last_round = self._rounds.last_round
        entry, there = record.member(self._context.replica), frozenset(last_round.roster)
        report = m.Report(
            fence=record.fence,
            state_generation=self._memory.state.generation,
            step=self._memory.state.step,
            digest=self._memory.state.digest,
            round_epoch=last_round.epoch,
            round_step=last_round.step,
            round_lacked=tuple(x for x in record.names if x not in there) if last_round.epoch else (),
            prepared=prepared is not None
            and (prepared.epoch, prepared.step) == (last_round.epoch, last_round.step),
            gradient_digest=prepared.gradient_digest if prepared is not None else "",
            disputed=self._rounds.disputed == (last_round.epoch, last_round.step),
            outvoted=self._memory.state.outvoted,
            parted=self._memory.state.parted,
            unconfirmed=entry is not None and self._memory.agreed < entry.since,
            # Micro-batches under way are listed too: the main thread finishes them before I contribute again.
            have=() if self._memory.kept_gradient.stale else tuple(sorted(self._memory.kept_gradient.have)),
            committed_digest=self._memory.state.committed_digest,
            plan=replace(self._memory.plan, described=""),
        )
        self._epochs.promise(report)
        self._context.emit(io.SendLeader(report))
        self._context.emit(io.LinkUp(record))

    def on_resume(self, message: m.Resume) -> None:
        """Rule 8: follow the leader's decision for a forced epoch."""
        record = self._epochs.newest
        if self._epochs.mode is not Mode.REPORTED or record is None or message.fence != record.fence:
            return
        assert record.is_forced
        if self._context.now - self._session.contact.last > self._context.config.autonomy_s:
            self._session.postpone(message)
            return
        self._epochs.follow(message)
        self._rounds.go_to(record)
        self._context.emit(io.WriteJournal("resume", record.epoch, message.step, message.reason))
        outdated = self._memory.state.generation != record.generation and not self._epochs.is_awaited(record)
        if record.cold == record.epoch or outdated:
            # My state is outdated: no decision about the cold start came, or my fetch of its base failed.
            self._start_generation(record)
        self._rounds.resume(message, record)
        if any(a.replica == self._context.replica and a.drop for a in message.table):
            self._memory.drop_kept()
        if self._memory.state.step > message.step and self._memory.state.generation == record.generation:
            raise IllegalTransition(
                f"told to resume at {message.step} with the state at {self._memory.state.step}"
            )
        there = self._epochs.is_at(record, message.step)
        if not there and self._epochs.is_awaited(record):
            self._memory.distrust()
            self._catch_up.want(None)
            self._context.emit(
                io.WriteJournal("blocking join", record.epoch, message.step, "the others wait for my state")
            )
        self._epochs.enter_mode(Mode.RUN if there else Mode.CATCH_UP)

    def _start_generation(self, record: Record) -> None:
        """Rule 6 of the leader: keep my state if it is the generation's base, else fetch the base."""
        base = record.base
        self._rounds.leave()
        self._session.has_answer()
        self._memory.drop_kept()
        if self._context.config.storage_failed and not base.generation:
            # Rule 8: no replica has read durable storage, which may hold a state of this job.
            self._context.stop(
                RESTART, "the job would begin from nothing, and durable storage has not been read here"
            )
            return
        same = self._memory.state.step == base.step and base.digest in ("", self._memory.state.digest)
        if same and self._catch_up.fetch.doing != "install":
            self._memory.adopt(record.generation)
        else:
            self._memory.distrust()
            self._catch_up.want(SnapshotRef(base.generation, base.step, base.digest), base.sources)
