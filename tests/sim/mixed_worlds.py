"""Worlds with settings and faults that plain worlds lack. There are up to seven replicas with unequal shares,
up to three lighthouses, digests of the state at few steps, skipped updates, a spare, and user code that
announces itself. A lighthouse hangs for long, or does not reach the store. Or the store refuses all writes.
"""

from typing import Any

from msgspec.structs import replace
from sim.world import Settings, World

STRIKES = ("stuck lighthouse", "store cut", "store full")
# The rare events that must occur in a run over many of these worlds.
REQUIRED = (
    *(f"fault: {kind}" for kind in STRIKES),
    "store: a write was refused for good",
    "store: a write did not arrive",
    "path: busy",
    "path: sockets before timers",
    "path: cold start",
    "path: join",
)


class MixedWorld(World):
    """A world with one to three of these faults, in addition to those of plain worlds."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        clockwork = self.clockwork
        for _ in range(clockwork.random.choice((1, 1, 2, 3))):
            kind = clockwork.random.choice(STRIKES)
            clockwork.at(clockwork.between(0.3, 3.0), lambda kind=kind: self.faults.strike(kind))

    def choose(self) -> Settings:
        settings, random = super().choose(), self.clockwork.random
        replicas = random.choice((2, 3, 4, 6, 7))
        policy = replace(settings.leader.policy, start_replicas=replicas)
        skips = random.random() < 0.3
        return replace(
            settings,
            replicas=replicas,
            lighthouses=random.choice((1, 2, 3)),
            micro_batches=random.randrange(replicas, 10),
            leader=replace(settings.leader, policy=policy),
            member=replace(
                settings.member,
                digest_every=random.choice((1, 3, 10)),
                on_nan="skip" if skips else "propagate",
            ),
            nan_every=4 if skips else 0,
            shares=tuple(random.choice((1, 1, 2, 3)) for _ in range(replicas)),
            spare=random.choice(("", "", "r0", f"r{replicas - 1}")),
            busy_every=random.choice((0, 0, 5)),
        )
