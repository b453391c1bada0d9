"""One seeded world: a job's hosts, lighthouses, store and network, from the first start to the finish.

A world has faults first (``faults.py``). Then all faults are healed, and the world demands progress within
bounded virtual time: every replica in the roster, further steps, a clean finish.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from sim import coverage
from sim.checkers import Checks, Violation
from sim.clockwork import Clockwork
from sim.cold_checks import ColdStarts
from sim.faults import Aims, Faults
from sim.lighthouse import Lighthouse
from sim.network import Network
from sim.server import Server, digest_of
from sim.store import LEASE_S, Store
from sim.trainer import Trainer

from fabric.model import EVERYTHING, DataPlan, Death, JobEnd, Policy, Sharing, SnapshotRef
from fabric.protocol.leader.core import LeaderConfig
from fabric.protocol.member.state import MemberConfig
from fabric.protocol.messages import leader_events
from fabric.protocol.messages.member_events import PreparedRound

__all__ = ["Settings", "Trainer", "Violation", "World", "run_seed"]

START_LIMIT_S = 20.0
HEAL_LIMIT_S = 40.0
FINISH_LIMIT_S = 30.0
FURTHER_STEPS = 5
# The largest error of a clock's rate; the margin of a cold start after ``autonomy_s`` must cover it twice.
WRONG_CLOCKS = 0.05


class Settings(Struct):
    """The parameters of a world."""

    replicas: int
    lighthouses: int
    micro_batches: int
    compute_s: float
    min_replicas: int
    leader: LeaderConfig
    member: MemberConfig
    different_starts: bool = False
    sharing: Sharing = EVERYTHING
    streaming: bool = False  # the exchange begins during the last backward
    # the (step, micro-batch) pairs that kill the process that computes them
    poison: frozenset[tuple[int, int]] = frozenset()
    replay_s: float = 0.0  # additional seconds of an update that a newcomer replays
    fetch_s: float = 0.0  # additional seconds of some fetches of a state, for some time
    nan_every: int = 0  # period in steps at which the sum is not finite and the update is skipped; 0: never
    shares: tuple[int, ...] = ()  # each replica's share of the work, in their order; empty: equal shares
    spare: str = ""  # the replica that asks to be a spare
    racks: dict[str, str] = {}  # replica -> the rack that it names
    snapshots: float = 0.15  # how likely a replica snapshots a state for itself
    kept: int = 24  # the gradients that a server keeps while a newcomer replays
    busy_every: int = 0  # period in steps at which the user's code announces long work; 0: never


@dataclass(slots=True)
class Host:
    """The host of one replica; ``drained`` after the replica has left for good."""

    name: str
    server: Server
    incarnation: int = 0
    starts: int = 0
    before: tuple[int, ...] = ()  # the incarnations that have run on this host, newest first
    above: int = 0  # the incarnation that a lighthouse told this host to pass
    time_of_day: float = 0.0  # error of this host's time of day, in seconds
    trainer: Trainer | None = None
    drained: bool = False
    finished: bool = False
    restart_due: bool = False
    servers: int = 1
    ended: JobEnd | None = None  # the job's end, as recorded on this host's disk
    started: list[float] = field(default_factory=list)


class World:
    """Built from a seed; ``run`` plays it to the end or raises."""

    trainer_class = Trainer
    checks_class = Checks
    has_one_lane = True  # whether a snapshot of one server is a whole state
    lease_s = LEASE_S  # how long a lighthouse leads without renewing its lease
    carries = False  # whether rings carry contributions
    patience = 1  # the factor by which a step may take longer than in a plain world

    def __init__(
        self,
        seed: int,
        tracing: bool = False,
        faultless: bool = False,
        aims: Aims = (),
    ) -> None:
        self.clockwork = Clockwork(seed, tracing)
        if not faultless and self.clockwork.chance(0.2):
            self.clockwork.skew = WRONG_CLOCKS
            self.clockwork.counts["fault: wrong clocks"] += 1
        self.flipped = False  # whether a bit of some state may be flipped
        self.halted = False  # whether the job has stopped because no member can say whose state is right
        self.settings = self.choose()
        self.checks = self.checks_class(
            self.settings.micro_batches, self.settings.min_replicas, self.settings.sharing
        )
        self.checks.cold_starts = ColdStarts(self)
        self.network = Network(self.clockwork)
        self.store = Store(self.clockwork, self.checks)
        self.store.lease_s = self.lease_s
        # Some jobs end while faults last; other jobs end after all faults are healed.
        self.ends_early = not faultless and self.clockwork.chance(0.15)
        self.until = self.clockwork.random.randrange(3, 25) if self.ends_early else 10**9
        self.hung: set[str] = set()  # hosts whose data plane hangs
        self.lingering: set[str] = set()  # hosts whose main thread hangs in user code
        self.starving: set[str] = set()  # hosts to which no state transfer completes
        self.noteless: set[str] = set()  # hosts whose link to the next member carries no contribution
        self.mute: set[str] = set()  # hosts whose control thread hangs while their other threads run
        self.servers: dict[str, Server] = {}
        self.hosts: dict[str, Host] = {}
        self.lighthouses: dict[str, Lighthouse] = {}
        self.by_key: dict[tuple[str, int], Trainer] = {}
        # Filled by trainers that keep a journal: a host's lines, and committed rounds by (generation, step).
        self.journals: dict[str, list[dict[str, Any]]] = {}
        self.prepared: dict[tuple[int, int], PreparedRound] = {}
        self.blackout = not faultless and not aims and self.clockwork.chance(0.04)
        self.faults = Faults(self, 0 if faultless or self.blackout else None, aims)
        for i in range(self.settings.lighthouses):
            self.start_lighthouse(f"lh{i}")
        for i in range(self.settings.replicas):
            name = f"r{i}"
            self.hosts[name] = Host(name, self._start_server(name, 1))
            self.clockwork.at(self.clockwork.between(0.0, 0.5), lambda name=name: self.start_trainer(name))

    def choose(self) -> Settings:
        return choose_settings(self.clockwork)

    # --- processes ---------------------------------------------------------------------------------

    def start_lighthouse(self, name: str) -> None:
        old = self.lighthouses.get(name)
        if old is None or not old.alive:
            self.lighthouses[name] = Lighthouse(self.clockwork, self, name)

    def find_leader(self, host: str) -> Lighthouse | None:
        """Return the lighthouse to which a client would be redirected."""
        for lighthouse in self.lighthouses.values():
            if lighthouse.leads and not lighthouse.paused:
                return lighthouse if self.network.can_talk(host, lighthouse.name) else None
        return None

    def _start_server(self, host: str, number: int) -> Server:
        server = Server(self.clockwork, self, host, number)
        self.servers[server.url] = server
        return server

    def ensure_server(self, trainer: Trainer) -> Server:
        """Start another server with empty memory, as a trainer does after its server's death."""
        host = self.hosts[trainer.host]
        if not host.server.alive:
            host.servers += 1
            host.server = self._start_server(host.name, host.servers)
            host.server.attach(trainer)
        return host.server

    def start_trainer(self, name: str) -> None:
        host = self.hosts[name]
        host.restart_due = False
        if host.drained or host.finished or (host.trainer is not None and host.trainer.alive):
            return
        if not host.server.alive:
            host.servers += 1
            host.server = self._start_server(name, host.servers)
        host.starts += 1
        # Derive the incarnation from the time of day, as the client does; no two incarnations of a host are
        # equal.
        time_of_day = 10_000 + int(1000 * (self.clockwork.now + host.time_of_day))
        if time_of_day <= host.incarnation and not host.before:
            self.clockwork.counts["path: incarnation of a host whose time is behind"] += 1
        host.incarnation = max(time_of_day, max(host.before, default=0) + 1, host.above + 1)
        trainer = self.trainer_class(self.clockwork, self, name, host.incarnation, host.server, host.before)
        host.before, host.trainer = (host.incarnation, *host.before), trainer
        self.by_key[name, host.incarnation] = host.trainer
        self.clockwork.trace(host.trainer.name, "starts")

    def until_of(self, trainer: Trainer) -> int:
        """Return the step at which this host's loop ends."""
        return self.until

    def trainer(self, key: tuple[str, int]) -> Trainer | None:
        found = self.by_key.get(key)
        return found if found is not None and found.alive else None

    def living(self) -> list[Trainer]:
        return [h.trainer for h in self.hosts.values() if h.trainer is not None and h.trainer.alive]

    def kill_trainer(self, name: str, restart_s: float | None = None) -> bool:
        host = self.hosts[name]
        trainer = host.trainer
        if trainer is None or not trainer.alive:
            return False
        self.clockwork.trace(trainer.name, "killed")
        if trainer.main.at is not None:
            host.server.deaths.append(Death(trainer.incarnation, *trainer.main.at))
        trainer.kill()
        del self.by_key[trainer.host, trainer.incarnation]
        self.network.death(trainer)
        host.server.after(self.clockwork.between(0.0, 0.01), host.server.status)
        self._restart_later(host, restart_s)
        return True

    def _restart_later(self, host: Host, restart_s: float | None) -> None:
        host.restart_due = True
        delay = self.clockwork.between(0.1, 1.5) if restart_s is None else restart_s
        self.clockwork.at(delay, lambda: self.start_trainer(host.name))

    def kill_server(self, name: str) -> bool:
        server = self.hosts[name].server
        if not server.alive:
            return False
        server.kill()
        self.network.death(server)
        return True

    def kill_lighthouse(self, name: str) -> None:
        lighthouse = self.lighthouses[name]
        lighthouse.kill()
        self.network.death(lighthouse)

    def exited(self, trainer: Trainer, code: int, reason: str) -> None:
        """Handle a trainer's exit code: 0 finished or drained, 75 restart, 1 do not restart."""
        host = self.hosts[trainer.host]
        self.kill_trainer(trainer.host, 0.3)
        self.clockwork.counts[f"exit {code}"] += 1
        if "clock of this host is behind" in reason:
            self.clockwork.counts["path: started again above a number"] += 1
        elif code == 75:
            self.clockwork.counts["path: stopped by itself without a lighthouse"] += 1
        if code == 0:
            host.finished = reason == "finished"
            host.drained = not host.finished
            self.clockwork.counts["finish" if host.finished else "drained"] += 1
        elif "drained by" in reason or "no longer wanted" in reason:
            host.drained = True
        elif self.flipped and any(
            x in reason for x in ("can tell which is right", "is not trusted", "is disputed")
        ):
            self.halted = True
            self.clockwork.counts["path: stopped rather than guess"] += 1
        elif code == 1 and "taken by a living process" not in reason and "newer process" not in reason:
            raise Violation(f"{trainer.name} gave up: {reason}")

    def time_error(self) -> float:
        """Return the error of the time of day at an elected lighthouse, in seconds."""
        return 0.0

    def shares_of(self, host: str) -> int:
        """Return the host's share of the micro-batches."""
        shares = self.settings.shares
        return shares[int(host.removeprefix("r"))] if shares else 1

    def first_plan(self) -> DataPlan | None:
        """Return the data with which every loop begins; None where the data never change."""
        return None

    def policy_of(self, host: str) -> Policy:
        """Return the numbers of replicas that this host's process asks for."""
        return self.settings.leader.policy

    def member_config_of(self, host: str) -> MemberConfig:
        """Return the settings of this host's member core."""
        return self.settings.member

    def data_of(self, host: str) -> str:
        """Return the settings of this host that the data order depends on."""
        return ""

    def initial_digest(self, host: str) -> str:
        return digest_of("initial", host if self.settings.different_starts else "same")

    def ordered(self, action: str, host: str) -> None:
        """Send an operator's order to a leader."""
        if action == "evict":
            self.ended_by_wish(host)
        elif action == "admit" and self.checks.penalties is not None:
            self.checks.penalties.pardon(host)

    def ended_by_wish(self, host: str) -> None:
        """Note that the process, or an operator, has asked for its eviction."""
        if self.checks.penalties is not None:
            self.checks.penalties.excuse(host, self.hosts[host].incarnation)

    # --- durable storage: in most worlds there is none ----------------------------------------------

    def published(self, server: Server, ref: SnapshotRef) -> None:
        """Note that a server serves this snapshot, which may become a durable checkpoint."""

    def parts_of(self, server: Server) -> tuple[int, ...]:
        """For each snapshot there, of how many ranks; empty where that never changes."""
        return ()

    def listed(self) -> tuple[SnapshotRef, ...]:
        """Return the complete checkpoints that a starting process finds, oldest first."""
        return ()

    def can_load(self, host: str, ref: SnapshotRef) -> bool:
        """Whether this host can read that checkpoint, all of it."""
        return False

    def happened(self, what: str, host: str) -> None:
        """Report a trigger for which a fault may wait."""
        self.faults.happened(what, host)

    # --- the play ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the faults, heal them, demand progress, and demand the finish."""
        clockwork = self.clockwork
        if self.blackout and not self.ends_early:
            self._survive_blackout()
        clockwork.run(START_LIMIT_S, lambda: self.faults.over or self.halted)
        self.faults.heal()
        healed = clockwork.now
        if not self.ends_early and not self.halted:
            self._demand("every replica is back and steps are committed", HEAL_LIMIT_S, self._is_whole())
            self._demand("no gradients are kept for a member", HEAL_LIMIT_S, self._is_nobody_served)
            self.until = max([t.main.step for t in self.living()], default=0) + 3
        self._demand("everybody finishes", FINISH_LIMIT_S, self._is_finished)
        clockwork.counts["recovery ms"] += int(1000 * (clockwork.now - healed))

    def _demand(self, what: str, limit_s: float, done: "object") -> None:
        if not self.clockwork.run(self.clockwork.now + limit_s, lambda: self.halted or done()):  # type: ignore[operator]
            modes = ", ".join(
                f"{t.name} {t.core.session.phase} {t.core.memory.state.step}" for t in self.living()
            )
            record = self.store.record
            roster = f"epoch {record.epoch} of {record.names}" if record else "no record"
            raise Violation(
                f"liveness: not within {limit_s:g} s: {what}; {modes}; {roster}; {self._describe_leader()}"
            )

    def _is_nobody_served(self) -> bool:
        """Whether each member keeps more gradients only for replicas outside, or for a few steps."""
        for trainer in self.living():
            record, listeners = trainer.core.epochs.current, trainer.core.serving.listeners
            served = (record.member(name) for name, last in listeners.items() if last == math.inf and record)
            if any(member is not None and not member.joining for member in served):
                return False
        return True

    def _survive_blackout(self) -> None:
        """Control-plane independence: with an unchanged roster, steps go on without lighthouse and store."""
        self._demand("the job starts", HEAL_LIMIT_S, lambda: min(self._steps()) >= 2)
        for name in self.lighthouses:
            self.kill_lighthouse(name)
        self.store.down = True
        record = self.store.record
        members = [] if record is None else [(x.replica, x.incarnation) for x in record.roster]
        first = min(self._steps())

        def go_on() -> bool:
            steps = {(t.name, t.incarnation): t.main.step for t in self.living()}
            # A member that an order or a crash has taken ends this play: the others wait for a lighthouse.
            return any(x not in steps for x in members) or min(steps[x] for x in members) >= first + 4

        seconds = self.patience * self.settings.member.autonomy_s
        self._demand("steps go on without a lighthouse", seconds, go_on)
        self.clockwork.counts["path: all lighthouses down, steps go on"] += 1

    def _steps(self) -> list[int]:
        """The step of every host; -1 for one without a process."""
        found = [h.trainer for h in self.hosts.values()]
        return [t.main.step if t is not None and t.alive else -1 for t in found]

    def told(self, effect: leader_events.RecordEvent) -> None:
        """Take an event of the leader's event log."""
        coverage.told(self.clockwork.counts, effect)

    def struck(self, kind: str) -> None:
        coverage.struck(self, kind)

    def _describe_leader(self) -> str:
        core = next((x.core for x in self.lighthouses.values() if x.leads), None)
        if core is None:
            return "nobody leads"
        epoch = core.state.epoch
        known = {
            "running": sorted(epoch.running),
            "aborted": sorted(epoch.aborted),
            "reports": sorted(epoch.reports),
            "decided": epoch.decision is not None,
            "evicting": epoch.pending_evictions,
            "draining": sorted(core.orders.draining),
            "serving": {
                n: (s.step, sorted(s.taken), sorted(s.missed), s.has_sources)
                for n, s in core.joins.serving.items()
            },
            "writing": core.writer.writing is not None,
            "reading": core.writer.reading,
            "finished": sorted(core.endings.finished),
        }
        return ", ".join(f"{name} {value}" for name, value in known.items() if value)

    def _is_whole(self) -> "object":
        start: dict[str, int] = {}

        def done() -> bool:
            record = self.store.record
            expected = self.awaited()
            if record is None or len(record.roster) < len(expected):
                return False
            for host in expected:
                trainer = host.trainer
                if trainer is None or not trainer.alive or not record.lists(host.name, host.incarnation):
                    return False
            steps = [h.trainer.main.step for h in expected if h.trainer is not None]
            first = start.setdefault(record.nonce, min(steps))
            return min(steps) >= first + FURTHER_STEPS

        return done

    def awaited(self) -> list[Host]:
        """The replicas that the job must have in the end."""
        return [h for h in self.hosts.values() if not h.drained]

    def _is_finished(self) -> bool:
        return all(h.finished or h.drained for h in self.hosts.values())


def choose_settings(clockwork: Clockwork) -> Settings:
    """Choose the settings of a small job; some jobs need at least two replicas."""
    replicas = clockwork.random.choice((2, 3, 3, 3, 4, 5))
    minimum = 2 if clockwork.chance(0.25) else 1
    policy = Policy(min_replicas=minimum, start_replicas=replicas, start_wait_s=2.0)
    leader = LeaderConfig(policy=policy, autonomy_s=4.0, autonomy_margin_s=0.5, failures=0)
    return Settings(
        replicas=replicas,
        lighthouses=clockwork.random.choice((1, 2)),
        micro_batches=clockwork.random.randrange(replicas, 7),
        compute_s=clockwork.random.choice((0.01, 0.03, 0.06)),
        min_replicas=minimum,
        leader=leader,
        member=MemberConfig(
            min_replicas=minimum, autonomy_s=4.0, exchange_s=2.0, retain=not clockwork.chance(0.2)
        ),
        different_starts=clockwork.chance(0.3),
        streaming=clockwork.chance(0.5),
    )


def run_seed(seed: int, tracing: bool = False, faultless: bool = False, aims: Aims = ()) -> World:
    """Play one seed; raise the violation, with the world attached as ``world``."""
    world = World(seed, tracing, faultless, aims)
    try:
        world.run()
    except Exception as error:
        error.world = world  # type: ignore[attr-defined]
        raise
    return world
