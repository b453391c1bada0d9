"""Rounds: compute, contribute, exchange, prepare, commit. Rules 1 to 5 and 9 of docs/protocol.md.

Each stage starts when its inputs are there: the main thread's gradient, the links, the reduction, the other
members' contributions, their votes.
"""

import math
from collections import Counter
from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.exit_codes import FAILED, RESTART
from fabric.model import Member, Record
from fabric.protocol.member.serving import SnapshotServing
from fabric.protocol.member.session import LighthouseSession
from fabric.protocol.member.state import (
    CoreContext,
    KeptGradient,
    KnownEpochs,
    LastRound,
    MemberMemory,
    Mode,
)
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages.member_events import PreparedRound
from fabric.protocol.messages.network import CommitVote, Contribution
from fabric.protocol.rules.adaptive_timeout import AdaptiveTimeout
from fabric.protocol.rules.assignment import Work, share_out, waits_for_data
from fabric.protocol.rules.compatibility import split_by_data
from fabric.protocol.rules.divergence import differences


class Round(Struct):
    """State of one round at one member.

    Prepared: my reduction is finished, and every member's contribution is here. Committed: every member of
    the roster has voted, and the digests of all votes are equal. Rules 1 to 3 of a member.
    """

    record: Record
    step: int
    share: tuple[int, ...] = ()  # the micro-batches that this member still has to compute
    contributed: bool = False
    due_s: float = math.inf  # when my contribution goes over the links; inf: it has gone, or is not made
    carried: bool = False  # as ``carried`` in CommitVote
    exchanging: bool = False
    begun: float = -1.0  # the time when every member had contributed, and no member was catching up
    tested_at: float = math.inf  # when this member tested its links with a message of LARGE_BYTES
    gradient_digest: str = ""
    nonfinite: str = ""  # as ``nonfinite`` in Exchanged
    nonfinite_input: str = ""
    ready_record: Record | None = None
    contributions: dict[str, Contribution] = field(default_factory=dict)
    votes: dict[str, CommitVote] = field(default_factory=dict)

    def prepared(self) -> PreparedRound | None:
        """The prepared round, or None before the reduction is done and all contributions are here."""
        names = self.record.names
        if not self.gradient_digest or not self.contributions.keys() >= set(names):
            return None
        parts, metrics = [self.contributions[n] for n in names], dict[str, float]()
        for name, value in (x for part in parts for x in part.metrics):
            metrics[name] = metrics.get(name, 0.0) + value
        return PreparedRound(
            epoch=self.record.epoch,
            step=self.step,
            gradient_digest=self.gradient_digest,
            weight=sum(p.weight for p in parts),
            contributions=tuple((n, p.micro_batches) for n, p in zip(names, parts, strict=True)),
            metrics=tuple(sorted(metrics.items())),
            nonfinite=self.nonfinite,
        )

    def missing(self) -> tuple[str, ...]:
        """The members whose contribution this round lacks; once all are here, those whose vote it lacks."""
        late = tuple(n for n in self.record.names if n not in self.contributions)
        if late or not self.gradient_digest:
            return late
        return tuple(n for n in self.record.names if n not in self.votes)

    def everybody_in(self) -> bool:
        """Whether my reduction has begun, and every contribution is here."""
        return self.exchanging and self.contributions.keys() >= set(self.record.names)

    def complete(self) -> bool:
        """Whether every member of the roster has voted."""
        return len(self.votes) >= len(self.record.roster) and self.votes.keys() >= set(self.record.names)

    def disagreement(self) -> str:
        """Say why the votes forbid the commit, with digests by member; empty when they agree."""
        gradients = {n: b.gradient_digest for n, b in self.votes.items()}
        if len(set(gradients.values())) > 1:
            return f"digests of the reduced gradient at step {self.step} differ: {_by_member(gradients)}"
        if not (states := self._states_apart()):
            return ""
        why = f"digests of the state at step {self.step} differ: {_by_member(states)}"
        return f"{why}; {parted}" if (parted := self.parted()) else why

    def _states_apart(self) -> dict[str, str]:
        """The digests of the states under this round, of members with one layout, where they differ.

        Two layouts may round the same update differently, so their states are not compared.
        """
        layouts: dict[str, dict[str, str]] = {}
        for member in self.record.roster:
            vote = self.votes.get(member.replica)
            if vote is not None and vote.state_digest:
                layouts.setdefault(member.cuts, {})[member.replica] = vote.state_digest
        return next((states for states in layouts.values() if len(set(states.values())) > 1), {})

    def parted(self) -> str:
        """Say where the members' states before this round differ, by their votes; empty if they agree."""
        return differences({name: self.votes[name].entries for name in self._states_apart()})

    def is_disputed(self, name: str) -> bool:
        """Whether a vote differs from the vote of ``name``, with which at most half of the roster agree.

        Then no member has committed or will commit this round, because a commit takes every vote (rule 3).
        """
        digests = [vote.gradient_digest for vote in self.votes.values()]
        agree = digests.count(self.votes[name].gradient_digest) if name in self.votes else len(digests)
        return agree < len(digests) and 2 * agree <= len(self.record.roster)

    def is_outvoted(self, name: str, digest: str) -> bool:
        """Whether most members with the layout of ``name`` voted for one other state digest than ``digest``.

        Empty digests do not count.
        """
        own = self.record.member(name)
        alike = [x.replica for x in self.record.roster if own is not None and x.cuts == own.cuts]
        votes = [self.votes[x].state_digest for x in alike if x in self.votes]
        others = Counter(vote for vote in votes if vote not in ("", digest))
        return bool(digest and others) and 2 * max(others.values()) > len(alike)

    def next_epoch(self) -> int:
        """The next epoch if every vote is ready for it, otherwise the epoch of this round."""
        ready = {b.ready for b in self.votes.values()}
        return ready.pop() if len(ready) == 1 else self.record.epoch


def _by_member(digests: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {digest[:8]}" for name, digest in sorted(digests.items()))


# Rule 11: for so many seconds after a newcomer's request the leader hears of each step at once.
FOLLOWED_S = 5.0
# A contribution that the ring should carry goes over the links too after so many seconds. From then on the
# members can tell a member that computes from an exchange that stalls.
LATE_S = 0.2
# A link that a test has ended was silent for at least this many seconds.
TEST_ENDS_S = 1.2


class DataAgreement:
    """Compares the members' data plans, before the votes, in a round after the data or the epoch change."""

    def __init__(self, context: CoreContext, memory: MemberMemory) -> None:
        self._context = context
        self._memory = memory
        self._epoch = 0  # the epoch of my newest committed round
        self._described = ""  # the data of that round

    def committed(self, epoch: int) -> None:
        """Note that a round of ``epoch`` was committed, so that its members know my data."""
        self._epoch, self._described = epoch, self._memory.plan.described

    def news(self, round_: Round) -> str:
        """Return what my data are, where the members of this epoch do not know it yet."""
        described = self._memory.plan.described
        return "" if (round_.record.epoch, described) == (self._epoch, self._described) else described

    def fails(self, round_: Round) -> bool:
        """Whether members take this step from unequal data. Those on the wrong side end, before any commit.

        Where no side is wrong the job fails.
        """
        parts, record, me = round_.contributions, round_.record, self._context.replica
        if not any(part.data for part in parts.values()):
            return False
        before = self._described if self._epoch == record.epoch else ""
        described = {name: parts[name].data or before for name in record.names}
        split = split_by_data(record, described, round_.step)
        if split is None:
            return False
        if split.undecided:
            self._context.emit(io.SendLeader(m.LoopFailed(record.fence, round_.step, split.why)))
        if split.undecided or me in split.wrong:
            self._context.stop(FAILED, split.why)
        return True


class Rounds(Struct, eq=False):
    """The round that this member is in, and its prepared round: a promise that outlives an abort."""

    _context: CoreContext
    _memory: MemberMemory
    _epochs: KnownEpochs
    _session: LighthouseSession
    _serving: SnapshotServing
    _agreement: DataAgreement
    round_timeout: AdaptiveTimeout
    round: Round | None = None
    prepared: io.PreparedRound | None = None  # a promise: kept after an abort until the decision
    last_round: LastRound = field(default_factory=LastRound)
    disputed: tuple[int, int] | None = None  # the (epoch, step) of a round that ended disputed
    committed_in: int = -1  # the newest epoch in which I committed a round
    carried_in: int = -1  # the epoch of my newest committed round, if the ring carried its contributions
    ring_waits_for: str = ""  # the member whose bytes the data plane waits for

    def _waits_for(self) -> tuple[str, ...]:
        """The members that this round waits for: the ring neighbour, or members whose message is missing."""
        round_ = self.round
        if (
            round_ is not None
            and (round_.everybody_in() or self._rides())
            and self.own_contribution()
            and not round_.gradient_digest
        ):
            # In a ring of one member the data plane's neighbour is this member itself.
            return () if self.ring_waits_for in ("", self._context.replica) else (self.ring_waits_for,)
        return tuple(n for n in self.missing() if n != self._context.replica)

    def abort(self, why: str, about: str, stalled: bool = False, mismatch: bool = False) -> None:
        """Rule 5: abort once per round. The kept gradient and the prepared round stay.

        Without ``retain`` the gradient is reduced in place, so a started exchange has destroyed it.
        """
        assert self._epochs.current is not None
        if self._epochs.mode is Mode.ABORTED:
            return
        waiting_for = self._waits_for()
        self._epochs.enter_mode(Mode.ABORTED)
        round_ = self.round
        given_away = round_ is not None and round_.exchanging and not self._context.config.retain
        is_ended_by_test = round_ is not None and self._context.now - round_.tested_at > TEST_ENDS_S
        lost_bytes = m.LARGE_BYTES if is_ended_by_test else 0
        self.leave_round()
        self._context.emit(io.AbortExchange(self._epochs.current.epoch, why))
        if given_away:
            self._memory.drop_kept()
        self._epochs.journal("abort", why, about)
        step, away = self._memory.state.step, self._session.unreachable()
        self._session.send_aborted(
            m.Aborted(
                self._epochs.current.fence, step, why, about, waiting_for, stalled, mismatch, away, lost_bytes
            )
        )

    def own_contribution(self) -> m.Contribution | None:
        """Return the contribution that I have sent for the round under way."""
        return self.round.contributions.get(self._context.replica) if self.round is not None else None

    def leave_round(self) -> None:
        """Leave the round, and remember a dispute: the other voters may have ended when the leader asks."""
        (round_, self.round), me, state = (self.round, None), self._context.replica, self._memory.state
        if round_ is None:
            return
        if round_.is_disputed(me):
            self.disputed = (round_.record.epoch, round_.step)
        if round_.step == state.step and round_.is_outvoted(me, state.digest):
            self._memory.outvote()

    def leave(self) -> None:
        """Rule 6: leave the round, and drop the prepared one."""
        self.leave_round()
        self.prepared = None

    def forget(self) -> None:
        self.last_round, self.disputed = LastRound(), None

    def go_to(self, record: Record) -> None:
        step, self.round = self._memory.state.step, None
        if not record.is_forced and self._epochs.mode is Mode.JOINED:
            step = max([step, *(x for epoch, x in self._epochs.links.early if epoch == record.epoch)])
        self._epochs.enter(record, step)

    def test_links(self, again: bool = False) -> None:
        """Send my contribution again as a large message. A link that loses it ends in silence."""
        round_ = self.round
        if round_ is not None and round_.contributed and (again or round_.tested_at == math.inf):
            round_.tested_at = self._context.now
            self.to_roster(replace(round_.contributions[self._context.replica], padding=m.PADDING))

    def resume(self, decision: m.Resume, newest: Record) -> None:
        """Rule 8: commit my prepared round if the decision names its digest, and drop any other."""
        prepared, self.prepared = self.prepared, None
        if prepared is not None and (
            self._memory.state.step == prepared.step == decision.step - 1
            and prepared.epoch >= newest.cold
            and prepared.gradient_digest == decision.commit_digest
        ):
            self.commit(prepared)

    def to_roster(self, message: m.PeerMessage) -> None:
        assert self.round is not None
        self._context.to_members(self.round.record, message)

    def _is_round(self, epoch: int, step: int) -> bool:
        return self.round is not None and (self.round.record.epoch, self.round.step) == (epoch, step)

    def on_ready(self, event: io.Ready) -> None:
        self._memory.on_ready(event)
        # The leader needs each step of mine at once in a new epoch, and while a replica joins.
        contact, epochs = self._session.contact, self._epochs
        runs = epochs.mode is Mode.RUN and not contact.finished and epochs.newest is not None
        settled = runs and epochs.newest is epochs.current and contact.beaten_epoch == epochs.epoch()
        is_asked = bool(self._serving.listeners) or self._context.now - contact.asked < FOLLOWED_S
        measured = event.times is not None and bool(event.times.measured)
        self._session.note_step(event, not settled or is_asked or measured or bool(event.digest))

    def on_digested(self, event: io.Digested) -> None:
        if self._memory.on_digested(event):
            self._session.hurry()

    def on_computed(self, event: io.Computed) -> None:
        wanted = self._memory.on_computed(event)
        if wanted and event.redo and self.round is not None and self.round.exchanging:
            # Rule 1: no member has prepared this round yet, because I have not sent my contribution.
            self.abort(event.redo, "")

    def on_exchanged(self, event: io.Exchanged) -> None:
        if (round_ := self.round) is not None and self._is_round(event.epoch, event.step):
            round_.gradient_digest = event.gradient_digest
            round_.nonfinite, round_.nonfinite_input = event.nonfinite, event.nonfinite_input
            for name, message in event.carried:
                if (member := round_.record.member(name)) is not None:
                    self.on_peer(io.FromPeer(name, member.incarnation, message))
            carried = {name for name, _ in event.carried}
            round_.carried = carried >= set(round_.record.names)
            if round_.due_s < math.inf and self._context.replica not in carried:
                round_.due_s = self._context.now

    def on_ring_waits_for(self, event: io.RingWaitsFor) -> None:
        """Note the member whose bytes are due in the ring: an abort names that member."""
        self.ring_waits_for = event.replica

    def on_exchange_failed(self, event: io.ExchangeFailed) -> None:
        if self._is_round(event.epoch, event.step):
            # The abort names the member that the exchange waited for when it ended.
            self.ring_waits_for = event.waited_for
            self.abort(event.why, event.about, mismatch=event.mismatch)
            self.ring_waits_for = ""

    def on_peer(self, event: io.FromPeer) -> bool:
        """Take a message of a round; return whether a joining member may learn the step under way from it."""
        message, fence = event.message, event.message.fence
        promised = self._epochs.report.fence if self._epochs.report is not None else None
        if promised is not None and fence.store_id == promised.store_id and fence < promised:
            return False
        if self._epochs.current is not None and fence.epoch < self._epochs.current.epoch:
            return False
        newest = self._epochs.newest
        if newest is not None and fence.store_id != newest.store_id and fence.epoch <= newest.epoch:
            return False  # rule 6: the sender's store is gone, or I cannot follow its job
        if self._is_round(fence.epoch, message.step):
            self._collect(event.replica, event.incarnation, message)
            return False
        self._epochs.links.keep_early((fence.epoch, message.step), event, self._epochs.epoch())
        return isinstance(message, m.Contribution)

    def waits_on(self, event: io.Event, before: Round | None) -> bool:
        """Whether this event starts no stage: ``before``, still my round, waits for more of its kind."""
        if before is None or before is not self.round or not isinstance(event, io.FromPeer):
            return False
        message, roster = event.message, before.record.roster
        is_of_round = self._is_round(message.fence.epoch, message.step) and not isinstance(
            message, m.Finished
        )
        here = before.votes if isinstance(message, CommitVote) else before.contributions
        return is_of_round and len(here) < len(roster)

    def _collect(self, replica: str, incarnation: int, message: m.PeerMessage) -> None:
        round_ = self.round
        assert round_ is not None
        if not round_.record.lists(replica, incarnation):
            return
        if isinstance(message, m.CommitVote):
            round_.votes.setdefault(replica, message)
        elif isinstance(message, m.Contribution) and message.layout != self._context.identity.layout:
            why = f"{replica} has other parameters (layout {message.layout})"
            self.abort(why, replica, mismatch=True)
        elif isinstance(message, m.Contribution):
            round_.contributions.setdefault(replica, message)

    def enter_round(self) -> None:
        """Rules 1, 4, 7 and 10: open the next round with my share, unless I park or stop."""
        record = self._epochs.current
        assert record is not None
        least = record.min_replicas or self._context.config.min_replicas
        parks = self._session.contact.finished or len(record.roster) < least
        if parks or waits_for_data(record.sharing, record.roster) or self._is_on_its_own_for_too_long():
            return
        self.open_round(self._memory.state.step, self._share(record))

    def _is_on_its_own_for_too_long(self) -> bool:
        """Rule 10: before a round or a commit, stop if a new generation may have begun without me."""
        if self._context.now - self._session.contact.last <= self._context.config.autonomy_s:
            return False
        self._context.stop(
            RESTART, "no lighthouse answered for autonomy_s: stopped before the next round or commit"
        )
        return True

    def _share(self, record: Record) -> tuple[int, ...]:
        step, me, resume = self._memory.state.step, self._context.replica, self._epochs.resume
        if resume is not None and resume.fence == record.fence and resume.step == step:
            if resume.undivided:
                return self._divide(record, [x for x in record.roster if x.replica not in resume.idle])
            ids = next((a.micro_batches for a in resume.table if a.replica == me), ())
            return tuple(i for i in ids if i not in self._memory.kept_gradient.have)
        first = self._epochs.links.first_step == step and not record.is_forced
        return self._divide(record, [x for x in record.roster if not (first and x.joining)])

    def _divide(self, record: Record, able: list[Member]) -> tuple[int, ...]:
        """Return my share of the next step, of which no micro-batch is computed yet."""
        work = Work(self._memory.plan.micro_batches, record.sharing)
        skipped = record.poisoned(self._memory.state.step)
        return share_out(work, record.roster, able, skipped).get(self._context.replica, ()) if able else ()

    def open_round(self, step: int, share: tuple[int, ...]) -> None:
        record = self._epochs.current
        assert record is not None
        if self.last_round.epoch != record.epoch:
            self._context.emit(io.SendLeader(m.Running(record.fence, step)))
        if ids := tuple(sorted(record.poisoned(step))):  # this round leaves them out
            why = "two processes died at each"
            self._context.emit(io.WriteJournal("poison", record.epoch, step, why, "", ids))
        self.last_round = LastRound(record.epoch, step, record.names)
        self.round = Round(record, step, share)
        for event in self._epochs.links.take_early((record.epoch, step)):
            if self.round is not None:
                self._collect(event.replica, event.incarnation, event.message)
        if share and self.round is not None:
            number = self._session.take_measure()
            self._memory.compute(io.Compute(step, share, number, self._session.echo if number else ""))

    def contribute_when_computed(self) -> None:
        """Rule 1: contribute once the links are up, because earlier messages get lost."""
        round_ = self.round
        if round_ is None or round_.contributed or self._memory.kept_gradient.computing:
            return
        if round_.record.epoch not in self._epochs.links.up:
            return
        at_step = round_.step == self._memory.state.step
        if at_step and (not self._memory.waiting or self._memory.lacks_digest()):
            return
        kept = self._memory.kept_gradient if at_step else KeptGradient()
        message = m.Contribution(
            fence=round_.record.fence,
            step=round_.step,
            weight=kept.weight,
            micro_batches=tuple(sorted(kept.have)),
            layout=self._context.identity.layout,
            metrics=tuple(sorted(kept.metrics.items())),
            data=self._agreement.news(round_) if at_step else "",
        )
        round_.contributed = True
        round_.contributions[self._context.replica] = message
        if len(round_.record.roster) > 1:
            self._context.emit(io.Carry(message))
        can_ride = self.carried_in == round_.record.epoch and not round_.gradient_digest
        round_.due_s = self._context.now + LATE_S * can_ride

    def _rides(self) -> bool:
        """Whether the ring alone carries my contribution, and the exchange has not ended."""
        return self.tell_deadline() is not None and not (self.round and self.round.gradient_digest)

    def tell_deadline(self) -> float | None:
        """When my contribution goes over the links; None when it has gone, or is not made."""
        return self.round.due_s if self.round is not None and self.round.due_s < math.inf else None

    def tell_when_due(self) -> None:
        """Send my contribution over the links, unless the ring carries it in time."""
        if self.round is not None and self._context.now >= self.round.due_s:
            self.round.due_s = math.inf
            self.to_roster(self.round.contributions[self._context.replica])

    def exchange_when_linked(self) -> None:
        """Start the exchange, perhaps before I contribute. A prepared round needs the contribution too."""
        round_, kept = self.round, self._memory.kept_gradient
        if round_ is None or round_.exchanging or round_.record.epoch not in self._epochs.links.up:
            return
        is_streaming, weight = not round_.contributed, kept.streaming
        if round_.contributed:
            weight = round_.contributions[self._context.replica].weight
        elif weight <= 0 or round_.step != self._memory.state.step or len(round_.record.roster) < 2:
            return
        round_.exchanging = True
        self._context.emit(io.StartExchange(round_.record.fence, round_.step, weight, is_streaming))

    def _newcomers_first(self, round_: Round) -> bool:
        """Whether a newcomer in this round may still be catching up, by updates in user code."""
        first = self._epochs.links.first_step == round_.step
        return first and any(x.joining for x in round_.record.roster)

    def missing(self) -> tuple[str, ...]:
        """The members whose contribution or vote my round lacks, once I have contributed.

        While the ring carries the contributions, nobody can say which ones are made.
        """
        is_known = self.round is not None and self.round.contributed and not self._rides()
        return self.round.missing() if self.round is not None and is_known else ()

    def stall_deadline(self) -> float | None:
        """When to give the round up; None until every member is in it.

        A newcomer's first round has all of ``exchange_s``, and time for its updates, which are user code.
        """
        round_ = self.round
        if round_ is None or round_.begun < 0:
            return None
        if not self._newcomers_first(round_):
            return round_.begun + self.round_timeout.bound_s
        updates_s = self._context.config.user_code_s if round_.gradient_digest else 0.0
        return round_.begun + self._context.config.exchange_s + updates_s

    def abort_when_stalled(self) -> None:
        round_ = self.round
        if round_ is not None and round_.begun < 0 and round_.everybody_in():
            round_.begun = self._context.now
        deadline = self.stall_deadline()
        is_due = deadline is not None and self._context.now >= deadline
        if round_ is None or not is_due or self._epochs.mode is not Mode.RUN:
            return
        waits = self._waits_for()
        took, whom = self._context.now - round_.begun, ", ".join(waits) or "no member in particular"
        self.round_timeout.stalled()
        why = f"round {round_.step} stalled: all members are in it for {took:.1f} s, and I wait for {whom}"
        self.abort(why, waits[0] if waits else "", stalled=True)

    def prepare_when_reduced(self) -> None:
        """Rule 2: vote once the round is prepared. The vote makes the prepared round a promise."""
        round_ = self.round
        if round_ is None or self._context.replica in round_.votes or not self._memory.waiting:
            return
        prepared = round_.prepared() if round_.step == self._memory.state.step else None
        if prepared is None or self._memory.lacks_digest() or self._agreement.fails(round_):
            return
        self.prepared = prepared
        newest, round_.ready_record = self._epochs.newest, round_.record
        if newest is not None and newest.epoch in self._epochs.links.up:
            round_.ready_record = newest if newest.epoch > round_.record.epoch else round_.record
        vote = m.CommitVote(
            fence=round_.record.fence,
            step=round_.step,
            ready=round_.ready_record.epoch,
            gradient_digest=prepared.gradient_digest,
            state_digest=self._memory.state.digest,
            nonfinite=round_.nonfinite_input,
            entries=self._memory.state.entries if self._memory.state.digest else (),
            carried=round_.carried,
        )
        round_.votes[self._context.replica] = vote
        self.to_roster(vote)

    def commit_when_agreed(self) -> None:
        """Rule 3: commit when all votes are here; abort if their digests differ."""
        round_, prepared = self.round, self.prepared
        if round_ is None or prepared is None or not round_.complete() or self._context.stopped:
            return
        disagreement = round_.disagreement()
        if disagreement:
            # If the leader evicts this member for unequal digests, the member must not trust its state.
            self._memory.doubt(round_.parted())
            self.abort(disagreement, "")
            return
        if self._is_on_its_own_for_too_long():
            return
        if self._memory.state.digest:
            others = [vote for name, vote in round_.votes.items() if name != self._context.replica]
            self._memory.confirm(round_.record.epoch, any(vote.state_digest for vote in others))
        if round_.begun >= 0 and not self._newcomers_first(round_):
            self.round_timeout.took(self._context.now - round_.begun)
        all_carried = all(vote.carried for vote in round_.votes.values())
        self.carried_in = round_.record.epoch if all_carried else -1
        following = round_.next_epoch()
        record = round_.ready_record
        switch = record is not None and following > round_.record.epoch
        self.commit(prepared, first_of_epoch=switch)
        if switch and not self._context.stopped:
            assert record is not None and record.epoch == following
            self.go_to(record)
            if not record.lists(self._context.replica, self._context.identity.incarnation):
                self._context.leave(round_.record.member(self._context.replica))
            elif record.epoch not in self._epochs.links.up:
                self.abort(f"a link was lost on the way into epoch {record.epoch}", "")

    def commit(self, prepared: io.PreparedRound, first_of_epoch: bool = False) -> None:
        if prepared.nonfinite and self._judge_nonfinite(prepared):
            return
        own = dict(prepared.contributions).get(self._context.replica, ())
        self._agreement.committed(prepared.epoch)
        every = self._context.config.digest_every
        generation = self._memory.state.generation
        self.committed_in = prepared.epoch
        self.prepared, self.round = None, None
        self._context.emit(io.Publish(generation, prepared))
        wanted = bool(every) and (first_of_epoch or (prepared.step + 1) % every == 0)
        apply = io.Apply(generation, prepared.step, prepared, contributed=bool(own), digest=wanted)
        self._memory.apply(apply, prepared.gradient_digest)

    def _judge_nonfinite(self, prepared: io.PreparedRound) -> bool:
        """Act on a sum that is not finite, in the same way on all members; return whether the job ends."""
        votes = self.round.votes.items() if self.round is not None else ()
        tensors = sorted((name, vote.nonfinite) for name, vote in votes if vote.nonfinite)
        culprits = ", ".join(f"{name} (its {tensor})" for name, tensor in tensors)
        why = f"the averaged gradient of {prepared.nonfinite} at step {prepared.step} is not finite"
        why += f": nor is the contribution of {culprits}" if culprits else ""
        if self._context.config.on_nan != "stop":
            self._context.emit(io.WriteJournal("skipped", self._epochs.epoch(), prepared.step, why))
            return False
        why += '; look at its data and loss, or set on_nan to "skip" or "propagate"'
        self._context.emit(io.SendLeader(m.LoopFailed(self._epochs.fence(), prepared.step, why)))
        self._context.stop(FAILED, why)
        return True
