"""Worlds whose replicas have several ranks: the real ``Ranks`` at rank 0, ``FollowerRank`` at the others.

Every rank is a process with a main thread, a data plane, fetches and a checkpoint server of its own; what it
sees of the job is its ``Lane``: the same rank of the other replicas, and checks that are its own. Commands
and outcomes travel as bytes of the real codec. Replicas of more than two ranks have two hosts: the first rank
of the second host speaks for it. The faults kill and stop ranks and hosts, and cut them off from each other.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any, get_args

from msgspec.structs import replace
from sim.checkers import demand
from sim.faults import Aims
from sim.main_thread import MainThread
from sim.network import Connection, End
from sim.server import Server, digest_of
from sim.trainer import Trainer
from sim.world import World

from fabric.model import RankAddress, SnapshotRef
from fabric.protocol.member.core import MemberCore
from fabric.protocol.member.state import MemberConfig
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import rank_messages as ro
from fabric.protocol.ranks import FollowerRank, HostVoice, Ranks, ToOthers, ToSelf

_OUTCOMES = get_args(ro.RankEvent)
_FETCHED = (io.StateFetched, io.FetchFailed, io.GradientFetched, io.GradientGone)
RANK_FAULTS = (
    "kill rank",
    "kill rank",
    "pause rank",
    "reset rank link",
    "kill rank server",
    "kill rank host",
)
# A fault of a rank comes at a random time, or at one of these events of a replica.
RANK_TRIGGERS = ("commit vote", "resume", "install", "fetch", "abort")
REQUIRED = (
    *sorted({f"fault: {kind}" for kind in RANK_FAULTS}),
    "path: a rank lost ends its replica",
    "path: rank 0 lost ends the others",
    "path: a voice lost ends its host's ranks",
    "path: a voice reports a lost rank",
    "path: a host speaks once",
    "path: one lane fails first",
    "path: a part of a snapshot is missing",
    "path: a snapshot of all ranks",
    "path: installed by all ranks",
    "path: streamed",
    "path: aborted while streaming",
    "path: a streamed gradient was changed",
    "path: replay",
    "path: cold start",
    "path: join",
    "path: committed by Resume",
    "path: eviction for a rank",
    "finish",
)


def hosts_of(ranks: int) -> tuple[tuple[int, ...], ...]:
    """The hosts of a replica of so many ranks."""
    return ((0,), (1,)) if ranks == 2 else (tuple(range(ranks - 2)), (ranks - 2, ranks - 1))


class Lane:
    """The world as rank ``rank`` of every replica sees it."""

    def __init__(self, world: "RankWorld", rank: int) -> None:
        self.world = world
        self.rank = rank
        self.by_key: dict[tuple[str, int], Following] = {}
        self.hosts_servers: dict[str, Server] = {}
        self.numbers: Counter[str] = Counter()
        settings = world.settings
        self.checks = world.checks_class(settings.micro_batches, settings.min_replicas, settings.sharing)
        self.checks.rank = rank
        self.checks.records, self.checks.by_epoch = world.checks.records, world.checks.by_epoch
        self.checks.lost_generations = world.checks.lost_generations

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def trainer(self, key: tuple[str, int]) -> "Following | None":
        found = self.by_key.get(key)
        return found if found is not None and found.alive else None

    def living(self) -> "list[Following]":
        return [t for t in self.by_key.values() if t.alive]

    def happened(self, what: str, host: str) -> None:
        """Pass on a trigger of rank 0, for which faults wait."""

    def initial_digest(self, host: str) -> str:
        return digest_of("initial", self.rank, host if self.settings.different_starts else "same")

    def ensure_server(self, trainer: Trainer) -> Server:
        return self.server_of(trainer.host, trainer)

    def server_of(self, host: str, trainer: "Trainer | None" = None) -> Server:
        """Return this rank's living checkpoint server; start one if needed."""
        server = self.hosts_servers.get(host)
        if server is None or not server.alive:
            self.numbers[host] += 1
            server = Server(self.clockwork, self.world, host, self.numbers[host])
            server.rank, server.url = self.rank, f"http://{host}.{self.rank}/{self.numbers[host]}"
            server.ckpt = f"{server.url}#{self.rank}"
            self.world.servers[server.url] = self.hosts_servers[host] = server
            if trainer is not None:
                server.attach(trainer)
        return server

    def exited(self, trainer: Trainer, code: int, reason: str) -> None:
        if "rank 0 of this replica is lost" in reason:
            self.clockwork.counts["path: rank 0 lost ends the others"] += 1
        elif "of this replica is lost" in reason and trainer.core.follower.speaker:
            self.clockwork.counts["path: a voice lost ends its host's ranks"] += 1
        self.end(trainer)

    def end(self, trainer: Trainer) -> None:
        """Note that the process has ended, for any reason."""
        if trainer.alive:
            trainer.kill()
            self.network.death(trainer)
            trainer.server.after(self.clockwork.between(0.0, 0.01), trainer.server.status)


class RankMain(MainThread):
    """The user's loop at one rank; a snapshot gets its name when all ranks have their parts."""

    def start(self) -> None:
        self.unnamed: dict[tuple[int, int], str] = {}
        self._ready()
        if isinstance(self.trainer, Heading) and not self.trainer.core.member.serving.snapshots:
            self.trainer.feed(ro.SnapshotDue(0))

    def _is_alone(self) -> bool:
        """As `RankEngine.may_be_asked`: the ranks would learn of another replica at different times."""
        return False

    def snapshot(self, generation: int) -> None:
        """Take a snapshot when rank 0 orders it."""
        if isinstance(self.trainer, Heading):
            self.trainer.feed(ro.SnapshotDue(self.step))

    def take(self, order: io.TakeSnapshot) -> None:
        step, generation = order.step, order.generation
        trainer, digest, server = self.trainer, self.digest, self.trainer.server
        demand(step == self.step, f"a snapshot of step {step} with the state at {self.step}")
        if not server.alive:
            trainer.server = trainer.world.ensure_server(trainer)
            trainer.feed(io.Snapshotted(step, "", generation))
            return
        server.take_slot()

        def copied() -> None:
            if server.alive:
                self.unnamed[generation, step] = digest
                while len(self.unnamed) > 2:
                    del self.unnamed[next(iter(self.unnamed))]
            trainer.feed(io.Snapshotted(step, digest if server.alive else "", generation))

        trainer.after(trainer.clockwork.between(0.002, 0.04), copied)

    def name(self, order: ro.NameSnapshot) -> None:
        trainer, counts = self.trainer, self.trainer.clockwork.counts
        digest = self.unnamed.pop((order.generation, order.step), "")
        done = bool(digest and order.digests) and trainer.server.alive
        counts["path: a part of a snapshot is missing"] += not done
        counts["path: a snapshot of all ranks"] += done
        if done:
            ref = SnapshotRef(order.generation, order.step, ro.replica_digest(order.digests))
            trainer.world.parts[trainer.rank, ref] = digest
            trainer.server.publish_snapshot(ref)
        trainer.feed(ro.SnapshotNamed(order.step, order.generation, done))

    def _install(self, order: io.Install) -> None:
        trainer, arrived = self.trainer, self.trainer.transfer.state
        demand(arrived is not None and arrived.digest == order.digest, "told to install another state")
        assert arrived is not None
        self.gradient = ()

        def loaded() -> None:
            self.step, self.digest = arrived.step, trainer.world.parts[trainer.rank, arrived]
            if trainer.server.alive:
                trainer.server.publish_snapshot(arrived)
            trainer.world.happened("install", trainer.host)
            trainer.clockwork.counts["path: installed by all ranks"] += trainer.rank == 0
            self.close_when_loaded()
            self.said = self.digest
            trainer.feed(io.Installed(order.step, self.digest, last=self.closing))

        self._work(trainer.clockwork.between(0.005, 0.05), loaded)


class _Core(Ranks):
    """The real class, with the fields of the member core that the simulated shell reads."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["member"], name)


class Heading(Trainer):
    """Rank 0."""

    main_class = RankMain
    rank = 0

    def __init__(self, clockwork: Any, world: "RankWorld", *rest: Any) -> None:
        super().__init__(clockwork, world, *rest)
        self.rank_links: dict[tuple[int, ...], Connection] = {}  # the ranks that a link speaks for
        self.number = 0
        member = self.core
        self.core = _Core(member, tuple(range(world.ranks)))
        self._performers[ro.NameSnapshot] = self.main.name

    def join_up(self, followers: "list[Following]") -> None:
        """Link the ranks of the replica."""
        member = self.core.member
        ranks = tuple(RankAddress(f"{x.host}.{x.rank}", x.server.ckpt) for x in followers)
        servers = [x.server.memory.snapshots for x in followers]
        snapshots = tuple(s for s in member.serving.snapshots if all(s in held for held in servers))
        digests = [self.main.digest, *(x.main.digest for x in followers)]
        digest, config = ro.replica_digest(digests), member.context.config
        identity = replace(member.context.identity, ranks=ranks, digest=digest, snapshots=snapshots)
        self.core = _Core(MemberCore(identity, config, self.clock()), self.core.groups)
        self.link_ranks(followers)

    def link_ranks(self, followers: "list[Following]") -> None:
        """Link each host's first rank to this one, and the other ranks of a host to its first one."""
        for ranks in hosts_of(len(followers) + 1):
            first, *others = ranks
            if first:
                self._link(followers[first - 1], ranks)
                followers[first - 1].speak_for(ranks, [followers[rank - 1] for rank in others])
            else:
                for rank in others:
                    self._link(followers[rank - 1], (rank,))

    def _link(self, follower: "Following", ranks: tuple[int, ...]) -> None:
        rank, counts = follower.rank, self.clockwork.counts

        def heard(data: object) -> None:
            said = ro.decode_outcomes(data, ranks)  # type: ignore[arg-type]
            events = said.events
            if isinstance(events[0], io.ExchangeFailed):
                counts["path: one lane fails first"] += self.core.rounds.round is not None
            counts["path: a host speaks once"] += len(events) > 1
            counts["path: a voice reports a lost rank"] += isinstance(events[0], ro.RankLost)
            self.feed(said)

        near = End(self, self.host, heard, lambda why: self.feed(ro.RankLost(rank, why)))
        far = End(follower, follower.host, follower.hear, follower.miss)
        self.rank_links[ranks] = connection = Connection(self.world.network, near, far)
        follower.link = (connection, 1)

    def feed(self, event: Any) -> None:
        if isinstance(event, _OUTCOMES):
            event = ro.FromHost((0,), (event,), self.number if isinstance(event, _FETCHED) else 0)
        super().feed(event)

    def _perform(self, effect: Any) -> None:
        if isinstance(effect, ToOthers):
            for command in effect.commands:
                message = ro.HostCommands(command)
                for ranks, connection in self.rank_links.items():
                    connection.send(0, message.of(tuple(effect.own[rank] for rank in ranks if effect.own)))
        elif not isinstance(effect, ToSelf):
            super()._perform(effect)
        elif isinstance(effect.command.effect, io.Stop) and self.core.lost:
            self.exit(effect.command.effect.code, effect.command.effect.reason)
        else:
            if isinstance(effect.command.effect, io.FetchState | io.FetchGradient):
                self.number = effect.command.number
            super()._perform(effect.command.effect)


class _Obeying:
    """The part of a follower that the shell around a core reads."""

    def __init__(self, rank: int, config: MemberConfig) -> None:
        self.follower = self.epochs = FollowerRank(rank)
        self.memory = SimpleNamespace(state=self.follower)
        self.context = SimpleNamespace(config=config)

    def next_deadline(self) -> None:
        return None


class Always(dict):  # type: ignore[type-arg]
    """The empty set of peers of a follower, which has no control links to other replicas."""

    def __contains__(self, key: object) -> bool:
        return True


class Following(Trainer):
    """Rank 1 and up; its world is its lane."""

    main_class = RankMain

    def __init__(self, clockwork: Any, lane: Lane, *rest: Any) -> None:
        self.rank = lane.rank
        super().__init__(clockwork, lane, *rest)  # type: ignore[arg-type]
        self.name += f"/{lane.rank}"
        self.core = _Obeying(lane.rank, lane.settings.member)  # type: ignore[assignment]
        self.link: tuple[Connection, int] | None = None
        self.voice: HostVoice | None = None  # of the first of several ranks of a host
        self.host_links: dict[int, Connection] = {}  # to the other ranks that this one speaks for
        self.number = 0
        self.links.up = Always()
        self._performers[ro.NameSnapshot] = self.main.name

    def _connect(self) -> None:
        """Connect rank 0 to the lighthouse; other ranks have no session."""

    def wait_in_ring(self, replica: str) -> None:
        """Report the awaited member, at rank 0 only."""

    def feed(self, event: Any) -> None:
        if not self.alive or not isinstance(event, _OUTCOMES):
            return
        if self.paused:
            self.run(lambda: self.feed(event))
            return
        assert self.link is not None
        if self.clockwork.tracing:
            self.clockwork.trace(self.name, f"< {event}")
        self.core.follower.tell(event)
        outcome = ro.RankOutcome(event, self.number if isinstance(event, _FETCHED) else 0)
        if self.voice is None:
            self.link[0].send(self.link[1], ro.encode_outcome(outcome))
        else:
            self._say(self.rank, outcome)

    def speak_for(self, ranks: tuple[int, ...], others: "list[Following]") -> None:
        """Be the voice of ``ranks``: this one, and ``others`` on its host."""
        self.voice = HostVoice(ranks, ranks[-1] + 1) if others else None
        for other in others:
            self._link(other)

    def _link(self, other: "Following") -> None:
        def heard(data: object) -> None:
            said = ro.decode_outcomes(data, (other.rank,))  # type: ignore[arg-type]
            self._say(other.rank, ro.RankOutcome(said.events[0], said.number))

        def lost(why: str) -> None:
            if not self.core.follower.over:
                self._say(other.rank, ro.RankOutcome(ro.RankLost(other.rank, why)))

        near = End(self, self.host, heard, lost)
        far = End(other, other.host, other.hear, other.miss)
        self.host_links[other.rank] = connection = Connection(self.world.network, near, far)
        other.link, other.core.follower.speaker = (connection, 1), self.rank

    def _say(self, rank: int, outcome: ro.RankOutcome) -> None:
        assert self.voice is not None and self.link is not None
        for said in self.voice.take(rank, outcome):
            self.link[0].send(self.link[1], ro.encode_outcomes(said))

    def hear(self, data: object) -> None:
        own, *others = ro.commands_by_rank(data, 1 + len(self.host_links))  # type: ignore[arg-type]
        for connection, part in zip(self.host_links.values(), others, strict=True):
            connection.send(0, part)
        order = ro.decode_command(own)
        effect = self.core.follower.obey(order)
        if isinstance(effect, io.FetchState | io.FetchGradient):
            self.number = order.number
        if effect is not None:
            self._perform(effect)

    def miss(self, why: str) -> None:
        stop = self.core.follower.lost(why)
        if stop is not None:
            for connection in self.host_links.values():
                order = ro.RankCommand(0, self.core.follower.generation, stop)
                connection.send(0, ro.HostCommands(order).of())
            self.exit(stop.code, stop.reason)


class RankWorld(World):
    """Replicas of two to four ranks."""

    trainer_class = Heading
    follower_class = Following
    rank_faults: tuple[str, ...] = RANK_FAULTS
    has_one_lane = False
    # steps take longer, because every operation goes to rank 0 and back over sometimes slow links
    patience = 3

    def __init__(self, seed: int, tracing: bool = False, faultless: bool = False, aims: Aims = ()) -> None:
        self.waiting_faults: list[tuple[str, str]] = []
        super().__init__(seed, tracing, faultless, aims)
        clockwork = self.clockwork
        self.ranks = clockwork.random.choice((2, 3, 4))
        # (rank, snapshot of the replica) -> digest of the rank's part
        self.parts: dict[tuple[int, SnapshotRef], str] = {}
        self.lanes = [Lane(self, rank) for rank in range(1, self.ranks)]
        for _ in range(0 if faultless or self.blackout else clockwork.random.choice((1, 1, 2, 3))):
            kind = clockwork.random.choice(self.rank_faults)
            time = clockwork.between(0.3, 3.0)
            if clockwork.chance(0.5):
                clockwork.at(time, lambda kind=kind: self.strike_rank(kind))
            else:
                trigger = clockwork.random.choice(RANK_TRIGGERS)
                clockwork.at(time, lambda t=trigger, k=kind: self.waiting_faults.append((t, k)))

    def start_trainer(self, name: str) -> None:
        host = self.hosts[name]
        before = host.incarnation
        for lane in self.lanes:
            for left in [t for t in lane.living() if t.host == name and t.incarnation <= before]:
                if host.trainer is None or not host.trainer.alive:
                    lane.end(left)  # the launcher ends the remaining ranks before it starts the replica again
        super().start_trainer(name)
        if host.incarnation == before:
            return
        head = host.trainer
        assert isinstance(head, Heading)
        followers = []
        for lane in self.lanes_of(head):
            server = lane.server_of(name)
            follower = self.follower_class(self.clockwork, lane, name, host.incarnation, server, False)
            lane.by_key[name, host.incarnation] = follower
            followers.append(follower)
        head.join_up(followers)

    def lanes_of(self, trainer: Trainer) -> list[Lane]:
        """The lanes of the ranks above 0 of this rank's replica."""
        return self.lanes

    def exited(self, trainer: Trainer, code: int, reason: str) -> None:
        if "of this replica is lost" not in reason:
            super().exited(trainer, code, reason)
            return
        self.kill_trainer(trainer.host, 0.3)
        self.clockwork.counts["path: a rank lost ends its replica"] += 1

    def happened(self, what: str, host: str) -> None:
        super().happened(what, host)
        for item in [x for x in self.waiting_faults if x[0] == what and host]:
            self.waiting_faults.remove(item)
            self.clockwork.at(0.0, lambda kind=item[1]: self.strike_rank(kind, host))

    def strike_rank(self, kind: str, host: str = "") -> None:
        """Inject the fault at a rank other than 0."""
        clockwork = self.clockwork
        lane = clockwork.random.choice(self.lanes)
        living = [t for t in lane.living() if t.host == host] or lane.living()
        if not living or self.faults.over:
            return
        victim = clockwork.random.choice(living)
        clockwork.trace("FAULT", f"{kind} {victim.name}")
        clockwork.counts[f"fault: {kind}"] += 1
        if kind == "kill rank":
            lane.end(victim)
        elif kind in ("kill rank host", "lose rank host"):
            of_replica = [x.by_key.get((victim.host, victim.incarnation)) for x in self.lanes_of(victim)]
            for rank in hosts_of(1 + len(of_replica))[-1]:
                if (lost := of_replica[rank - 1]) is not None:
                    self.lanes[rank - 1].end(lost)
                    if kind == "lose rank host" and lost.server.alive:
                        lost.server.kill()
                        self.network.death(lost.server)
        elif kind == "pause rank":
            victim.pause()
            clockwork.at(clockwork.between(0.02, 2.0), victim.resume)
            victim.server.after(0.01, victim.server.status)
        elif kind == "reset rank link" and victim.link is not None:
            victim.link[0].reset("connection reset")
        elif kind == "kill rank server" and victim.server.alive:
            victim.server.kill()
            self.network.death(victim.server)

    def run(self) -> None:
        """Run the world; count also evictions because of a rank."""
        super().run()
        evicted = [x for x in self.checks.records if "the process of its rank" in x.reason]
        self.clockwork.counts["path: eviction for a rank"] += len(evicted)


def play(seed: int, tracing: bool = False, faultless: bool = False, aims: Aims = ()) -> RankWorld:
    """Play one world to its end; raise the violation, with the world attached."""
    world = RankWorld(seed, tracing, faultless, aims)
    try:
        world.run()
    except Exception as error:
        error.world = world  # type: ignore[attr-defined]
        raise
    return world
