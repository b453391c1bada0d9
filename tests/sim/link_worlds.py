"""Worlds with a partly broken network: graphs of links that are not transitive, split, one-way or flapping.
Without other faults these worlds check *availability*: if enough members reach each other and a lighthouse,
steps commit within a bound. The status sentence must stay true, and the leader may leave out only members at
an end of a cut link.

In calm worlds only lighthouses and the store fail, and the leader may evict no replica.
"""

import itertools
import re

from msgspec.structs import replace
from sim.checkers import demand
from sim.world import Settings, World

from fabric.lighthouse.diagnosis.status_text import waiting_for
from fabric.protocol.messages import leader_events
from fabric.protocol.messages.network import LARGE_BYTES

KINDS = ("pair", "split", "one way", "chain", "star", "flapping")
# Small messages pass and large ones are lost: on all ways of one host, and on one way between two hosts.
# ``JOIN``: on all ways of a newcomer, from the moment when the others begin to wait for its state.
JOIN = "large, a join"
LARGE_KINDS = ("large, a host", "large, one way", JOIN)
REQUIRED = (*(f"links: {kind}" for kind in (*KINDS, *LARGE_KINDS)), "links: left out", "links: size named")
CALM_FAULTS = ("lighthouse crash", "lighthouse pause", "store down", "store restart")

FAULT_S = 14.0
LOOK_S = 0.25
# After a cut, both ends notice it within 2.4 s, and complaints take 0.3 s; a second cut may follow.
BOUND_S = 7.0
LONG_S = 3.0
STEP_S = 0.5  # a step and the reports before it take less
FLAP_S = 2.6

Pair = tuple[str, str]


class LinkWorld(World):
    """A world with one graph of cut links for some time."""

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.kind = (*KINDS, *LARGE_KINDS)[seed % len((*KINDS, *LARGE_KINDS))]
        self.cut: dict[Pair, float] = {}  # both ends of a link, in order -> the time of its last cut
        self.left_out: list[str] = []
        self.progress = (0, 0.0)  # the number of committed steps, and the time since which it is unchanged
        super().__init__(seed, tracing, faultless=True)
        self.faults.over, self.faults.not_before = False, FAULT_S + 4.0
        self.newcomer = sorted(self.hosts)[-1]
        at_s = self.clockwork.between(2.0, 2.5)
        self.clockwork.at(at_s, self._begin if self.kind != JOIN else self._begin_with_a_join)

    def _begin_with_a_join(self) -> None:
        if self.kill_trainer(self.newcomer, restart_s=0.3):
            self._await_join()

    def _await_join(self) -> None:
        leader = next((x.core for x in self.lighthouses.values() if x.leads and x.core is not None), None)
        record = leader.state.record if leader is not None else None
        member = record.member(self.newcomer) if record is not None else None
        if member is not None and member.blocking_join:
            self._begin()
        else:
            self.clockwork.at(0.002, self._await_join)

    def choose(self) -> Settings:
        found = super().choose()
        replicas = max(4, found.replicas)
        policy = replace(found.leader.policy, start_replicas=replicas)
        leader = replace(found.leader, policy=policy)
        member = replace(found.member, exchange_s=self.clockwork.random.choice((2.0, 8.0)))
        if self.kind == JOIN:
            member = replace(found.member, exchange_s=30.0, replay=False, digest_every=0)
        return replace(
            found,
            replicas=replicas,
            micro_batches=max(replicas, found.micro_batches),
            leader=leader,
            member=member if self.kind in LARGE_KINDS else found.member,
        )

    # --- the graph ---------------------------------------------------------------------------------

    def _ways(self) -> list[Pair]:
        """Return the (from, to) pairs of hosts whose packets are lost."""
        names = sorted(self.hosts)
        self.clockwork.random.shuffle(names)
        half = len(names) // 2
        pairs = {
            "pair": [(names[0], names[1])],
            "flapping": [(names[0], names[1])],
            "one way": [(names[0], names[1])],
            "split": list(itertools.product(names[:half], names[half:])),
            "chain": list(itertools.pairwise(names)),
            "star": [(names[0], other) for other in names[1:]],
            "large, a host": [(names[0], other) for other in names[1:]],
            "large, one way": [(names[0], names[1])],
            JOIN: [(self.newcomer, other) for other in names if other != self.newcomer],
        }[self.kind]
        return pairs if "one way" in self.kind else [way for a, b in pairs for way in ((a, b), (b, a))]

    def _begin(self) -> None:
        self.clockwork.counts[f"links: {self.kind}"] += 1
        self.progress = (self._steps_committed(), self.clockwork.now)
        ways, until = self._ways(), self.clockwork.now + FAULT_S
        self._block(ways)
        if self.kind == "flapping":
            self.clockwork.at(FLAP_S, lambda: self._flap(ways, until, whole=True))
        self.clockwork.at(LOOK_S, lambda: self._look(until))

    def _block(self, ways: list[Pair]) -> None:
        if self.kind in LARGE_KINDS:
            self.network.lossy.update(dict.fromkeys(ways))
            return
        for a, b in ways:
            self.network.block(a, b)

    def _flap(self, ways: list[Pair], until: float, whole: bool) -> None:
        if self.clockwork.now >= until:
            return
        if whole:
            self.network.heal()
        else:
            self._block(ways)
        self.clockwork.at(FLAP_S, lambda: self._flap(ways, until, not whole))

    # --- what is demanded --------------------------------------------------------------------------

    def _steps_committed(self) -> int:
        return sum(self.checks.commits.values())

    def _look(self, until: float) -> None:
        now = self.clockwork.now
        for a, b in (*self.network.blocked, *self.network.lossy):
            self.cut[min(a, b), max(a, b)] = now
        steps = self._steps_committed()
        if steps > self.progress[0]:
            self.progress = (steps, now)
        stands_s = now - self.progress[1]
        if stands_s > LONG_S:
            self._check_sentence(stands_s)
        if stands_s > BOUND_S and self._most_together(now - BOUND_S) >= self.settings.min_replicas:
            demand(
                False, f"availability: nothing committed for {stands_s:.1f} s ({self.kind}), and some could"
            )
        if now < until:
            self.clockwork.at(LOOK_S, lambda: self._look(until))
        else:
            self._end()

    def _most_together(self, since: float) -> int:
        """Return the size of the largest set of members that have reached each other all the time."""
        cut = {pair for pair, at in self.cut.items() if at >= since}
        names = sorted(t.host for t in self.living())
        for size in range(len(names), 0, -1):
            for some in itertools.combinations(names, size):
                if not any(pair in cut for pair in itertools.combinations(some, 2)):
                    return size
        return 0

    def _check_sentence(self, stands_s: float) -> None:
        lighthouse = next((x for x in self.lighthouses.values() if x.leads and x.core is not None), None)
        if lighthouse is None or lighthouse.core is None:
            return
        self.clockwork.counts["links: nothing committed for long"] += 1
        if lighthouse.clock() - lighthouse.core.state.epoch.since < STEP_S:
            return  # the members redo the step
        said = waiting_for(lighthouse.core, lighthouse.clock())
        demand(
            not said.startswith("nothing"),
            f"status says {said!r}, and nothing committed for {stands_s:.1f} s",
        )
        named = re.match(r"(\w+)(?: \(and \d+ more\))?, in user code", said)
        if named is not None:
            trainer = self.hosts[named[1]].trainer
            there = trainer is not None and trainer.main.is_busy
            demand(there, f"status says {said!r}, and {named[1]} is not in user code")

    def told(self, effect: leader_events.RecordEvent) -> None:
        super().told(effect)
        dies = self.kind == JOIN and effect.about == self.newcomer and not self.cut
        if effect.kind == "evicting" and not dies:
            ends = {name for pair in self.cut for name in pair}
            demand(
                effect.about in ends, f"{effect.about} is left out ({effect.why}), and no link of it is cut"
            )
            self.left_out.append(effect.about)
            self.clockwork.counts["links: left out"] += 1

    def _end(self) -> None:
        changes = len(self.left_out)
        if self.kind in LARGE_KINDS:
            self._check_lost_sizes()
        if self.kind in ("pair", "one way", "flapping", *LARGE_KINDS):
            demand(changes <= 1, f"one cut link ({self.kind}) cost {changes} changes: {self.left_out}")
        demand(changes < 2 * len(self.hosts), f"{self.kind}: left out again and again: {self.left_out}")
        self.network.heal()

    def _check_lost_sizes(self) -> None:
        """Demand that only an end of the lossy ways is outside, and that the leader says what it loses."""
        ends = set.intersection(*({a, b} for a, b in self.network.lossy))
        demand(set(self.left_out) <= ends, f"{self.left_out} are left out, not {ends}")
        if not self.left_out:
            demand(self.kind != "large, a host", "the host is not left out")
            return  # no ring used the lossy way
        lighthouse = next((x for x in self.lighthouses.values() if x.leads and x.core is not None), None)
        if lighthouse is None or lighthouse.core is None:
            return
        said = " ".join(lighthouse.core.admission.waiting_outside.values())
        demand(f"messages of {LARGE_BYTES} bytes are lost:" in said, f"the leader says only {said!r}")
        self.clockwork.counts["links: size named"] += 1


class CalmWorld(World):
    """A world in which lighthouses crash or stop and the store is away, but every replica is healthy."""

    lease_s = 4.0  # with this lease a leader that was stopped for some seconds still leads

    def choose(self) -> Settings:
        """Choose settings with a long autonomy, so that no member ends without a lighthouse."""
        found = super().choose()
        member = replace(found.member, autonomy_s=120.0)
        return replace(found, member=member, leader=replace(found.leader, autonomy_s=120.0))

    def __init__(self, seed: int, tracing: bool = False) -> None:
        super().__init__(seed, tracing, faultless=True)
        self.faults.over, self.faults.not_before = False, 16.0
        at = 1.5
        while at < 12.0:
            kind = self.clockwork.random.choice(CALM_FAULTS)
            self.clockwork.at(at, lambda kind=kind: self.faults.strike(kind))
            at += self.clockwork.between(1.0, 5.0)

    def told(self, effect: leader_events.RecordEvent) -> None:
        super().told(effect)
        if effect.kind == "evicting":
            demand(False, f"{effect.about} is evicted ({effect.why}), and every replica is well")
