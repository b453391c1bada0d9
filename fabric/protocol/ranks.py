"""A replica of several ranks (FSDP2, TP, PP inside) as one member of the job. Pure.

Rank 0 runs the member core, which does not know ranks: ``Ranks`` stands between the core and the ranks. Every
effect of the core becomes one command per rank. The outcomes of all ranks become the one event that the core
awaits: linked or exchanged when all ranks are, failed as soon as one fails. So a round is prepared when every
rank has reduced its shard, and a commit is decided once. Commands reach each rank in order over its own link.
A replica's digests combine its ranks' digests. Only rank 0 talks to peers and the leader.

A lost rank ends the replica, because no other process can complete its part of the state.

``FollowerRank`` is the other side: it obeys, answers, and remembers its generation and epoch.
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
    Metrics,
    NameSnapshot,
    RankCommand,
    RankEffect,
    RankEvent,
    RankOutcome,
    SnapshotNamed,
    replica_digest,
    replica_share,
    replica_times,
    seen_by_rank,
    summed_digest,
    urls_of_rank,
)

# The most rounds whose digests by rank are kept, because a commit soon follows its round.
_MAX_ROUNDS = 8
# The most members named to a rank as sources of a gradient, because their layouts make long messages.
_MAX_MEMBERS = 4


@dataclass(frozen=True, slots=True)
class FromRank:
    """An outcome that rank ``rank`` sent; rank 0's own outcomes come as this event too."""

    rank: int
    outcome: RankOutcome


@dataclass(frozen=True, slots=True)
class RankLost:
    """The link to this rank ended."""

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class EndReplica:
    """The shell ends this replica, for example because a lighthouse refuses it."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class ToRank:
    """Let rank ``rank`` perform this command; rank 0 is this process."""

    rank: int
    command: RankCommand


Event = io.Event | FromRank | RankLost | EndReplica
Effect = io.SendPeer | io.SendLeader | io.WriteJournal | io.ClaimAbove | io.Probe | ToRank

# Outcomes of the main threads. A thread has one command at a time, besides TellDigest, and one outcome of
# each rank makes the answer. The core does not wait for digests, and may give the next command before every
# rank has told its digest. Streaming comes before the answer to Compute.
_MAIN = (io.Ready, io.Digested, io.Streaming, io.Computed, io.Installed, io.InstallFailed, io.Closing)
_FETCHES = (io.FetchState, io.FetchGradient)


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

    @property
    def size(self) -> int:
        return len(self.groups)

    # --- the contract ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at time ``now`` (monotonic seconds); return the effects to perform in order."""
        self._effects = []
        if isinstance(event, RankLost):
            self._on_lost(event)
        elif isinstance(event, EndReplica):
            self._stop(event.code, event.reason)
        elif isinstance(event, FromRank):
            if not self.over:
                self._take(event.rank, event.outcome, now)
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
        return None if self.over else self.member.next_deadline()

    # --- the core's effects, to every rank ---------------------------------------------------------

    def _record_event(self, event: io.Event, now: float) -> None:
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
        command: RankCommand | None = None
        for rank in reversed(range(self.size)):  # rank 0 last: the command may end this process
            part = self._part(effect, rank)
            if command is None or part is not command.effect:  # ranks with one part get one object
                command = RankCommand(self._number, self.member.memory.state.generation, part)
            self._effects.append(ToRank(rank, command))

    def _part(self, effect: RankEffect, rank: int) -> RankEffect:
        """The effect for ``rank``: the same effect with the addresses and digests of that rank."""
        if self.unequal:
            return self._of_any_layout(effect)
        if isinstance(effect, io.LinkUp):
            return io.LinkUp(seen_by_rank(effect.record, rank)) if rank else effect
        if isinstance(effect, io.Switch):
            return io.Switch(seen_by_rank(effect.record, rank)) if rank else effect
        if isinstance(effect, io.Publish | io.Apply) and effect.prepared is not None:
            prepared = effect.prepared
            result = self._reduced[prepared.epoch, prepared.step][rank]
            return replace(effect, prepared=replace(prepared, gradient_digest=result.gradient_digest))
        if isinstance(effect, io.FetchState):
            return replace(effect, urls=self._urls(effect.urls, rank), lanes=effect.urls)
        if isinstance(effect, io.FetchGradient):
            return replace(effect, urls=self._urls(effect.urls, rank))
        return effect

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

    def _take(self, rank: int, outcome: RankOutcome, now: float) -> None:
        event = outcome.event
        if isinstance(event, _MAIN):
            self._on_main(rank, event, now)
        elif isinstance(event, io.LoopRaised):
            # The other ranks are stuck in a collective with this rank, or soon will be: do not wait for them.
            self._record_event(replace(event, why=self._by(rank, event.why)), now)
        elif isinstance(event, io.Busy | io.Noticed | io.Saved):
            self._record_event(event, now)
        elif isinstance(event, io.Linked):
            self._on_linked(rank, event, now)
        elif isinstance(event, io.LinkFailed):
            self._linked.get(event.epoch, set()).discard(rank)
            self._record_event(replace(event, why=self._by(rank, event.why)), now)
        elif isinstance(event, io.Exchanged):
            self._on_exchanged(rank, event, now)
        elif isinstance(event, io.ExchangeFailed):
            self._reduced.pop((event.epoch, event.step), None)
            self._record_event(replace(event, why=self._by(rank, event.why)), now)
        elif isinstance(event, io.StateFetched | io.FetchFailed):
            self._on_state(rank, outcome, now)
        elif isinstance(event, io.GradientFetched | io.GradientGone):
            self._on_gradient(rank, outcome, now)
        elif isinstance(event, io.Snapshotted):
            self._on_snapshotted(rank, event)
        elif isinstance(event, SnapshotNamed):
            self._on_named(rank, event, now)
        else:
            self._snapshot(event.step, event.durable)

    def _on_main(self, rank: int, event: RankEvent, now: float) -> None:
        if isinstance(event, io.Digested):
            self._on_digested(rank, event, now)
            return
        if isinstance(event, io.Streaming):
            self._on_streaming(rank, event, now)
            return
        self._main[rank] = event
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
            later = any(event.later for event in outcomes if isinstance(event, io.Ready))
            digest = "" if later else self._digest_of(outcomes)
            ready = [event for event in outcomes if isinstance(event, io.Ready)]
            times = replica_times([event.times for event in ready], self.stages)
            self._record_event(replace(first, digest=digest, later=later, times=times), now)
        elif isinstance(first, io.Computed):
            self._on_computed(first, outcomes, now)
        elif isinstance(first, io.Installed):
            self._record_event(replace(first, digest=self._digest_of(outcomes)), now)
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

    def _on_digested(self, rank: int, event: io.Digested, now: float) -> None:
        """Collect the ranks' digests. No other TellDigest comes before all ranks have answered this one."""
        self._digested[rank] = event
        if len(self._digested) < self.size:
            return
        digests = [self._digested.pop(rank) for rank in range(self.size)]
        if self._stand_together(digests):
            self._record_event(replace(digests[0], digest=self._digest_of(digests)), now)

    def _close_when_kept(self, now: float) -> None:
        """Finish after the snapshot under way, which may be the job's last durable checkpoint."""
        if self._closing is not None and not self._snapshots and not self._naming:
            closing, self._closing = self._closing, None
            self._record_event(closing, now)

    def _on_streaming(self, rank: int, event: io.Streaming, now: float) -> None:
        """Tell the core when the last backward has begun at every rank, so that each can send its buckets."""
        self._streaming[rank] = event
        if len(self._streaming) == self.size:
            share = self._share(event.step, [(e.weight, ()) for _, e in sorted(self._streaming.items())])
            if share is not None:
                self._record_event(io.Streaming(event.step, share[0]), now)

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

    def _on_linked(self, rank: int, event: io.Linked, now: float) -> None:
        ranks = self._linked.setdefault(event.epoch, set())
        ranks.add(rank)
        if len(ranks) == self.size:
            self._record_event(event, now)

    def _on_exchanged(self, rank: int, event: io.Exchanged, now: float) -> None:
        """Tell the core of the exchange when every rank has reduced its shard."""
        key = (event.epoch, event.step)
        results = self._reduced.setdefault(key, {})
        while len(self._reduced) > _MAX_ROUNDS:
            del self._reduced[next(iter(self._reduced))]
        results[rank] = event
        if len(results) < self.size:
            return
        shards = [results[r] for r in range(self.size)]
        reduced = io.Exchanged(
            event.epoch,
            event.step,
            self._together([x.gradient_digest for x in shards]),
            next((x.nonfinite for x in shards if x.nonfinite), ""),
            next((x.nonfinite_input for x in shards if x.nonfinite_input), ""),
        )
        self._record_event(reduced, now)

    def _together(self, digests: list[str]) -> str:
        return summed_digest(digests) if self.unequal else replica_digest(digests)

    def _digest_of(self, events: Sequence[Any]) -> str:
        return self._together([event.digest for event in events])

    def _on_state(self, rank: int, outcome: RankOutcome, now: float) -> None:
        fetching = self._fetching
        if outcome.number != fetching.number:
            return
        fetching.ended[rank] = outcome.event
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

    def _on_gradient(self, rank: int, outcome: RankOutcome, now: float) -> None:
        fetching, event = self._fetching, outcome.event
        if outcome.number != fetching.number:
            return
        fetching.ended[rank] = event
        if isinstance(event, io.GradientGone):
            # Without this rank's gradient the other ranks' gradients are useless.
            self._command(io.CancelFetch())
            self._record_event(replace(event, why=self._by(rank, event.why)), now)
        elif len(fetching.ended) == self.size:
            self._fetching = _Fetching()
            assert isinstance(event, io.GradientFetched)
            ended = [fetching.ended[r] for r in range(self.size)]
            digests = [e.gradient_digest for e in ended if isinstance(e, io.GradientFetched)]
            # With unequal layouts every rank knows the digest of the round, which is the replica's digest.
            digest = digests[0] if self.unequal else replica_digest(digests)
            self._record_event(io.GradientFetched(event.step, digest), now)

    def _on_snapshotted(self, rank: int, event: io.Snapshotted) -> None:
        key = (event.generation, event.step)
        digests = self._snapshots.get(key)
        if digests is None:
            return
        digests[rank] = event.digest
        if len(digests) == self.size:
            del self._snapshots[key]
            digest = self._together([digests[r] for r in range(self.size)])
            self._naming[key] = (digest, {})
            named = tuple(digests[r] for r in range(self.size)) if digest else ()
            self._number += 1
            durable = key in self._durable
            self._durable.clear()
            self._send(NameSnapshot(event.step, event.generation, named, durable))

    def _on_named(self, rank: int, event: SnapshotNamed, now: float) -> None:
        key = (event.generation, event.step)
        if key not in self._naming:
            return
        digest, done = self._naming[key]
        done[rank] = event.done
        if len(done) == self.size:
            del self._naming[key]
            self._record_event(
                io.Snapshotted(event.step, digest if all(done.values()) else "", event.generation), now
            )
            if key in self._durable and self.member.serving.saving == event.step:
                # The order to save came after the ranks were told the name. They still wait at this step.
                self._snapshot(event.step, durable=True)
            self._close_when_kept(now)

    # --- the end -----------------------------------------------------------------------------------

    def _on_lost(self, event: RankLost) -> None:
        if not self.over:
            self.lost = True
            self._stop(
                RESTART, f"rank {event.rank} of this replica is lost ({event.why}): all ranks start again"
            )

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
    """A rank other than 0: it performs commands in their order, and answers them."""

    def __init__(self, rank: int) -> None:
        if rank < 1:
            raise IllegalTransition(f"rank {rank} follows no other rank")
        self.rank = rank
        self.generation = 0
        self.current: Record | None = None
        self.newest: Record | None = None
        self.over = False

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
        return effect

    def lost(self, why: str) -> io.Stop | None:
        """Stop, because the link to rank 0, which decides, has ended."""
        if self.over:
            return None
        self.over = True
        return io.Stop(RESTART, f"rank 0 of this replica is lost ({why}): all ranks start again")
