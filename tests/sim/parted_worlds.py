"""Worlds of two replicas whose states differ, without other faults. In half of these worlds a joining replica
has the wrong state, as with a scheduler outside the shared state: the leader must evict it. In the other
worlds the two states have agreed before, so neither can be called wrong, and the job must stop.
"""

from msgspec.structs import replace
from sim.checkers import Violation
from sim.server import FLIPPED
from sim.world import Settings, World

from fabric.protocol.messages import leader_events

REQUIRED = ("parted: by a newcomer", "parted: by somebody who had agreed", "path: stopped rather than guess")
REQUIRED += ("parted: the newcomer went",)


class PartedWorld(World):
    """A world of two replicas; ``newcomer``: whether the joining replica has the wrong state."""

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.newcomer = seed % 2 == 0
        self.parted = self.killed = False
        super().__init__(seed, tracing, faultless=True)
        self.faults.over, self.faults.not_before = False, 6.0
        self.clockwork.at(self.clockwork.between(1.0, 1.5), self._kill)
        if not self.newcomer:
            self.clockwork.at(2.0, self._part_when_agreed)

    def choose(self) -> Settings:
        found = super().choose()
        policy = replace(found.leader.policy, start_replicas=2)
        return replace(
            found,
            replicas=2,
            micro_batches=max(2, found.micro_batches),
            leader=replace(found.leader, policy=policy),
            different_starts=False,
        )

    def _kill(self) -> None:
        self.killed = True
        self.kill_trainer(self.clockwork.random.choice(sorted(self.hosts)))

    def happened(self, what: str, host: str) -> None:
        super().happened(what, host)
        if what == "install" and self.newcomer and self.killed and not self.parted:
            self._part(host, "by a newcomer")

    def _part_when_agreed(self) -> None:
        record = self.store.record
        there = {t.host: t.core for t in self.living()}
        roster = record.roster if record is not None else ()
        agreed = [x for x in roster if x.replica in there and there[x.replica].memory.agreed >= x.since]
        if len(agreed) < 2:
            self.clockwork.at(0.02, self._part_when_agreed)
            return
        self.flipped = True
        self._part(self.clockwork.random.choice(sorted(there)), "by somebody who had agreed")

    def _part(self, host: str, how: str) -> None:
        trainer = self.hosts[host].trainer
        assert trainer is not None
        self.parted = True
        trainer.main.digest += FLIPPED
        self.clockwork.counts[f"parted: {how}"] += 1

    def told(self, effect: leader_events.RecordEvent) -> None:
        super().told(effect)
        if effect.kind == "epoch" and "was let in last" in effect.why:
            self.clockwork.counts["parted: the newcomer went"] += 1

    def run(self) -> None:
        super().run()
        if not self.halted and any(FLIPPED in x.main.digest for x in self.by_key.values() if x.alive):
            raise Violation("the job went on with the state that had parted")
        if self.newcomer is self.halted:
            raise Violation(f"parted {'by a newcomer' if self.newcomer else 'later'}, halted: {self.halted}")
