"""Worlds in which somebody holds the others up without dying: a data plane that hangs in a living process,
or user code that does not come back in time."""

from collections import Counter
from dataclasses import replace

from sim.coverage import STALL_REASONS
from sim.world import World

REQUIRED = (*STALL_REASONS.values(), "stall: round given up", "stall: hung", "stall: slow user code")

EXCHANGE_S, USER_CODE_S = 0.5, 1.5


def stall_world(seed: int) -> World:
    """One world: a hung data plane, or slow user code, in one replica, for some seconds."""
    world = World(seed, faultless=seed % 3 == 0)
    clockwork, settings = world.clockwork, world.settings
    settings.member = replace(settings.member, exchange_s=EXCHANGE_S, user_code_s=USER_CODE_S)
    world.blackout = False
    world.faults.not_before = 9.0
    world.faults.over = False
    name = clockwork.random.choice(sorted(world.hosts))
    affected, kind = (world.hung, "hung") if seed % 2 else (world.lingering, "slow user code")

    def begin() -> None:
        affected.add(name)
        clockwork.counts[f"stall: {kind}"] += 1

    clockwork.at(clockwork.between(1.0, 2.0), begin)
    clockwork.at(clockwork.between(6.0, 8.0), affected.clear)
    return world


def hunt(first: int, last: int) -> tuple[Counter[str], list[str]]:
    """Play seeds ``first`` to ``last`` (exclusive): the counters, and a line per failure."""
    counts: Counter[str] = Counter()
    failures = []
    for seed in range(first, last):
        world = stall_world(seed)
        try:
            world.run()
        except Exception as error:  # noqa: BLE001  (whatever a core raises is a finding)
            failures.append(f"stall seed {seed}: {type(error).__name__}: {error}")
        counts.update(world.clockwork.counts)
    return counts, failures
