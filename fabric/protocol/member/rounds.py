"""Rounds: compute, contribute, exchange, hold, commit. Rules 1 to 4 and 9 of docs/protocol.md.

Each stage starts when what it needs is there, whatever came last: the main thread's gradient, the links, the
reduction, the others' contributions, their votes.
"""

from fabric.errors import IllegalTransition
from fabric.model import Record
from fabric.protocol.member.catch_up import MemberCatchUp
from fabric.protocol.member.round import Round
from fabric.protocol.member.state import (
    KeptGradient,
    MemberState,
    Mode,
)
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.assignment import Work, share_out, waits_for_data
from fabric.protocol.rules.divergence import bounded

# At most this often is a step told while nothing is going on; a newcomer's request ends that for a while.
STEP_BEAT_S = 0.25
FOLLOWED_S = 5.0


class Rounds(MemberCatchUp):
    """A member that takes part in rounds."""

    # --- what arrives ----------------------------------------------------------------------------------

    def on_ready(self, event: io.Ready) -> None:
        if event.step != self.state.step:
            raise IllegalTransition(f"ready for step {event.step} with the state at {self.state.step}")
        self.state.digest, self.state.later = event.digest, event.later
        self.state.entries = bounded(event.entries)
        self.waiting = True
        self._last_times = event.times
        # A step that nobody waits to hear of need not cost a message: the next beat tells it.
        contact = self.contact
        due = self._now if event.digest or self._is_followed() else contact.beaten + STEP_BEAT_S
        contact.next_beat = min(contact.next_beat, max(due, self._now))

    def on_digested(self, event: io.Digested) -> None:
        if self.state.later and event.step == self.state.step:
            self.state.digest, self.state.later, self.state.asked = event.digest, False, False
            self.state.entries = bounded(event.entries)
            self.contact.next_beat = self._now

    def _lacks_digest(self) -> bool:
        """Whether my state's digest is to be compared and not taken to its end. Others count the time of a
        round from when everybody is in it, so I am not before that is done."""
        state = self.state
        if state.later and not state.asked:
            state.asked = True
            self._emit(io.TellDigest(state.step))
        return state.later

    def _is_followed(self) -> bool:
        """Whether the leader needs my step at once: in a new epoch, and while somebody joins."""
        contact = self.contact
        settled = self.mode is Mode.RUN and self.newest is not None and not self.contact.finished
        settled = settled and self.newest is self.current and contact.beaten_epoch == self._epoch()
        return not settled or bool(self.listeners) or self._now - contact.asked < FOLLOWED_S

    def on_streaming(self, event: io.Streaming) -> None:
        if event.step == self.state.step and not self.kept_gradient.stale:
            self.kept_gradient.streaming = self.kept_gradient.weight + event.weight

    def on_computed(self, event: io.Computed) -> None:
        self.waiting = True
        kept = self.kept_gradient
        kept.streaming = 0.0
        if kept.stale or event.step != self.state.step:
            self._drop_kept()
            return
        kept.computing = ()
        if event.weight == 0 and self.identity.sharing.policy == "shrink":
            # Nothing was put in for them (data of another step were discarded): they are skipped.
            kept.have -= set(event.micro_batches)
        kept.weight += event.weight
        for name, value in event.metrics:
            kept.metrics[name] = kept.metrics.get(name, 0.0) + value
        if event.redo and self.round is not None and self.round.exchanging:
            # Nobody holds this round yet: that takes my contribution, which has not been sent.
            self._abort(event.redo, "")

    def on_exchanged(self, event: io.Exchanged) -> None:
        if self._is_round(event.epoch, event.step):
            assert self.round is not None
            self.round.gradient_digest = event.gradient_digest
            self.round.nonfinite, self.round.mine = event.nonfinite, event.mine

    def on_exchange_failed(self, event: io.ExchangeFailed) -> None:
        if self._is_round(event.epoch, event.step):
            # The exchange is over by now; what it waited for then tells who held it up.
            self.ring_waits_for = event.waited_for
            self._abort(event.why, event.about, mismatch=event.mismatch)
            self.ring_waits_for = ""

    def on_peer(self, event: io.FromPeer) -> None:
        message, fence = event.message, event.message.fence
        promised = self.report.fence if self.report is not None else None
        if promised is not None and fence.store_id == promised.store_id and fence < promised:
            return
        if self.current is not None and fence.epoch < self.current.epoch:
            return
        newest = self.newest
        if newest is not None and fence.store_id != newest.store_id and fence.epoch <= newest.epoch:
            return  # of a store that is no more, or of one whose job I cannot follow
        if self._is_round(fence.epoch, message.step):
            self._collect(event.replica, event.incarnation, message)
            return
        self.links.keep_early((fence.epoch, message.step), event, self._floor())
        if isinstance(message, m.Contribution):
            self._first_data()

    def _first_data(self) -> None:
        """Rule 9: a newcomer learns from the first contribution of its epoch which step is under way."""
        record = self.newest
        if self.mode is not Mode.JOINED or record is None or record.is_forced:
            return
        steps = [
            key[1]
            for key, events in self.links.early.items()
            if key[0] == record.epoch and any(self._by_veteran(record, e) for e in events)
        ]
        if not steps:
            return
        step = min(steps)
        if self.state.step > step:
            self._leave(f"my step {self.state.step} is ahead of the job's {step}")
            return
        self._go_to(record)
        self._enter_mode(Mode.RUN)
        self._open_round(step, ())

    @staticmethod
    def _by_veteran(record: Record, event: io.FromPeer) -> bool:
        member = record.member(event.replica)
        return member is not None and not member.joining and isinstance(event.message, m.Contribution)

    def _collect(self, replica: str, incarnation: int, message: m.PeerMessage) -> None:
        round_ = self.round
        assert round_ is not None
        if not round_.record.lists(replica, incarnation):
            return
        if isinstance(message, m.CommitVote):
            round_.votes.setdefault(replica, message)
            return
        if not isinstance(message, m.Contribution):
            return
        if message.layout != self.identity.layout:
            why = f"{replica} has other parameters (layout {message.layout})"
            self._abort(why, replica, mismatch=True)
            return
        round_.contributions.setdefault(replica, message)

    def _floor(self) -> int:
        return self.current.epoch if self.current is not None else 0

    # --- the stages of a round -------------------------------------------------------------------------

    def _enter_round(self) -> None:
        """Rules 1, 4, 7 and 10: what is my share of the next round?"""
        record = self.current
        assert record is not None
        if self.contact.finished or len(record.roster) < (record.min_replicas or self.config.min_replicas):
            return
        if waits_for_data(record.sharing, record.roster):
            return
        if self._is_on_its_own_for_too_long():
            return
        self._open_round(self.state.step, self._share(record))

    def _is_on_its_own_for_too_long(self) -> bool:
        """Rule 10: from now on a new generation may begin without me, so I begin no round and commit none."""
        if self._now - self.contact.last <= self.config.autonomy_s:
            return False
        self._stop(75, "no lighthouse answered for autonomy_s: stopped before the next round or commit")
        return True

    def _share(self, record: Record) -> tuple[int, ...]:
        step, me, resume = self.state.step, self.identity.replica, self.resume
        if resume is not None and resume.fence == record.fence and resume.step == step:
            ids = next((a.micro_batches for a in resume.table if a.replica == me), ())
            return tuple(i for i in ids if i not in self.kept_gradient.have)
        first = self.links.first_step == step and not record.is_forced
        able = [x for x in record.roster if not (first and x.joining)]
        work = Work(self.identity.micro_batches, record.sharing)
        return share_out(work, record.roster, able, record.poisoned(step)).get(me, ())

    def _open_round(self, step: int, share: tuple[int, ...]) -> None:
        record = self.current
        assert record is not None
        if self.last_round[0] != record.epoch:
            self._emit(io.SendLeader(m.Running(record.fence, step)))
        self._note_poison(record, step)
        self.last_round = (record.epoch, step, record.names)
        self.round = Round(record, step, share)
        for event in self.links.take_early((record.epoch, step)):
            if self.round is not None:
                self._collect(event.replica, event.incarnation, event.message)
        if share and self.round is not None:
            self.kept_gradient.have |= set(share)
            self.kept_gradient.computing = share
            self.waiting = False
            self._emit(io.Compute(step, share))

    def _note_poison(self, record: Record, step: int) -> None:
        """What nobody computes is recorded, once per round that leaves it out."""
        ids = tuple(sorted(record.poisoned(step)))
        if ids:
            self._emit(io.WriteJournal("poison", record.epoch, step, "two processes died at them", "", ids))

    def _contribute_when_computed(self) -> None:
        """Only once linked: what is sent to a member without a link is lost."""
        round_ = self.round
        if round_ is None or round_.contributed or self.kept_gradient.computing:
            return
        if round_.record.epoch not in self.links.up:
            return
        at_step = round_.step == self.state.step
        if at_step and (not self.waiting or self._lacks_digest()):
            return
        kept = self.kept_gradient if at_step else KeptGradient()
        message = m.Contribution(
            fence=round_.record.fence,
            step=round_.step,
            weight=kept.weight,
            micro_batches=tuple(sorted(kept.have)),
            layout=self.identity.layout,
            metrics=tuple(sorted(kept.metrics.items())),
        )
        round_.contributed = True
        round_.contributions[self.identity.replica] = message
        self._to_roster(message)

    def _exchange_when_linked(self) -> None:
        """With what I have contributed, or with what is about to be: its bytes may go ahead of its message,
        for a hold needs both."""
        round_, kept = self.round, self.kept_gradient
        if round_ is None or round_.exchanging or round_.record.epoch not in self.links.up:
            return
        if round_.contributed:
            round_.exchanging = True
            weight = round_.contributions[self.identity.replica].weight
            self._emit(io.StartExchange(round_.record.fence, round_.step, weight))
        elif kept.streaming > 0 and round_.step == self.state.step and len(round_.record.roster) > 1:
            round_.exchanging = True
            self._emit(io.StartExchange(round_.record.fence, round_.step, kept.streaming, streaming=True))

    def _newcomers_first(self, round_: Round) -> bool:
        """Whether somebody may still be catching up in it: then it is the user's update that takes long."""
        first = self.links.first_step == round_.step
        return first and any(x.joining for x in round_.record.roster)

    def stall_deadline(self) -> float | None:
        """When the round is given up, once everybody is in it; None while somebody has an excuse. What was
        learned says nothing of a newcomer's first; its updates, before it can hold, are user code."""
        round_ = self.round
        if round_ is None or round_.begun < 0:
            return None
        if not self._newcomers_first(round_):
            return round_.begun + self.learned.bound_s
        updates_s = self.config.user_code_s if round_.gradient_digest else 0.0
        return round_.begun + self.config.exchange_s + updates_s

    def _abort_when_stalled(self) -> None:
        round_ = self.round
        if round_ is not None and round_.begun < 0 and round_.everybody_in():
            round_.begun = self._now
        deadline = self.stall_deadline()
        if round_ is None or deadline is None or self._now < deadline or self.mode is not Mode.RUN:
            return
        waits = self._waits_for()
        took, whom = self._now - round_.begun, ", ".join(waits) or "nobody in particular"
        self.learned.stalled()
        why = f"round {round_.step} stalled: everybody is in it for {took:.1f} s, and I wait for {whom}"
        self._abort(why, waits[0] if waits else "", stalled=True)

    def _hold_when_reduced(self) -> None:
        """Rule 2: from here on the hold is a promise."""
        round_ = self.round
        if round_ is None or self.identity.replica in round_.votes or not self.waiting:
            return
        prepared = round_.prepared() if round_.step == self.state.step else None
        if prepared is None or self._lacks_digest():
            return
        self.prepared = prepared
        newest = self.newest
        round_.ready_record = round_.record
        if newest is not None and newest.epoch > round_.record.epoch and newest.epoch in self.links.up:
            round_.ready_record = newest
        vote = m.CommitVote(
            fence=round_.record.fence,
            step=round_.step,
            ready=round_.ready_record.epoch,
            gradient_digest=prepared.gradient_digest,
            state_digest=self.state.digest,
            nonfinite=round_.mine,
            entries=self.state.entries if self.state.digest else (),
        )
        round_.votes[self.identity.replica] = vote
        self._to_roster(vote)

    def _commit_when_agreed(self) -> None:
        """Rule 3: everybody holds, so it is committed; digests that differ abort instead."""
        round_, prepared = self.round, self.prepared
        if round_ is None or prepared is None or not round_.complete() or self.stopped:
            return
        disagreement = round_.disagreement()
        if disagreement:
            self.state.parted = round_.parted()
            self._abort(disagreement, "")
            # Evicted for this, I would not trust my own state either.
            self.links.suspect = True
            return
        if self._is_on_its_own_for_too_long():
            return
        if self.state.digest:
            self.links.suspect = False
            others = [vote for name, vote in round_.votes.items() if name != self.identity.replica]
            if self.state.step > self.loaded and any(vote.state_digest for vote in others):
                self.agreed = round_.record.epoch
        if round_.begun >= 0 and not self._newcomers_first(round_):
            self.learned.took(self._now - round_.begun)
        following = round_.next_epoch()
        record = round_.ready_record
        switch = record is not None and following > round_.record.epoch
        self._commit(prepared, first_of_epoch=switch)
        if switch and not self.stopped:
            assert record is not None and record.epoch == following
            self._go_to(record)
            if not record.lists(self.identity.replica, self.identity.incarnation):
                self._stop(0, "drained: the others go on without this replica")
            elif record.epoch not in self.links.up:
                self._abort(f"a link was lost on the way into epoch {record.epoch}", "")

    def _commit(self, prepared: io.PreparedRound, first_of_epoch: bool = False) -> None:
        if prepared.nonfinite and self._judge_nonfinite(prepared):
            return
        if not prepared.weight:
            self.empty = prepared.step
        following = prepared.step + 1
        mine = dict(prepared.contributions).get(self.identity.replica, ())
        every = self.config.digest_every
        self.state = MemberState(self.state.generation, following, "", prepared.gradient_digest)
        self.end.took_part = prepared.epoch
        self.prepared, self.round, self.kept_gradient = None, None, KeptGradient()
        self.waiting = False
        self._emit(io.Publish(self.state.generation, prepared))
        wanted = bool(every) and (first_of_epoch or following % every == 0)
        self._emit(io.Apply(prepared.step, prepared, contributed=bool(mine), digest=wanted))

    def _judge_nonfinite(self, prepared: io.PreparedRound) -> bool:
        """The sum is the same on all members, and so is what they make of it: whether that is to stop."""
        culprits = self.round.culprits() if self.round is not None else ""
        why = f"the averaged gradient of {prepared.nonfinite} at step {prepared.step} is not finite"
        why += f": so was what {culprits} put in" if culprits else ""
        if self.config.on_nan != "stop":
            self._emit(io.WriteJournal("skipped", self._epoch(), prepared.step, why))
            return False
        why += '; look at its data and loss, or set on_nan to "skip" or "propagate"'
        self._emit(io.SendLeader(m.LoopFailed(self._fence(), prepared.step, why)))
        self._stop(1, why)
        return True
