"""Worlds with an operator and with penalties: joins are paused, the job is scaled, one replica is a spare,
and replicas that fail too often stay out. The worlds also have the faults of plain worlds; in the end all
replicas must be back.
"""

from msgspec.structs import replace
from sim.faults import Aims
from sim.penalties import Penalties
from sim.world import World

from fabric.model import OperatorOverrides, Record
from fabric.protocol.messages import leader_events as io

STRIKES = ("pause joins", "resume joins", "scale", "scale", "admit")
# A replica dies repeatedly; a spare dies; the leader dies with an operator's order.
AIMS: tuple[Aims, ...] = (
    (("commit", "kill trainer"), ("admitted", "kill trainer"), ("outside", "lighthouse crash")),
    (("commit", "kill host"), ("decided", "pause joins"), ("resume", "lighthouse crash")),
    (("commit", "scale"), ("decided", "lighthouse crash"), ("commit vote", "kill trainer")),
    (("commit", "pause joins"), ("commit", "kill trainer"), ("commit", "crash in a write")),
)
# The leader's words when it keeps a replica out -> the short name of the reason.
REASONS = {
    "joins are paused": "orders: kept out by a pause",
    "it is not admitted before": "orders: kept out by a penalty",
    "this one stands by": "orders: stood by",
    "in the last days": "orders: stood by on a suspect host",
}

# The rare events that must occur in a run over many of these worlds.
REQUIRED = (
    *REASONS.values(),
    *(f"fault: {kind}" for kind in STRIKES),
    "orders: scaled by a forced epoch",
    "orders: surplus left",
    "orders: written while somebody was penalised",
    "orders: written within an epoch",
    "orders: known to the next leader",
    "orders: sent away, then started again",
    *(f"{name}, then joined" for name in REASONS.values()),
    "orders: a suspect was needed",
)


class OrderWorld(World):
    """A world with an operator; some jobs have one replica more than they may have members."""

    def __init__(self, seed: int, aims: Aims = (), faultless: bool = False) -> None:
        aims = aims or (AIMS[seed // 2 % len(AIMS)] if seed % 2 and not faultless else ())
        super().__init__(seed, faultless=faultless, aims=aims)
        random = self.clockwork.random
        policy = self.settings.leader.policy
        if seed % 3 == 0:
            most = max(policy.min_replicas, self.settings.replicas - 1)
            policy = replace(policy, max_replicas=most, start_replicas=most)
        elif seed % 6 == 4:
            # The job starts with one replica fewer than it may have, so a replica on a suspect host is a
            # spare.
            self.settings.spare = ""
            policy = replace(policy, start_replicas=max(1, self.settings.replicas - 1))
            for when in (1.0, 2.5):
                self.clockwork.at(when, lambda: self.kill_trainer("r1", 0.2) and None)
        self.settings.leader = replace(
            self.settings.leader,
            policy=policy,
            failures=3 if seed % 6 == 4 else random.choice((1, 2, 3)),
            failures_s=random.choice((1.0, 3.0, 8.0)),
            half_life_s=60.0,
        )
        for lighthouse in self.lighthouses.values():
            lighthouse.config = self.settings.leader
        # Two leaders date an event differently: by their times of day, and by the rates of their clocks.
        error_s = 0.5 + 6.0 * self._errs + 60.0 * self.clockwork.skew
        leader = self.settings.leader
        self.checks.penalties = Penalties(
            lambda: self.clockwork.now,
            leader.failures,
            leader.failures_s,
            policy.min_replicas,
            error_s,
            full=policy.start_replicas,
            half_life_s=leader.half_life_s,
        )
        for _ in range(random.choice((1, 2, 3))):
            kind = random.choice(STRIKES)
            self.clockwork.at(self.clockwork.between(0.3, 4.0), lambda kind=kind: self.faults.strike(kind))
        self.asked = -1.0  # when the operator last withdrew its overrides
        # Reason -> the replicas that the leader keeps out for it now.
        self.kept_out: dict[str, set[str]] = {name: set() for name in REASONS.values()}

    def time_error(self) -> float:
        return self.clockwork.between(-3.0, 3.0) if self._errs else 0.0

    @property
    def _errs(self) -> bool:
        """Whether the lighthouses' hosts have wrong times of day."""
        return self.clockwork.seed % 4 == 0

    def _is_whole(self) -> "object":
        """Return whether the job has all its members, after the operator has withdrawn its overrides."""
        start: dict[int, int] = {}

        def done() -> bool:
            record = self.store.record
            if record is None or not self._is_taken_back(record):
                return False
            there = [h for h in self.hosts.values() if h.trainer is not None and h.trainer.alive]
            members = [h for h in there if record.lists(h.name, h.incarnation)]
            wanted = min(len(self.hosts), self.settings.leader.policy.max_replicas)
            if record.hosts and len(members) < wanted:
                self._admit_hosts(record)
            if len(members) < wanted or len(record.roster) != len(members):
                return False
            first = start.setdefault(record.epoch, min(h.trainer.main.step for h in members))
            return min(h.trainer.main.step for h in members) >= first + 5

        return done

    def _is_finished(self) -> bool:
        """A job that ends while its orders hold may lack members: more were ordered than there are, joins are
        paused, or who could come was sent away. It rightly stands until the operator thinks better of it, so
        that is what the operator does, then and only then: where the protocol alone could go on, it must."""
        record = self.store.record
        if record is not None and not record.complete:
            least = self.settings.min_replicas
            needed = max(record.min_replicas or least, record.overrides.min_replicas or least)
            there = sum(not h.drained for h in self.hosts.values())
            if len(record.roster) < needed and (there < needed or record.overrides.paused):
                self._is_taken_back(record)
        return super()._is_finished()

    def _is_taken_back(self, record: Record) -> bool:
        """Return whether no override is in force any more. Then whoever was sent away is started again, as
        nothing but the operator does it: without them a job that was scaled down may lack what its policy
        needs.
        """
        if replace(record.overrides, adapt="", vetoed=()) != OperatorOverrides():
            if self.clockwork.now - self.asked > 0.5:
                self.asked = self.clockwork.now
                self._take_back()
            return False
        for host in self.hosts.values():
            if host.drained:
                host.drained = False
                self.clockwork.counts["orders: sent away, then started again"] += 1
                self.start_trainer(host.name)
        return True

    def _admit_hosts(self, record: Record) -> None:
        """Let the operator admit the hosts, as after a repair."""
        if self.clockwork.now - self.asked > 0.5:
            self.asked = self.clockwork.now
            self.clockwork.counts["orders: hosts admitted"] += 1
            for host in record.hosts:
                self.ordered("admit", host.host)
            self._say(*(io.Operator("admit", x.host, "operator", "mended") for x in record.hosts))

    def _take_back(self) -> None:
        self._say(
            io.Operator("resume", "", "operator", "the end"),
            io.Operator("scale", "", "operator", "the end", 0, 0),
        )

    def _say(self, *events: io.Operator) -> None:
        for lighthouse in self.lighthouses.values():
            if lighthouse.leads and not lighthouse.paused:
                for event in events:
                    lighthouse.run(lambda e=event, x=lighthouse: x.feed(e) if x.core is not None else None)

    def told(self, effect: io.RecordEvent) -> None:
        """Count the overrides and penalties in the leader's event log."""
        super().told(effect)
        counts = self.clockwork.counts
        for words, name in REASONS.items():
            if effect.kind == "kept out" and words in effect.why:
                counts[name] += 1
                self.kept_out[name].add(effect.about)
        if effect.kind == "epoch":
            counts["orders: scaled by a forced epoch"] += effect.why.startswith("the job needs ")
            counts["orders: surplus left"] += "no longer wanted" in effect.why
            joined = effect.why.removesuffix(" joins").split(", ") if effect.why.endswith(" joins") else []
            for name, kept_out in self.kept_out.items():
                counts[f"{name}, then joined"] += len(kept_out & set(joined))
                kept_out -= set(joined)

    def run(self) -> None:
        """Run the world; count also what the checker of penalties has met."""
        try:
            super().run()
        finally:
            assert self.checks.penalties is not None
            met, suspects = self.checks.penalties.met, self.checks.penalties.suspects
            self.clockwork.counts["orders: written while somebody was penalised"] += met
            self.clockwork.counts["orders: a suspect was needed"] += suspects
