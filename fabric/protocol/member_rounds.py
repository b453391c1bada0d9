"""Rounds: compute, contribute, exchange, hold, commit. Rules 1 to 4 and 9 of docs/protocol.md.

Each stage starts when what it needs is there, whatever came last: the main thread's gradient, the links, the
reduction, the others' contributions, their bars.
"""

from fabric.errors import IllegalTransition
from fabric.model import Record
from fabric.protocol import member_io as io
from fabric.protocol import messages as m
from fabric.protocol.assignment import assign
from fabric.protocol.member_catch_up import CatchingUp
from fabric.protocol.member_state import (
    Kept,
    Mode,
    State,
)
from fabric.protocol.round import Round


class Rounds(CatchingUp):
    """A member that takes part in rounds."""

    # --- what arrives ----------------------------------------------------------------------------------

    def on_ready(self, event: io.Ready) -> None:
        if event.step != self.state.step:
            raise IllegalTransition(f"ready for step {event.step} with the state at {self.state.step}")
        self.state.digest = event.digest
        self.waiting = True
        self.contact.next_beat = self._now
        self._last_times = event.times

    def on_computed(self, event: io.Computed) -> None:
        self.waiting = True
        kept = self.kept
        if kept.stale or event.step != self.state.step:
            self._drop_kept()
            return
        kept.computing = ()
        kept.weight += event.weight
        for name, value in event.metrics:
            kept.metrics[name] = kept.metrics.get(name, 0.0) + value

    def on_exchanged(self, event: io.Exchanged) -> None:
        if self._is_round(event.epoch, event.step):
            assert self.round is not None
            self.round.gradient_digest = event.gradient_digest

    def on_exchange_failed(self, event: io.ExchangeFailed) -> None:
        if self._is_round(event.epoch, event.step):
            self._abort(event.why, event.about)

    def on_peer(self, event: io.FromPeer) -> None:
        message, fence = event.message, event.message.fence
        promised = self.report.fence if self.report is not None else None
        if promised is not None and fence < promised:
            return
        if self.current is not None and fence.epoch < self.current.epoch:
            return
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
        return member is not None and not member.fresh and isinstance(event.message, m.Contribution)

    def _collect(self, replica: str, incarnation: int, message: m.PeerMessage) -> None:
        round_ = self.round
        assert round_ is not None
        if not round_.record.lists(replica, incarnation):
            return
        if isinstance(message, m.Bar):
            round_.bars.setdefault(replica, message)
            return
        if message.layout != self.identity.layout:
            self._abort(f"{replica} has other parameters (layout {message.layout})", replica)
            return
        round_.contributions.setdefault(replica, message)

    def _floor(self) -> int:
        return self.current.epoch if self.current is not None else 0

    # --- the stages of a round -------------------------------------------------------------------------

    def _enter_round(self) -> None:
        """Rules 1, 4, 7 and 10: what is my share of the next round?"""
        record = self.current
        assert record is not None
        if self.contact.finished or len(record.roster) < self.config.min_replicas:
            return
        if self._now - self.contact.last > self.config.autonomy_s:
            self._stop(75, "no lighthouse answered for autonomy_s: stopped before the next round")
            return
        self._open_round(self.state.step, self._share(record))

    def _share(self, record: Record) -> tuple[int, ...]:
        step, me, resume = self.state.step, self.identity.replica, self.resume
        if resume is not None and resume.fence == record.fence and resume.step == step:
            ids = next((a.micro_batches for a in resume.table if a.replica == me), ())
            return tuple(i for i in ids if i not in self.kept.have)
        first = self.links.first_step == step and not record.is_forced
        able = [x for x in record.roster if not (first and x.fresh)]
        return assign(range(self.identity.micro_batches), able).get(me, ())

    def _open_round(self, step: int, share: tuple[int, ...]) -> None:
        record = self.current
        assert record is not None
        if self.pend[0] != record.epoch:
            self._do(io.SendLeader(m.Running(record.fence, step)))
        self.pend = (record.epoch, step, record.names)
        self.round = Round(record, step, share)
        for event in self.links.take_early((record.epoch, step)):
            if self.round is not None:
                self._collect(event.replica, event.incarnation, event.message)
        if share and self.round is not None:
            self.kept.have |= set(share)
            self.kept.computing = share
            self.waiting = False
            self._do(io.Compute(step, share))

    def _contribute_when_computed(self) -> None:
        """Only once linked: what is sent to a member without a link is lost."""
        round_ = self.round
        if round_ is None or round_.contributed or self.kept.computing:
            return
        if round_.record.epoch not in self.links.up:
            return
        at_step = round_.step == self.state.step
        if at_step and not self.waiting:
            return
        kept = self.kept if at_step else Kept()
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
        round_ = self.round
        if round_ is None or not round_.contributed or round_.exchanging:
            return
        if round_.record.epoch in self.links.up:
            round_.exchanging = True
            weight = round_.contributions[self.identity.replica].weight
            self._do(io.StartExchange(round_.record.fence, round_.step, weight))

    def _hold_when_reduced(self) -> None:
        """Rule 2: from here on the hold is a promise."""
        round_ = self.round
        if round_ is None or self.identity.replica in round_.bars or not self.waiting:
            return
        hold = round_.hold() if round_.step == self.state.step else None
        if hold is None:
            return
        self.hold = hold
        newest = self.newest
        round_.ready_record = round_.record
        if newest is not None and newest.epoch > round_.record.epoch and newest.epoch in self.links.up:
            round_.ready_record = newest
        bar = m.Bar(
            fence=round_.record.fence,
            step=round_.step,
            ready=round_.ready_record.epoch,
            gradient_digest=hold.gradient_digest,
            state_digest=self.state.digest,
        )
        round_.bars[self.identity.replica] = bar
        self._to_roster(bar)

    def _commit_when_agreed(self) -> None:
        """Rule 3: everybody holds, so it is committed; digests that differ abort instead."""
        round_, hold = self.round, self.hold
        if round_ is None or hold is None or not round_.complete():
            return
        disagreement = round_.disagreement()
        if disagreement:
            self._abort(disagreement, "")
            # Evicted for this, I would not trust my own state either.
            self.links.suspect = True
            return
        following = round_.next_epoch()
        record = round_.ready_record
        switch = record is not None and following > round_.record.epoch
        self._commit(hold, first_of_epoch=switch)
        if switch:
            assert record is not None and record.epoch == following
            self._go_to(record)
            if not record.lists(self.identity.replica, self.identity.incarnation):
                self._stop(0, "drained: the others go on without this replica")
            elif record.epoch not in self.links.up:
                self._abort(f"a link was lost on the way into epoch {record.epoch}", "")

    def _commit(self, hold: io.Hold, first_of_epoch: bool = False) -> None:
        following = hold.step + 1
        mine = dict(hold.contributions).get(self.identity.replica, ())
        every = self.config.digest_every
        self.state = State(self.state.generation, following, "", hold.gradient_digest)
        self.hold, self.round, self.kept = None, None, Kept()
        self.waiting = False
        self._do(io.Publish(self.state.generation, hold))
        wanted = bool(every) and (first_of_epoch or following % every == 0)
        self._do(io.Apply(hold.step, hold, live=bool(mine), digest=wanted))
