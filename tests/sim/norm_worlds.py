"""Worlds whose replicas do not ask for the same. A stranger with other settings speaks first, after a
fail-over or while every session is away. Or replicas ask for unequal numbers of members. Then a member dies.

No member may be told to end, and no member may wait for members that only another replica needs.
"""

import pytest
from msgspec.structs import replace
from sim.checkers import demand
from sim.lighthouse import Lighthouse
from sim.trainer import Trainer
from sim.world import Host, Settings, World

from fabric.model import Policy, Record
from fabric.protocol.leader import admission
from fabric.protocol.leader.liveness import Peer
from fabric.protocol.leader.state import RosterLimits, Standing
from fabric.protocol.member.state import MemberConfig
from fabric.protocol.messages import network as m

KINDS = ("fail-over", "blink", "unequal minimums")
REQUIRED = (
    *(f"norm: {kind}" for kind in KINDS),
    "norm: a stranger was refused",
    "norm: a stranger spoke first",
    "norm: the others went on",
)
STRANGER = "s9"
AGREED, OTHER = "on_nan propagate", "on_nan skip"


class NormWorld(World):
    """``away``: whether the members' sessions are closed and do not come back yet."""

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.kind = KINDS[seed % len(KINDS)]
        self.away = False
        super().__init__(seed, tracing, faultless=True)
        self.ends_early, self.until = False, 10**9
        self.faults.not_before = 9.0
        strike = self._lose_one if self.kind == "unequal minimums" else self._send_away
        self.clockwork.at(self.clockwork.between(1.0, 2.0), strike)
        self.clockwork.counts[f"norm: {self.kind}"] += 1

    def choose(self) -> Settings:
        settings = super().choose()
        policy = replace(settings.leader.policy, min_replicas=1)
        return replace(
            settings,
            min_replicas=1,
            leader=replace(settings.leader, policy=policy),
            member=replace(settings.member, min_replicas=1),
        )

    # --- what each replica asks for ------------------------------------------------------------------

    def data_of(self, host: str) -> str:
        return OTHER if host == STRANGER else AGREED

    def policy_of(self, host: str) -> Policy:
        policy, least = super().policy_of(host), self.settings.replicas
        if host == STRANGER or (host == "r1" and self.kind == "unequal minimums"):
            return replace(policy, min_replicas=least, start_replicas=least)
        return policy

    def member_config_of(self, host: str) -> MemberConfig:
        return replace(super().member_config_of(host), min_replicas=self.policy_of(host).min_replicas)

    # --- a stranger ----------------------------------------------------------------------------------

    def find_leader(self, host: str) -> Lighthouse | None:
        return None if self.away and host != STRANGER else super().find_leader(host)

    def _send_away(self) -> None:
        """Close the members' sessions, let the stranger speak, and then let the members come back."""
        self.away = True
        if self.kind == "fail-over":
            for name in self.lighthouses:
                self.kill_lighthouse(name)
                self.start_lighthouse(name)
        for trainer in self.living():
            trainer.reach(self)
        self.hosts[STRANGER] = Host(STRANGER, self._start_server(STRANGER, 1))
        self.start_trainer(STRANGER)
        self.clockwork.at(self.clockwork.between(0.3, 2.5), self._bring_back)

    def _bring_back(self) -> None:
        leader = super().find_leader("r0")
        peers = leader.core.state.liveness.peers if leader is not None and leader.core is not None else {}
        if STRANGER in peers and not any(p.connected for name, p in peers.items() if name != STRANGER):
            self.clockwork.counts["norm: a stranger spoke first"] += 1
        self.away = False
        self.clockwork.at(1.0, self._lose_one)

    def exited(self, trainer: Trainer, code: int, reason: str) -> None:
        if trainer.host != STRANGER:
            super().exited(trainer, code, reason)
            return
        demand("other data settings" in reason, f"the stranger is told: {reason}")
        self.clockwork.counts["norm: a stranger was refused"] += 1
        self.kill_trainer(STRANGER, 1e9)
        self.hosts[STRANGER].drained = True

    # --- a death -------------------------------------------------------------------------------------

    def _lose_one(self) -> None:
        """Kill a replica for some seconds; those that are left are as many as most members need."""
        self.kill_trainer("r0", 4.0)
        record = self.store.record
        if record is None or record.min_replicas > 1:
            return  # r1 was the first of all, so its number is the job's
        steps = self._steps_of_members()
        self.clockwork.at(3.5, lambda: self._judge_steps(steps))

    def _judge_steps(self, before: list[int]) -> None:
        now = self._steps_of_members()
        demand(min(now) > max(before), f"the others stand at {now}: one replica asked for more members")
        self.clockwork.counts["norm: the others went on"] += 1

    def _steps_of_members(self) -> list[int]:
        return [t.main.step for t in self.living() if t.host != STRANGER]


# --- deliberate bugs -----------------------------------------------------------------------------------


def take_the_first_to_speak_for_the_norm(patch: pytest.MonkeyPatch) -> None:
    """Bug: a member is refused for the settings of a stranger that opened its session first."""
    patch.setattr(admission, "standing", lambda process, record: Standing.STRANGER)


def keep_a_stranger_that_spoke_first(patch: pytest.MonkeyPatch) -> None:
    """Bug: a stranger that spoke before the members is never compared with them."""

    def refuse(self: admission.Admission, session: m.OpenSession) -> None:
        pass

    patch.setattr(admission.Admission, "refuse_unlike", refuse)


def take_the_policy_of_the_first_to_speak(patch: pytest.MonkeyPatch) -> None:
    """Bug: after a fail-over the first session sets the job's numbers of replicas."""

    def recall(limits: RosterLimits, record: Record) -> None:
        pass

    def hear(limits: RosterLimits, peer: Peer) -> None:
        if limits.source is Standing.NOBODY and peer.policy is not None:
            limits._take(peer.policy, Standing.LISTED)

    patch.setattr(RosterLimits, "recall", recall)
    patch.setattr(RosterLimits, "hear", hear)


def let_each_member_use_its_own_minimum(patch: pytest.MonkeyPatch) -> None:
    """Bug: the record names no minimum, so each member waits for as many members as its own setting says."""
    patch.setattr(RosterLimits, "least_of_epoch", property(lambda limits: limits.overrides.min_replicas))


MUTATIONS = {
    mutation.__name__: mutation
    for mutation in (
        take_the_first_to_speak_for_the_norm,
        keep_a_stranger_that_spoke_first,
        take_the_policy_of_the_first_to_speak,
        let_each_member_use_its_own_minimum,
    )
}
