"""Worlds whose seed draws several features at once: ranks or unequal layouts, an operator, shares, readers,
durable storage, slow newcomers, stalls, notice, lossy links, a store that is replaced, and journals.

Each world must go on after its faults, and apply each step once. While nothing is committed for long, the
status may not say that every member runs. The audit must accept the journals of a world that has them.
"""

from collections.abc import Callable
from itertools import combinations
from random import Random
from typing import Any

from msgspec.structs import replace
from sim.adapt_worlds import AdaptWorld
from sim.checkers import demand
from sim.data_worlds import CurriculumWorld
from sim.durable_worlds import DurableWorld
from sim.journals import JournaledTrainer, broken_promises
from sim.link_worlds import LONG_S, LOOK_S
from sim.mixed_worlds import MixedWorld
from sim.order_worlds import OrderWorld
from sim.ranks import RankWorld
from sim.sharing import SharingWorld
from sim.store_worlds import RestoredWorld, WipedWorld
from sim.unequal_worlds import UnequalWorld
from sim.world import Settings, World

from fabric.lighthouse.diagnosis.status_text import waiting_for
from fabric.model import Sharing, Value
from fabric.protocol.messages import member_events as io

LATEST_S = 6.0  # the end of a fault that a feature adds
QUIET_S = 2.5  # a heartbeat after a second of waiting, and some steps
SHARINGS = (Sharing("shrink"), Sharing(readers=1, on_loss="shrink"), Sharing(readers=2, on_loss="shrink"))


class _Told(World):
    """Checks the status while nothing is committed for long: it says what the job waits for."""

    def __init__(self, seed: int, **options: Any) -> None:
        self._progress = (0, 0.0)  # the number of committed steps, and the time since which it is unchanged
        self._spoke = 0.0  # when the status last named a wait, or need not have named one
        self._epoch = 0  # the newest epoch: it begins a wait of its own
        super().__init__(seed, **options)
        self.clockwork.at(LOOK_S, self._look)

    def _look(self) -> None:
        self.clockwork.at(LOOK_S, self._look)
        now, steps = self.clockwork.now, sum(self.checks.commits.values())
        if steps != self._progress[0]:
            self._progress = (steps, now)
        leader = next((x for x in self.lighthouses.values() if x.leads and not x.paused), None)
        record = leader.core.state.record if leader is not None and leader.core is not None else None
        stands = now - self._progress[1] > LONG_S and record is not None and not record.complete
        said = waiting_for(leader.core, leader.clock()) if stands else ""
        self.clockwork.counts["swarm: the status says why the job stands"] += bool(said)
        epoch = record.epoch if record is not None else self._epoch
        if epoch != self._epoch or not said.startswith("nothing"):
            self._spoke, self._epoch = now, epoch
        quiet_s = now - self._spoke
        words = f"for {quiet_s:.1f} s of a long wait the status said {said!r}"
        demand(quiet_s <= self.patience * QUIET_S, words)


class _Readers(SharingWorld):
    """A job whose data only some replicas can read, or that leaves out the parts of absent members."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, SHARINGS[seed % len(SHARINGS)], **options)


class _Wiped(WipedWorld):
    """Three replicas or more: of two, one may be a spare, and the other begins alone in an empty store."""

    def choose(self) -> Settings:
        chosen = super().choose()
        count = max(3, chosen.replicas)
        policy = replace(chosen.leader.policy, start_replicas=count)
        leader = replace(chosen.leader, policy=policy)
        most = max(count, chosen.micro_batches)
        shares = (*chosen.shares, 1)[:count] if chosen.shares else ()
        return replace(chosen, replicas=count, micro_batches=most, leader=leader, shares=shares)


class _Durable(DurableWorld):
    may_be_alone = False


class _Journaled(World):
    """A world whose trainers write journals; their main threads are slow."""

    trainer_class = JournaledTrainer
    patience = 3

    def run(self) -> None:
        super().run()
        broken = broken_promises(self)
        demand(not broken, f"the audit says: {broken[:3]}")


def _slow_newcomers(world: World) -> None:
    if world.clockwork.chance(0.5):
        world.settings.replay_s = world.clockwork.random.choice((0.1, 0.4))
    else:
        world.settings.member = replace(world.settings.member, replay=False, digest_every=0)


def _slow_fetches(world: World) -> None:
    world.settings.fetch_s = 3.0


def _skipped_updates(world: World) -> None:
    world.settings.nan_every = 4
    world.settings.member = replace(world.settings.member, on_nan="skip")


def _notice(world: World) -> None:
    """A host has notice of its end, and later its processes and their memory are gone."""
    name = world.clockwork.random.choice(sorted(world.hosts))

    def notify() -> None:
        trainer = world.hosts[name].trainer
        if trainer is not None and trainer.alive:
            trainer.feed(io.Noticed())
        world.clockwork.at(2.0, end)

    def end() -> None:
        world.kill_server(name)
        world.kill_trainer(name)

    _later(world, notify)


def _lossy_link(world: World) -> None:
    """Large messages on the way between two hosts are lost for some seconds."""
    sender, receiver = world.clockwork.random.sample(sorted(world.hosts), 2)
    _later(world, lambda: world.network.lossy.update({(sender, receiver): None}))
    world.clockwork.at(LATEST_S, world.network.lossy.clear)


def _stall(world: World) -> None:
    """One replica delays the others for some seconds."""
    affected = world.clockwork.random.choice((world.hung, world.lingering, world.mute, world.starving))
    name = world.clockwork.random.choice(sorted(world.hosts))

    def end() -> None:
        affected.discard(name)
        for trainer in world.living():
            trainer.feed(io.Tick())

    _later(world, lambda: affected.add(name))
    world.clockwork.at(LATEST_S, end)


def _later(world: World, act: Callable[[], None]) -> None:
    world.faults.not_before = max(world.faults.not_before, LATEST_S + 1.0)
    world.clockwork.at(world.clockwork.between(0.5, 3.0), act)


class Feature(Value, dict=True):
    """A feature that a seed may draw: a class of worlds to inherit from, or a change of the made world."""

    name: str
    share: float  # of the worlds that draw it
    made_of: type[World] | None = None
    change: Callable[[World], None] | None = None
    excludes: str = ""  # the features of which none was drawn before it


# Classes that change what others choose come first. Only one class can change the trainers.
FEATURES = (
    Feature("readers", 0.2, _Readers),
    Feature("wiped", 0.06, _Wiped),
    Feature("restored", 0.06, RestoredWorld, excludes="wiped"),
    Feature("durable", 0.1, _Durable, excludes="wiped restored"),
    Feature("stages", 0.15, CurriculumWorld),
    Feature("adapt", 0.25, AdaptWorld, excludes="stages readers"),
    Feature("orders", 0.3, OrderWorld),
    Feature("mixed", 0.4, MixedWorld, excludes="readers wiped restored"),
    Feature("unequal", 0.12, UnequalWorld, excludes="stages durable mixed"),
    Feature("ranks", 0.25, RankWorld, excludes="stages durable unequal"),
    Feature("journals", 0.4, _Journaled, excludes="readers stages durable ranks unequal"),
    Feature("slow newcomers", 0.25, change=_slow_newcomers),
    Feature("slow fetches", 0.15, change=_slow_fetches),
    Feature("skipped updates", 0.2, change=_skipped_updates, excludes="mixed unequal"),
    Feature("stall", 0.2, change=_stall, excludes="wiped restored"),
    Feature("notice", 0.2, change=_notice),
    Feature("lossy link", 0.2, change=_lossy_link, excludes="wiped restored"),
)
REQUIRED = tuple(f"swarm: {feature.name}" for feature in FEATURES)


def features_of(seed: int) -> list[Feature]:
    """Return the features that this seed draws."""
    random, drawn = Random(seed), list[Feature]()
    for feature in FEATURES:
        names = {x.name for x in drawn}
        if random.random() < feature.share and not names & set(feature.excludes.split()):
            drawn.append(feature)
    return drawn


def seeds_with_every_pair(seeds: range) -> list[int]:
    """Return few of these seeds that draw each pair of features which any of them draws."""
    pairs = {seed: set(combinations([x.name for x in features_of(seed)], 2)) for seed in seeds}
    left, chosen = set[tuple[str, str]]().union(*pairs.values()), list[int]()
    while left:
        chosen.append(max(seeds, key=lambda seed: len(left & pairs[seed])))
        left -= pairs[chosen[-1]]
    return sorted(chosen)


def swarm_world(seed: int) -> World:
    """Return the world of this seed, with the features that it draws."""
    drawn = features_of(seed)
    made_of = [x.made_of for x in drawn if x.made_of is not None]
    world: World = type("SwarmWorld", (_Told, *made_of), {})(seed)
    world.blackout &= {x.name for x in drawn} <= {"mixed", "stages", "ranks", "unequal", "journals"}
    for feature in drawn:
        world.clockwork.counts[f"swarm: {feature.name}"] += 1
        if feature.change is not None:
            feature.change(world)
    return world
