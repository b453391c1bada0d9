"""Worlds in which a replica that starts again finds its state in its own hosts' memory.

A restart takes a few steps, replicas snapshot most states, and members keep few gradients. The gradients of a
few steps have fewer bytes than a state. The faults are those of plain worlds, or of worlds of ranks; there
a host of a replica may also be lost with its memory.
"""

import math
from typing import Any

import pytest
from msgspec.structs import replace
from sim.clockwork import Clockwork
from sim.ranks import RANK_FAULTS, RankWorld
from sim.world import Settings, World, choose_settings

from fabric.protocol.leader import joins
from fabric.protocol.member.serving import SnapshotServing
from fabric.protocol.messages import leader_events
from fabric.protocol.messages.network import TakeSnapshotFor

REQUIRED = (
    *("own: begins", "own: begins behind", "own: from memory", "path: replay", "path: cold start"),
    *("path: eviction of a wrong state", "path: lighthouse lost during a join", "during fetch"),
)
RANKS_REQUIRED = (
    *("own: begins", "own: begins behind", "own: from memory", "own: not in memory"),
    *("fault: lose rank host", "fault: kill rank", "path: rank 0 lost ends the others", "during fetch"),
)
# The lighthouse is lost, or the newcomer or its memory, while a newcomer takes its state.
AIMS = (("fetch", "lighthouse crash"), ("install", "kill host"), ("fetch", "kill server"))


class OwnWorld(World):
    """A world in which a restart takes a few steps; a third of them have aimed faults."""

    def __init__(self, seed: int, tracing: bool = False) -> None:
        super().__init__(seed, tracing, aims=(AIMS[seed // 3 % len(AIMS)],) * 2 if seed % 3 == 1 else ())

    def choose(self) -> Settings:
        return long_steps(self.clockwork)

    def told(self, effect: leader_events.RecordEvent) -> None:
        super().told(effect)
        if effect.kind == "serves" and "own hosts' memory" in effect.why:
            self.clockwork.counts["own: begins"] += 1
            self.clockwork.counts["own: begins behind"] += " 0 gradients" not in effect.why


class OwnRankWorld(OwnWorld, RankWorld):
    """The same with replicas of two to four ranks on two hosts."""

    rank_faults = (*RANK_FAULTS, *("lose rank host",) * 3)


REPLACED_REQUIRED = ("own: ready before it asked", "own: not ready", "path: replay", "during fetch")


class ReplacedWorld(World):
    """A world in which hosts of replicas are lost with their memory, and the leader hears of other ones.

    Some of these replicas never come.
    """

    def __init__(self, seed: int, tracing: bool = False) -> None:
        super().__init__(seed, tracing, aims=(AIMS[seed // 3 % len(AIMS)],) * 2 if seed % 3 == 1 else ())

    def choose(self) -> Settings:
        return long_steps(self.clockwork)

    def kill_trainer(self, name: str, restart_s: float | None = None) -> bool:
        killed = super().kill_trainer(name, restart_s)
        if killed and self.clockwork.chance(0.7):
            self.kill_server(name)
            self.clockwork.at(self.clockwork.between(0.0, 0.5), lambda: self._tell(name))
        return killed

    def _tell(self, name: str) -> None:
        leader = next((x for x in self.lighthouses.values() if x.leads and x.core is not None), None)
        if leader is not None:
            event = leader_events.HostReplaced(name)
            leader.run(lambda: leader.feed(event) if leader.core is not None else None)

    def told(self, effect: leader_events.RecordEvent) -> None:
        super().told(effect)
        if effect.kind == "needs state":
            cores = [x.core for x in self.lighthouses.values() if x.leads and x.core is not None]
            serving = [x.joins.serving[effect.about] for x in cores if effect.about in x.joins.serving]
            is_ready = any(x.taken and x.has_sources for x in serving)
            self.clockwork.counts["own: ready before it asked" if is_ready else "own: not ready"] += 1


def long_steps(clockwork: Clockwork) -> Settings:
    settings = choose_settings(clockwork)
    settings.compute_s = clockwork.random.choice((0.1, 0.2, 0.3))
    settings.member = replace(settings.member, replay_steps=clockwork.random.choice((1, 3, 3, 8)))
    settings.snapshots, settings.kept = 0.7, 5
    return settings


def keep_gradients_outside(patch: pytest.MonkeyPatch) -> None:
    """Bug: a process outside keeps gradients, as the process before it was asked to, and nobody ends that."""
    serve = SnapshotServing.on_serve

    def on_serve(serving: SnapshotServing, message: TakeSnapshotFor) -> None:
        serving._keep_gradients(message.joiner, math.inf)
        serve(serving, message)

    patch.setattr(SnapshotServing, "on_serve", on_serve)


def insist_on_its_own_memory(patch: pytest.MonkeyPatch) -> None:
    """Bug: a snapshot counts whose gradients are gone, and after a failure it counts again."""
    request = joins.Joins.on_request_state

    def again(part: joins.Joins, peer: Any, message: Any) -> None:
        part.serving.pop(peer.session.replica, None)
        request(part, peer, message)

    def newest(held: Any, own: Any, now: tuple[int, int], kept_from: int, most: int) -> Any:
        refs = [ref for ref in held if ref.generation == now[0] and not own.isdisjoint(held[ref])]
        return max(refs, key=lambda ref: ref.step, default=None)

    patch.setattr(joins.Joins, "on_request_state", again)
    patch.setattr(joins, "own_snapshot", newest)
