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
from typing import Any

from msgspec.structs import replace

from fabric.errors import IllegalTransition, ProtocolError
from fabric.exit_codes import FAILED, RESTART
from fabric.model import Record, Value
from fabric.protocol.member.core import MemberCore
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.rank_messages import (
    MOST_TIMED_RANKS,
    FromHost,
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
)

# The most rounds whose digests by rank are kept, because a commit soon follows its round.
_MAX_ROUNDS = 8
# The most members named to a rank as sources of a gradient, because their layouts make long messages.
_MAX_MEMBERS = 4


class EndReplica(Value):
    """The shell ends this replica, for example because a lighthouse refuses it."""

    code: int
    reason: str


class ToOthers(Value):
    """Let every rank but 0 perform these commands, in their order."""

    commands: tuple[RankCommand, ...]
    own: tuple[Own, ...] = ()  # by rank, also 0, what the only command says to it alone; empty: nothing


class ToSelf(Value):
    """Perform this command here, at rank 0."""

    command: RankCommand


Event = io.Event | FromHost | EndReplica
Effect = io.ReplicaEffect | ToOthers | ToSelf

# Outcomes of the main threads. A thread has one command at a time, besides TellDigest, and one outcome of
# each rank makes the answer. The core does not wait for digests, and may give the next command before every
# rank has told its digest.
_MAIN = (io.Ready, io.Computed, io.Installed, io.InstallFailed, io.Closing)
Ranked = Sequence[int]
# A question that every rank answers once, for example ("round", epoch, step).
Question = tuple[str | int, ...]


def question_of(event: RankEvent, number: int) -> Question:
    """Name what every rank answers with such an event; empty where other ranks need not answer.

    ``number``: as in RankOutcome.
    """
    if isinstance(event, _MAIN):
        return ("main",)
    if isinstance(event, io.Digested):
        return ("digest",)
    if isinstance(event, io.Streaming):
        return ("backward",)
    if isinstance(event, io.Linked):
        return ("links", event.epoch)
    if isinstance(event, io.Exchanged):
        return ("round", event.epoch, event.step)
    if isinstance(event, io.StateFetched | io.FetchFailed | io.GradientFetched):
        return ("fetch", number)
    if isinstance(event, io.Snapshotted):
        return ("snapshot", event.generation, event.step)
    if isinstance(event, SnapshotNamed):
        return ("name", event.generation, event.step)
    return ()


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
        # The answers so far, by rank. Those about links and rounds stay when all ranks have answered.
        self._answers: dict[Question, dict[int, RankEvent]] = {}
        self._fetch: RankCommand | None = None  # the fetch under way
        self._closing: io.Closing | None = None  # Closing, held back until the snapshot under way ends
        # Generation and step of each snapshot that becomes a durable checkpoint too.
        self._durable: set[Question] = set()
        self._names: dict[Question, str] = {}  # snapshot that gets its name -> the digest of all ranks
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
        elif isinstance(event, FromHost):
            self._take(event.ranks, event.events, event.number, now)
        else:
            if isinstance(event, io.LinkLost):
                # Only rank 0 has links to other members. As in the core, epochs that list the lost member
                # must be linked again.
                for record in (self.member.epochs.current, self.member.epochs.newest):
                    if record is not None and record.lists(event.replica, event.incarnation):
                        self._answers.get(("links", record.epoch), {}).pop(0, None)
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
            if isinstance(effect, io.ReplicaEffect):
                self._effects.append(effect)
            elif not self.over:
                self._command(effect)

    def _command(self, effect: RankEffect) -> None:
        if isinstance(effect, io.TakeSnapshot):
            self._snapshot(effect.step, effect.durable)
            return
        self._number += 1
        if isinstance(effect, io.FetchState | io.FetchGradient):
            self._fetch = RankCommand(self._number, self.member.memory.state.generation, effect)
            self._answers = {at: x for at, x in self._answers.items() if at[0] != "fetch"}
        elif isinstance(effect, io.CancelFetch):
            self._fetch = None
        elif isinstance(effect, io.Switch):
            epoch = effect.record.epoch
            old = [at for at in self._answers if at[0] == "links" and int(at[1]) < epoch]
            for at in old:
                del self._answers[at]
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
            result = self._answers["round", prepared.epoch, prepared.step][0]
            assert isinstance(result, io.Exchanged)
            return replace(effect, prepared=replace(prepared, gradient_digest=result.gradient_digest))
        if isinstance(effect, io.LinkUp | io.Switch):
            return effect
        return with_own(same, own[0]) if own else same

    def _divide(self, effect: RankEffect) -> tuple[RankEffect, tuple[Own, ...]]:
        """The effect without what differs by rank, and what each rank gets for itself."""
        if isinstance(effect, io.LinkUp | io.Switch):
            own = addresses_by_rank(effect.record, self.size)
            roster = tuple(replace(x, link="", ckpt="", ranks=()) for x in effect.record.roster)
            return replace(effect, record=replace(effect.record, roster=roster)), own
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
        generation = self.member.memory.state.generation
        if durable:
            self._durable.add((generation, step))
        if not self._answers.keys().isdisjoint((("snapshot", generation, step), ("name", generation, step))):
            return  # a snapshot of this state is under way: its end answers
        self._answers["snapshot", generation, step] = {}
        self._number += 1
        self._send(io.TakeSnapshot(step, generation))

    # --- the ranks' outcomes, to the core ----------------------------------------------------------

    def _take(self, ranks: Ranked, events: Sequence[RankEvent], number: int, now: float) -> None:
        """Take an event of each of ``ranks``, all of one kind."""
        if self.over:
            return
        question = question_of(events[0], number)
        if not question:
            for rank, event in zip(ranks, events, strict=True):
                self._on_one(rank, event, number, now)
            return
        if question[0] in ("snapshot", "name") and question not in self._answers:
            return
        if question[0] == "fetch" and not self._is_under_way(number):
            return
        answers = self._answers.setdefault(question, {})
        answers.update(zip(ranks, events, strict=True))
        for old in [at for at in self._answers if at[0] == "round"][:-_MAX_ROUNDS]:
            del self._answers[old]
        if len(answers) == self.size:
            if question[0] not in ("links", "round"):
                del self._answers[question]
            self._on_answers(question, [answers[rank] for rank in range(self.size)], now)

    def _is_under_way(self, number: int) -> bool:
        """Whether the fetch of this number is under way: no later command has ended it."""
        return self._fetch is not None and number == self._fetch.number

    def _on_one(self, rank: int, event: RankEvent, number: int, now: float) -> None:
        """Take what one rank says and the others do not answer."""
        if isinstance(event, io.LoopRaised):
            # The other ranks are stuck in a collective with this rank, or soon will be: do not wait for them.
            self._record_event(replace(event, why=self._by(rank, event.why)), now)
        elif isinstance(event, io.LinkFailed):
            self._answers.get(("links", event.epoch), {}).pop(rank, None)
            self._record_event(replace(event, why=self._by(rank, event.why)), now)
        elif isinstance(event, io.ExchangeFailed):
            self._answers.pop(("round", event.epoch, event.step), None)
            self._record_event(replace(event, why=self._by(rank, event.why)), now)
        elif isinstance(event, io.GradientGone):
            if self._is_under_way(number):
                # Without this rank's gradient the other ranks' gradients are useless.
                self._command(io.CancelFetch())
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

    def _on_answers(self, question: Question, answers: list[Any], now: float) -> None:
        """Take the ``answers`` of all ranks, in their order, to one question."""
        first = answers[0]
        match question[0]:
            case "main" | "digest":
                self._on_main(answers, now)
            case "backward":  # each rank can send its buckets
                if share := self._share(first.step, [(x.weight, ()) for x in answers]):
                    self._record_event(io.Streaming(first.step, share[0]), now)
            case "links":
                self._record_event(first, now)
            case "round":
                digest = self._together([x.gradient_digest for x in answers])
                nonfinite = next((x.nonfinite for x in answers if x.nonfinite), "")
                own = next((x.nonfinite_input for x in answers if x.nonfinite_input), "")
                outcome = io.Exchanged(first.epoch, first.step, digest, nonfinite, own, first.carried)
                self._record_event(outcome, now)
            case "fetch":
                self._on_fetched(answers, now)
            case "snapshot":
                digest = self._together([x.digest for x in answers])
                name = ("name", first.generation, first.step)
                self._answers[name], self._names[name] = {}, digest
                parts = tuple(x.digest for x in answers) if digest else ()
                self._number += 1
                durable = question[1:] in self._durable
                self._durable.clear()
                self._send(NameSnapshot(first.step, first.generation, parts, durable))
            case "name":
                digest = self._names.pop(question)
                named = digest if all(x.done for x in answers) else ""
                self._record_event(io.Snapshotted(first.step, named, first.generation), now)
                if question[1:] in self._durable and self.member.serving.saving == first.step:
                    # The order to save came after the ranks were told the name. They still wait at this step.
                    self._snapshot(first.step, durable=True)
                self._close_when_kept(now)

    def _on_main(self, answers: list[Any], now: float) -> None:
        """Take the answers of all main threads, or the digests that they have told."""
        failed = [(rank, x) for rank, x in enumerate(answers) if isinstance(x, io.InstallFailed)]
        if failed:
            self._record_event(io.InstallFailed(self._by(failed[0][0], failed[0][1].why)), now)
            return
        first: RankEvent = answers[0]
        for rank, event in enumerate(answers):
            if type(event) is not type(first) or getattr(event, "step", 0) != getattr(first, "step", 0):
                self._stop(
                    FAILED,
                    f"rank 0 stands at {_where(first)} and rank {rank} at {_where(event)}: the ranks of a "
                    "replica must run the same loop, with the same data and number of steps",
                )
                return
        if isinstance(first, io.Ready):
            later = any(x.later for x in answers)
            digest = "" if later else self._together([x.digest for x in answers])
            times = replica_times([x.times for x in answers], self.stages)
            self._record_event(replace(first, digest=digest, later=later, times=times), now)
        elif isinstance(first, io.Digested | io.Installed):
            digest = self._together([x.digest for x in answers])
            self._record_event(replace(first, digest=digest), now)
        elif isinstance(first, io.Computed):
            self._answers.pop(("backward",), None)
            if share := self._share(first.step, [(x.weight, x.metrics) for x in answers]):
                redo = next((x.redo for x in answers if x.redo), "")
                self._record_event(io.Computed(first.step, first.micro_batches, *share, redo), now)
        else:
            assert isinstance(first, io.Closing)
            self._closing = first
            self._close_when_kept(now)

    def _close_when_kept(self, now: float) -> None:
        """Finish after the snapshot under way, which may be the job's last durable checkpoint."""
        if self._closing is not None and not any(at[0] in ("snapshot", "name") for at in self._answers):
            closing, self._closing = self._closing, None
            self._record_event(closing, now)

    def _share(self, step: int, shares: list[tuple[float, Metrics]]) -> tuple[float, Metrics] | None:
        """Return the replica's weight and metrics. Stop the replica where its ranks disagree."""
        try:
            weight, metrics = replica_share(self.groups, shares)
        except ProtocolError as error:
            self._stop(FAILED, f"step {step}: {error}")
            return None
        return weight * (len(set(self.groups)) if self.unequal else 1), metrics

    def _together(self, digests: list[str]) -> str:
        return summed_digest(digests) if self.unequal else replica_digest(digests)

    def _on_fetched(self, answers: list[Any], now: float) -> None:
        """Take the end of a fetch: a rank that still wrote into its memory would spoil the next fetch."""
        fetch, self._fetch = self._fetch, None
        failed = [(rank, x) for rank, x in enumerate(answers) if isinstance(x, io.FetchFailed)]
        if failed:
            rank, first = next((x for x in failed if x[1].misfit or x[1].restart), failed[0])
            unusable = any(x.unusable for _, x in failed)
            self._record_event(replace(first, why=self._by(rank, first.why), unusable=unusable), now)
        elif fetch is not None and isinstance(fetch.effect, io.FetchState):
            state = fetch.effect.state
            self._record_event(io.StateFetched(state.step, state.digest), now)
        else:
            digests = [x.gradient_digest for x in answers]
            # With unequal layouts every rank knows the digest of the round, which is the replica's digest.
            digest = digests[0] if self.unequal else replica_digest(digests)
            self._record_event(io.GradientFetched(answers[0].step, digest), now)

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


# The questions that rank 0 asks again only when all have answered; others have a number, a round or a step.
_ASKED_ONE_AT_A_TIME = (("main",), ("digest",), ("backward",))
_MAX_QUESTIONS = 64


class HostVoice:
    """The first rank of a host that is not rank 0's: it sums up the outcomes of the host's ranks for rank 0.

    Rank 0 waits until every rank has answered, so an outcome waits here for those of the host's other ranks.
    An outcome that one rank alone has goes at once, after all that wait: the order of each rank stays.
    """

    def __init__(self, ranks: Ranked, size: int) -> None:
        self.ranks = tuple(ranks)
        self._timed = size <= MOST_TIMED_RANKS  # whether rank 0 wants the times of every rank
        self._waiting: list[tuple[int, RankOutcome]] = []
        self._told: dict[Question, set[int]] = {}  # question -> the ranks that have answered it

    def take(self, rank: int, outcome: RankOutcome) -> list[FromHost]:
        """Take an outcome of one rank; return the messages for rank 0."""
        event = outcome.event
        if isinstance(event, io.Ready) and event.times is not None and not self._timed:
            times = event.times if event.times.measured else None
            outcome = replace(outcome, event=replace(event, times=times))
        self._waiting.append((rank, outcome))
        question = question_of(event, outcome.number)
        if question:
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
            kind = type(outcome.event), question_of(outcome.event, outcome.number)
            if not groups or groups[-1][0] != kind or rank in groups[-1][1]:
                groups.append((kind, {}))
            groups[-1][1][rank] = outcome
        return [
            FromHost(tuple(sums), tuple(x.event for x in sums.values()), next(iter(sums.values())).number)
            for _, sums in groups
        ]
