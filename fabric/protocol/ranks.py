"""A replica of several ranks (FSDP2, TP, PP inside) as one member of the job. Pure.

Rank 0 runs the member core, which does not know ranks: ``Ranks`` stands between the core and the ranks. Every
effect of the core becomes one command per rank. The outcomes of all ranks become the one event that the core
awaits: linked or exchanged when all ranks are, failed as soon as one fails. So a round is prepared when every
rank has reduced its shard, and a commit is decided once. Commands reach each rank in order over its own link.
A replica's digests combine its ranks' digests. Only rank 0 talks to peers and the leader.

A lost rank ends the replica, because no other process can complete its part of the state.

``FollowerRank`` is the other side: it obeys, answers, and remembers its generation and epoch. A host without
rank 0 has one link to it, that of the host's first rank: its ``HostVoice`` sums up what the host's ranks say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fabric.errors import IllegalTransition, ProtocolError
from fabric.exit_codes import FAILED, RESTART
from fabric.model import Record
from fabric.protocol.member.core import MemberCore
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.rank_messages import (
    MOST_TIMED_RANKS,
    FromHost,
    FromRank,
    Metrics,
    NameSnapshot,
    Own,
    RankCommand,
    RankEffect,
    RankEvent,
    RankLost,
    RankOutcome,
    SnapshotDue,
    SnapshotNamed,
    addresses_by_rank,
    replica_digest,
    replica_share,
    replica_times,
    summed_digest,
    urls_of_rank,
    with_own,
    without_own,
)

# The most rounds whose digests by rank are kept, because a commit soon follows its round.
_MAX_ROUNDS = 8
# The most members named to a rank as sources of a gradient, because their layouts make long messages.
_MAX_MEMBERS = 4


@dataclass(frozen=True, slots=True)
class EndReplica:
    """The shell ends this replica, for example because a lighthouse refuses it."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class ToOthers:
    """Let every rank but 0 perform these commands, in their order."""

    commands: tuple[RankCommand, ...]
    own: tuple[Own, ...] = ()  # by rank, also 0, what the only command says to it alone; empty: nothing


@dataclass(frozen=True, slots=True)
class ToSelf:
    """Perform this command here, at rank 0."""

    command: RankCommand


Event = io.Event | FromRank | FromHost | EndReplica
Effect = io.SendPeer | io.SendLeader | io.WriteJournal | io.ClaimAbove | io.Probe | ToOthers | ToSelf

# Outcomes of the main threads. A thread has one command at a time, besides TellDigest, and one outcome of
# each rank makes the answer. The core does not wait for digests, and may give the next command before every
# rank has told its digest.
_MAIN = (io.Ready, io.Digested, io.Computed, io.Installed, io.InstallFailed, io.Closing)
_FETCHES = (io.FetchState, io.FetchGradient)
Ranked = Sequence[int]


@dataclass(slots=True)
class _Fetching:
    """The newest fetch."""

    number: int = 0  # number of the command that this answer is for
    command: io.FetchState | io.FetchGradient | None = None
    ended: dict[int, RankEvent] = field(default_factory=dict)  # rank -> its outcome of the command


class Ranks:
    """Rank 0's adapter between the member core and the ranks."""

    def __init__(self, member: MemberCore, groups: tuple[int, ...], unequal: bool = False) -> None:
        self.member = member
        self.groups = groups  # by rank; ranks of one group (tensor or pipeline parallel) see the same samples
        self.stages: tuple[int, ...] = ()  # the pipeline stage of each rank; empty: all are one stage
        self.unequal = unequal  # replicas may have other layouts: digests and weights are sums over the ranks
        self.over = False  # whether rank 0 has ordered the ranks to finish or to stop
        self.lost = False  # whether a rank ended without an order to finish or to stop
        self._number = 0
        self._main: dict[int, RankEvent] = {}
        self._streaming: dict[int, io.Streaming] = {}  # the ranks whose last backward has begun
        self._digested: dict[int, io.Digested] = {}  # the answers to the TellDigest under way
        self._closing: io.Closing | None = None  # Closing, held back until the snapshot under way ends
        self._linked: dict[int, set[int]] = {}  # epoch -> ranks that have all links of the epoch
        self._reduced: dict[tuple[int, int], dict[int, io.Exchanged]] = {}  # round -> rank -> its result
        self._fetching = _Fetching()
        self._snapshots: dict[tuple[int, int], dict[int, str]] = {}  # (generation, step) -> digest by rank
        self._durable: set[tuple[int, int]] = set()  # the snapshots that become durable checkpoints too
        # Snapshot -> the digest of all ranks, and by rank whether its part is served.
        self._naming: dict[tuple[int, int], tuple[str, dict[int, bool]]] = {}
        self._effects: list[Effect] = []
        self._is_stale = True  # whether the core has had an event since it named its deadline
        self._deadline: float | None = None

    @property
    def size(self) -> int:
        return len(self.groups)

    # --- the contract ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at time ``now`` (monotonic seconds); return the effects to perform in order."""
        self._effects = []
        if isinstance(event, EndReplica):
            self._stop(event.code, event.reason)
        elif isinstance(event, FromRank):
            self._take((event.rank,), (event.outcome.event,), event.outcome.number, now)
        elif isinstance(event, FromHost):
            self._take(event.ranks, event.events, event.number, now)
        else:
            if isinstance(event, io.LinkLost):
                # Only rank 0 has links to other members. As in the core, epochs that list the lost member
                # must be linked again.
                for record in (self.member.epochs.current, self.member.epochs.newest):
                    if record is not None and record.lists(event.replica, event.incarnation):
                        self._linked.get(record.epoch, set()).discard(0)
            self._record_event(event, now)
        return self._effects

    def next_deadline(self) -> float | None:
        """When to call again with Tick at the latest."""
        if self._is_stale:
            self._is_stale, self._deadline = False, self.member.next_deadline()
        return None if self.over else self._deadline

    # --- the core's effects, to every rank ---------------------------------------------------------

    def _record_event(self, event: io.Event, now: float) -> None:
        self._is_stale = True
        for effect in self.member.handle(event, now) if not self.over else ():
            if isinstance(effect, io.SendPeer | io.SendLeader | io.WriteJournal | io.ClaimAbove | io.Probe):
                self._effects.append(effect)
            elif not self.over:
                self._command(effect)

    def _command(self, effect: RankEffect) -> None:
        if isinstance(effect, io.TakeSnapshot):
            self._snapshot(effect.step, effect.durable)
            return
        self._number += 1
        if isinstance(effect, _FETCHES):
            self._fetching = _Fetching(self._number, effect)
        elif isinstance(effect, io.CancelFetch):
            self._fetching = _Fetching()
        elif isinstance(effect, io.Switch):
            epoch = effect.record.epoch
            self._linked = {e: ranks for e, ranks in self._linked.items() if e >= epoch}
        elif isinstance(effect, io.Finish | io.Stop):
            self.over = True
        self._send(effect)

    def _send(self, effect: RankEffect) -> None:
        generation = self.member.memory.state.generation
        same, own = (self._of_any_layout(effect), ()) if self.unequal else self._divide(effect)
        order = ToOthers((RankCommand(self._number, generation, same),), own)
        place = next((i for i, x in enumerate(self._effects[::-1]) if not isinstance(x, ToSelf)), None)
        before = self._effects[~place] if place is not None else None
        if place is not None and isinstance(before, ToOthers) and not own and not before.own:
            # The others get both commands in one message; rank 0 performs none of them before.
            self._effects[~place] = ToOthers(before.commands + order.commands)
        else:
            self._effects.append(order)
        # Rank 0 last: the command may end this process.
        last = self._of_rank_0(effect, same, own)
        self._effects.append(ToSelf(RankCommand(self._number, generation, last)))

    def _of_rank_0(self, effect: RankEffect, same: RankEffect, own: tuple[Own, ...]) -> RankEffect:
        if isinstance(effect, io.Publish | io.Apply) and effect.prepared is not None and not self.unequal:
            prepared = effect.prepared
            result = self._reduced[prepared.epoch, prepared.step][0]
            return replace(effect, prepared=replace(prepared, gradient_digest=result.gradient_digest))
        if isinstance(effect, io.LinkUp | io.Switch):
            return effect
        return with_own(same, own[0]) if own else same

    def _divide(self, effect: RankEffect) -> tuple[RankEffect, tuple[Own, ...]]:
        """The effect without what differs by rank, and what each rank gets for itself."""
        if isinstance(effect, io.LinkUp | io.Switch):
            own = addresses_by_rank(effect.record, self.size)
            return replace(effect, record=without_own(effect.record)), own
        if isinstance(effect, io.Publish | io.Apply) and effect.prepared is not None:
            # Each rank knows its own digest.
            return replace(effect, prepared=replace(effect.prepared, gradient_digest="")), ()
        if isinstance(effect, io.FetchState | io.FetchGradient):
            own = tuple(self._urls(effect.urls, rank) for rank in range(self.size))
            if isinstance(effect, io.FetchState):
                return replace(effect, urls=(), lanes=effect.urls), own
            return replace(effect, urls=()), own
        return effect, ()

    def _of_any_layout(self, effect: RankEffect) -> RankEffect:
        """The same effect for every rank: each finds its part in the servers of members in any layout."""
        if isinstance(effect, io.FetchState):
            return replace(effect, lanes=effect.urls)
        newest = self.member.epochs.newest
        if isinstance(effect, io.FetchGradient) and newest is not None:
            sources = [x for x in newest.roster if x.ckpt in effect.urls]
            return replace(effect, members=tuple(sources[:_MAX_MEMBERS]))
        return effect

    def _urls(self, urls: tuple[str, ...], rank: int) -> tuple[str, ...]:
        """The checkpoint servers of ``rank`` in the replicas that serve ``urls``."""
        servers = list(urls_of_rank(urls, rank))
        newest = self.member.epochs.newest
        for x in newest.roster if newest is not None and rank else ():
            if x.ckpt in urls and rank < len(x.addresses):
                servers.extend(urls_of_rank((x.addresses[rank].ckpt,), rank))
        return tuple(dict.fromkeys(servers))

    def _snapshot(self, step: int, durable: bool = False) -> None:
        key = (self.member.memory.state.generation, step)
        if durable:
            self._durable.add(key)
        if key in self._snapshots or key in self._naming:
            return  # a snapshot of this state is under way: its end answers
        self._snapshots[key] = {}
        self._number += 1
        self._send(io.TakeSnapshot(step, self.member.memory.state.generation))

    # --- the ranks' outcomes, to the core ----------------------------------------------------------

    def _take(self, ranks: Ranked, events: Sequence[Any], number: int, now: float) -> None:
        """Take an event of each of ``ranks``, all of one kind."""
        first = events[0]
        if self.over:
            return
        if isinstance(first, io.Digested):
            self._on_digested(ranks, events, now)
        elif isinstance(first, _MAIN):
            self._on_main(ranks, events, now)
        elif isinstance(first, io.Streaming):
            self._on_streaming(ranks, events, now)
        elif isinstance(first, io.Linked):
            self._on_linked(ranks, first, now)
        elif isinstance(first, io.Exchanged):
            self._on_exchanged(ranks, events, now)
        elif isinstance(first, io.StateFetched | io.FetchFailed):
            self._on_state(ranks, events, number, now)
        elif isinstance(first, io.GradientFetched | io.GradientGone):
            self._on_gradient(ranks, events, number, now)
        elif isinstance(first, io.Snapshotted):
            self._on_snapshotted(ranks, events)
        elif isinstance(first, SnapshotNamed):
            self._on_named(ranks, events, now)
        else:
            for rank, event in zip(ranks, events, strict=True):
                self._on_one(rank, event, now)

    def _on_one(self, rank: int, event: RankEvent, now: float) -> None:
        """Take what one rank says and the others do not answer."""
        if isinstance(event, io.LoopRaised):
            # The other ranks are stuck in a collective with this rank, or soon will be: do not wait for them.
            self._record_event(replace(event, why=self._by(rank, event.why)), now)
        elif isinstance(event, io.LinkFailed):
            self._linked.get(event.epoch, set()).discard(rank)
            self._record_event(replace(event, why=self._by(rank, event.why)), now)
        elif isinstance(event, io.ExchangeFailed):
            self._reduced.pop((event.epoch, event.step), None)
            self._record_event(replace(event, why=self._by(rank, event.why)), now)
        elif isinstance(event, io.Busy | io.Noticed | io.Saved):
            self._record_event(event, now)
        elif isinstance(event, RankLost):
            self.lost = True
            reason = f"rank {event.rank} of this replica is lost ({event.why}): all ranks start again"
            self._stop(RESTART, reason)
        else:
            assert isinstance(event, SnapshotDue)
            self._snapshot(event.step, event.durable)

    def _on_main(self, ranks: Ranked, events: Sequence[RankEvent], now: float) -> None:
        self._main.update(zip(ranks, events, strict=True))
        if len(self._main) < self.size:
            return
        outcomes, self._main = [self._main[rank] for rank in range(self.size)], {}
        failed = [(rank, e) for rank, e in enumerate(outcomes) if isinstance(e, io.InstallFailed)]
        if failed:
            self._record_event(io.InstallFailed(self._by(failed[0][0], failed[0][1].why)), now)
            return
        first = outcomes[0]
        if not self._stand_together(outcomes):
            return
        if isinstance(first, io.Ready):
            ready = [event for event in outcomes if isinstance(event, io.Ready)]
            later = any(event.later for event in ready)
            digest = "" if later else self._together([event.digest for event in ready])
            times = replica_times([event.times for event in ready], self.stages)
            self._record_event(replace(first, digest=digest, later=later, times=times), now)
        elif isinstance(first, io.Computed):
            self._on_computed(first, outcomes, now)
        elif isinstance(first, io.Installed):
            digest = self._together([e.digest for e in outcomes if isinstance(e, io.Installed)])
            self._record_event(replace(first, digest=digest), now)
        else:
            assert isinstance(first, io.Closing)
            self._closing = first
            self._close_when_kept(now)

    def _stand_together(self, outcomes: Sequence[RankEvent]) -> bool:
        """Whether all ranks answer the same command; stop the replica otherwise."""
        first = outcomes[0]
        for rank, event in enumerate(outcomes):
            if type(event) is not type(first) or getattr(event, "step", 0) != getattr(first, "step", 0):
                self._stop(
                    FAILED,
                    f"rank 0 stands at {_where(first)} and rank {rank} at {_where(event)}: the ranks of a "
                    "replica must run the same loop, with the same data and number of steps",
                )
                return False
        return True

    def _on_digested(self, ranks: Ranked, events: Sequence[io.Digested], now: float) -> None:
        """Collect the ranks' digests. No other TellDigest comes before all ranks have answered this one."""
        self._digested.update(zip(ranks, events, strict=True))
        if len(self._digested) < self.size:
            return
        digests = [self._digested.pop(rank) for rank in range(self.size)]
        if self._stand_together(digests):
            digest = self._together([event.digest for event in digests])
            self._record_event(replace(digests[0], digest=digest), now)

    def _close_when_kept(self, now: float) -> None:
        """Finish after the snapshot under way, which may be the job's last durable checkpoint."""
        if self._closing is not None and not self._snapshots and not self._naming:
            closing, self._closing = self._closing, None
            self._record_event(closing, now)

    def _on_streaming(self, ranks: Ranked, events: Sequence[io.Streaming], now: float) -> None:
        """Tell the core when the last backward has begun at every rank, so that each can send its buckets."""
        self._streaming.update(zip(ranks, events, strict=True))
        weights: list[tuple[float, Metrics]] = [(e.weight, ()) for _, e in sorted(self._streaming.items())]
        if len(weights) == self.size and (share := self._share(events[0].step, weights)) is not None:
            self._record_event(io.Streaming(events[0].step, share[0]), now)

    def _on_computed(self, first: io.Computed, outcomes: list[Any], now: float) -> None:
        self._streaming.clear()
        share = self._share(first.step, [(e.weight, e.metrics) for e in outcomes])
        if share is not None:
            redo = next((e.redo for e in outcomes if e.redo), "")
            self._record_event(io.Computed(first.step, first.micro_batches, *share, redo), now)

    def _share(self, step: int, shares: list[tuple[float, Metrics]]) -> tuple[float, Metrics] | None:
        """Return the replica's weight and metrics. Stop the replica where its ranks disagree."""
        try:
            weight, metrics = replica_share(self.groups, shares)
        except ProtocolError as error:
            self._stop(FAILED, f"step {step}: {error}")
            return None
        return weight * (len(set(self.groups)) if self.unequal else 1), metrics

    def _on_linked(self, ranks: Ranked, event: io.Linked, now: float) -> None:
        linked = self._linked.setdefault(event.epoch, set())
        linked.update(ranks)
        if len(linked) == self.size:
            self._record_event(event, now)

    def _on_exchanged(self, ranks: Ranked, events: Sequence[io.Exchanged], now: float) -> None:
        """Tell the core of the exchange when every rank has reduced its shard."""
        event = events[0]
        key = (event.epoch, event.step)
        results = self._reduced.setdefault(key, {})
        while len(self._reduced) > _MAX_ROUNDS:
            del self._reduced[next(iter(self._reduced))]
        results.update(zip(ranks, events, strict=True))
        if len(results) < self.size:
            return
        shards = [results[r] for r in range(self.size)]
        digest = self._together([x.gradient_digest for x in shards])
        nonfinite = next((x.nonfinite for x in shards if x.nonfinite), "")
        own = next((x.nonfinite_input for x in shards if x.nonfinite_input), "")
        self._record_event(io.Exchanged(event.epoch, event.step, digest, nonfinite, own), now)

    def _together(self, digests: list[str]) -> str:
        return summed_digest(digests) if self.unequal else replica_digest(digests)

    def _on_state(self, ranks: Ranked, events: Sequence[RankEvent], number: int, now: float) -> None:
        fetching = self._fetching
        if number != fetching.number:
            return
        fetching.ended.update(zip(ranks, events, strict=True))
        if len(fetching.ended) < self.size:
            return  # a rank that still writes into its memory must end its fetch before another fetch begins
        command, self._fetching = fetching.command, _Fetching()
        assert isinstance(command, io.FetchState)
        failed = [(r, e) for r, e in sorted(fetching.ended.items()) if isinstance(e, io.FetchFailed)]
        if failed:
            rank, first = next((x for x in failed if x[1].misfit or x[1].restart), failed[0])
            unusable = any(e.unusable for _, e in failed)
            self._record_event(replace(first, why=self._by(rank, first.why), unusable=unusable), now)
        else:
            self._record_event(io.StateFetched(command.state.step, command.state.digest), now)

    def _on_gradient(self, ranks: Ranked, events: Sequence[RankEvent], number: int, now: float) -> None:
        fetching, event = self._fetching, events[0]
        if number != fetching.number:
            return
        fetching.ended.update(zip(ranks, events, strict=True))
        if isinstance(event, io.GradientGone):
            # Without this rank's gradient the other ranks' gradients are useless.
            self._command(io.CancelFetch())
            self._record_event(replace(event, why=self._by(ranks[0], event.why)), now)
        elif len(fetching.ended) == self.size:
            self._fetching = _Fetching()
            assert isinstance(event, io.GradientFetched)
            ended = [fetching.ended[r] for r in range(self.size)]
            digests = [e.gradient_digest for e in ended if isinstance(e, io.GradientFetched)]
            # With unequal layouts every rank knows the digest of the round, which is the replica's digest.
            digest = digests[0] if self.unequal else replica_digest(digests)
            self._record_event(io.GradientFetched(event.step, digest), now)

    def _on_snapshotted(self, ranks: Ranked, events: Sequence[io.Snapshotted]) -> None:
        event = events[0]
        key = (event.generation, event.step)
        digests = self._snapshots.get(key)
        if digests is None:
            return
        digests.update(zip(ranks, (x.digest for x in events), strict=True))
        if len(digests) == self.size:
            del self._snapshots[key]
            digest = self._together([digests[r] for r in range(self.size)])
            self._naming[key] = (digest, {})
            named = tuple(digests[r] for r in range(self.size)) if digest else ()
            self._number += 1
            durable = key in self._durable
            self._durable.clear()
            self._send(NameSnapshot(event.step, event.generation, named, durable))

    def _on_named(self, ranks: Ranked, events: Sequence[SnapshotNamed], now: float) -> None:
        event = events[0]
        key = (event.generation, event.step)
        if key not in self._naming:
            return
        digest, done = self._naming[key]
        done.update(zip(ranks, (x.done for x in events), strict=True))
        if len(done) == self.size:
            del self._naming[key]
            named = digest if all(done.values()) else ""
            self._record_event(io.Snapshotted(event.step, named, event.generation), now)
            if key in self._durable and self.member.serving.saving == event.step:
                # The order to save came after the ranks were told the name. They still wait at this step.
                self._snapshot(event.step, durable=True)
            self._close_when_kept(now)

    # --- the end -----------------------------------------------------------------------------------

    def _stop(self, code: int, reason: str) -> None:
        if self.over:
            return
        self._command(io.Stop(code, reason))

    def _by(self, rank: int, why: str) -> str:
        return f"rank {rank}: {why}" if rank else why


def _where(event: RankEvent) -> str:
    if isinstance(event, io.Closing):
        return "the end of its loop"
    return f"step {getattr(event, 'step', '?')} ({type(event).__name__})"


class FollowerRank:
    """A rank other than 0: it performs commands in their order, and answers them.

    ``speaker``: the rank that passes on rank 0's commands, the first rank of this host; or rank 0.
    """

    def __init__(self, rank: int, speaker: int = 0) -> None:
        if rank < 1:
            raise IllegalTransition(f"rank {rank} follows no other rank")
        self.rank = rank
        self.speaker = speaker
        self.generation = 0
        self.current: Record | None = None
        self.newest: Record | None = None
        self.over = False
        self._digests: dict[tuple[int, int], str] = {}  # round -> the digest of this rank's part

    def tell(self, event: RankEvent) -> None:
        """Note an outcome that this rank tells rank 0."""
        if isinstance(event, io.Exchanged):
            self._digests[event.epoch, event.step] = event.gradient_digest
            while len(self._digests) > _MAX_ROUNDS:
                del self._digests[next(iter(self._digests))]

    def obey(self, command: RankCommand) -> RankEffect | None:
        """Return the effect to perform now; None after the end."""
        if self.over:
            return None
        effect = command.effect
        self.generation = command.generation
        if isinstance(effect, io.LinkUp):
            self.newest = effect.record
        elif isinstance(effect, io.Switch):
            self.current = effect.record
        elif isinstance(effect, io.Finish | io.Stop):
            self.over = True
        elif isinstance(effect, io.Publish | io.Apply) and effect.prepared is not None:
            prepared = effect.prepared
            digest = prepared.gradient_digest or self._digests.get((prepared.epoch, prepared.step), "")
            return replace(effect, prepared=replace(prepared, gradient_digest=digest))
        return effect

    def lost(self, why: str) -> io.Stop | None:
        """Stop, because the link over which commands come has ended."""
        if self.over:
            return None
        self.over = True
        reason = f"rank {self.speaker} of this replica is lost ({why}): all ranks start again"
        return io.Stop(RESTART, reason)


class HostVoice:
    """The first rank of a host that is not rank 0's: it sums up the outcomes of the host's ranks for rank 0.

    Rank 0 waits until every rank has answered, so an outcome waits here for those of the host's other ranks.
    An outcome that one rank alone has goes at once, after all that wait: the order of each rank stays.
    """

    def __init__(self, ranks: Ranked, size: int) -> None:
        self.ranks = tuple(ranks)
        self._timed = size <= MOST_TIMED_RANKS  # whether rank 0 wants the times of every rank
        self._waiting: list[tuple[int, RankOutcome]] = []
        self._told: dict[object, set[int]] = {}  # question -> the ranks that have answered it

    def take(self, rank: int, outcome: RankOutcome) -> list[FromHost]:
        """Take an outcome of one rank; return the messages for rank 0."""
        event = outcome.event
        if isinstance(event, io.Ready) and event.times is not None and not self._timed:
            times = event.times if event.times.measured else None
            outcome = replace(outcome, event=replace(event, times=times))
        self._waiting.append((rank, outcome))
        question = _question(outcome)
        if question is not None:
            answered = self._told.setdefault(question, set())
            is_first = rank not in answered
            answered.add(rank)
            if is_first and len(answered) < len(self.ranks) and len(self._told) <= _MAX_QUESTIONS:
                return []
            if question in _ASKED_ONE_AT_A_TIME and len(answered) == len(self.ranks):
                del self._told[question]
            while len(self._told) > _MAX_QUESTIONS:
                del self._told[next(iter(self._told))]
        return self._sum_up()

    def _sum_up(self) -> list[FromHost]:
        waiting, self._waiting = self._waiting, []
        groups: list[tuple[object, dict[int, RankOutcome]]] = []
        for rank, outcome in waiting:
            kind = type(outcome.event), _question(outcome)
            if not groups or groups[-1][0] != kind or rank in groups[-1][1]:
                groups.append((kind, {}))
            groups[-1][1][rank] = outcome
        return [
            FromHost(tuple(sums), tuple(x.event for x in sums.values()), next(iter(sums.values())).number)
            for _, sums in groups
        ]


# The questions that rank 0 asks again only when all have answered; others have a number, a round or a step.
_ASKED_ONE_AT_A_TIME = ("main", "digest", "backward")
_MAX_QUESTIONS = 64


def _question(outcome: RankOutcome) -> object:
    """Name what every rank answers with such an outcome; None where other ranks need not answer."""
    event = outcome.event
    if isinstance(event, _MAIN):
        return "digest" if isinstance(event, io.Digested) else "main"
    if isinstance(event, io.Streaming):
        return "backward"
    if isinstance(event, io.Linked):
        return "links", event.epoch
    if isinstance(event, io.Exchanged):
        return "round", event.epoch, event.step
    if isinstance(event, io.StateFetched | io.FetchFailed | io.GradientFetched):
        return "fetch", outcome.number
    if isinstance(event, io.Snapshotted | SnapshotNamed):
        return type(event).__name__, event.generation, event.step
    return None
