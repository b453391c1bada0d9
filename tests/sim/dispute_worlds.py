"""Worlds in which a bit of a member's state flips at a step without a digest. Before the next digest a
newcomer joins, or all members die. Two members cannot say which of their states is right, so the job must
stop, or begin again from an earlier state.
"""

from collections import Counter

import pytest
from msgspec.structs import replace
from sim.checkers import demand
from sim.server import FLIPPED, Server
from sim.world import Settings, World

from fabric.model import SnapshotRef
from fabric.protocol.leader.base_choice import BaseChoice
from fabric.protocol.leader.joins import Joins, Serving
from fabric.protocol.messages import leader_events

DIGEST_EVERY = 10


class DisputeWorld(World):
    """``struck``: whether the bit has flipped. Replica r2 joins after that."""

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.struck, self.is_late, self.all_died = False, True, False
        super().__init__(seed, tracing, faultless=True)
        self.ends_early, self.until = False, 10**9
        self.faults.not_before = 9.0

    def choose(self) -> Settings:
        settings = super().choose()
        policy = replace(settings.leader.policy, min_replicas=1, start_replicas=2)
        return replace(
            settings,
            replicas=3,
            min_replicas=1,
            micro_batches=6,
            compute_s=0.06,
            different_starts=False,
            leader=replace(settings.leader, policy=policy),
            member=replace(settings.member, min_replicas=1, digest_every=DIGEST_EVERY),
        )

    def start_trainer(self, name: str) -> None:
        if name != "r2" or not self.is_late:
            super().start_trainer(name)

    def happened(self, what: str, host: str) -> None:
        super().happened(what, host)
        trainer = self.hosts[host].trainer if host in self.hosts else None
        is_due = (what, host) == ("commit", "r0") and self.clockwork.now > 2.0 and not self.struck
        if is_due and trainer is not None and trainer.main.step % DIGEST_EVERY == 1:
            self.struck = self.flipped = True
            trainer.main.digest += FLIPPED
            self.strike()

    def strike(self) -> None:
        """Let the newcomer start."""
        self.is_late = False
        self.clockwork.counts["dispute: a bit flipped before a join"] += 1
        self.clockwork.at(0.0, lambda: self.start_trainer("r2"))

    def told(self, effect: leader_events.RecordEvent) -> None:
        super().told(effect)
        if self.struck and effect.kind == "disputed":
            self.clockwork.counts["dispute: a newcomer got no state"] += 1
        is_judged = self.struck and not self.all_died
        is_fair = not (is_judged and effect.kind == "evicting" and effect.about == "r1")
        demand(is_fair, f"the healthy member is evicted: {effect.why}")


class ReportedWorld(World):
    """A bit of r2's state flips, and a link ends before the votes of that step. The job needs all replicas.
    r2 is evicted by reports, which r2 does not hear, and must come back with another state.
    """

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.struck, self.evicted = False, 0
        super().__init__(seed, tracing, faultless=True)
        self.faults.not_before, self.faults.over = 3.0, False

    def choose(self) -> Settings:
        settings = super().choose()
        policy = replace(settings.leader.policy, min_replicas=3, start_replicas=3)
        return replace(
            settings,
            replicas=3,
            min_replicas=3,
            micro_batches=6,
            compute_s=0.03,
            leader=replace(settings.leader, policy=policy),
            member=replace(settings.member, min_replicas=3),
        )

    def happened(self, what: str, host: str) -> None:
        super().happened(what, host)
        trainer = self.hosts["r2"].trainer
        is_due = (what, host) == ("commit", "r2") and self.clockwork.now > 1.5 and not self.struck
        if is_due and trainer is not None:
            self.struck = self.flipped = True
            trainer.main.digest += FLIPPED
            self.clockwork.at(0.03, lambda: self.network.reset_between("r0", "r1"))

    def told(self, effect: leader_events.RecordEvent) -> None:
        super().told(effect)
        is_reported = effect.kind == "evicting" and "about the state" in effect.why
        self.clockwork.counts["dispute: evicted by reports"] += is_reported
        self.evicted += is_reported
        demand(self.evicted < 2, f"{effect.about} came back with the state for which it was evicted")


class ColdDisputeWorld(DisputeWorld):
    """Both members serve snapshots of one step after the flip, and die."""

    step = -1  # the step of these snapshots

    def strike(self) -> None:
        trainer = self.hosts["r0"].trainer
        assert trainer is not None
        self.step = trainer.main.step + 1

    def happened(self, what: str, host: str) -> None:
        super().happened(what, host)
        trainer = self.hosts[host].trainer if host in self.hosts else None
        if what == "commit" and self.step >= 0 and trainer is not None and trainer.main.step == self.step:
            trainer.main.snapshot(trainer.core.memory.state.generation)

    def published(self, server: Server, ref: SnapshotRef) -> None:
        held = [x for h in self.hosts.values() if h.server for x in h.server.memory.snapshots]
        if ref.step == self.step and len({x.digest for x in held if x.step == ref.step}) == 2:
            self.step = -2
            self.clockwork.counts["dispute: all died with unequal states"] += 1
            self.clockwork.at(0.0, self._kill_all)

    def _kill_all(self) -> None:
        self.is_late, self.all_died = False, True
        for name in self.hosts:
            self.kill_trainer(name)
        self.start_trainer("r2")

    def told(self, effect: leader_events.RecordEvent) -> None:
        super().told(effect)
        bases = [x.base for x in self.checks.records]
        demand(not any(FLIPPED in x.digest for x in bases), f"it begins from a disputed state: {effect.why}")
        if "is disputed" in effect.why and effect.kind == "epoch":
            self.clockwork.counts["dispute: began from an earlier state"] += 1


def believe_any_holder(patch: pytest.MonkeyPatch) -> None:
    """Bug: of two unequal states of one step the leader chooses one."""
    patch.setattr(BaseChoice, "_disputed", lambda *_: {})


def serve_the_most_common_snapshot(patch: pytest.MonkeyPatch) -> None:
    """Bug: of two snapshots that differ a newcomer gets the first one."""

    def agreed(joins: Joins, record: object, joiner: str, serving: Serving) -> str:
        return Counter(serving.taken.values()).most_common(1)[0][0]

    patch.setattr(Joins, "_agreed_digest", agreed)
