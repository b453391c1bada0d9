"""Worlds in which a newcomer cannot catch up by replay: its updates take longer than the job's steps, or its
settings turn replay off. In half of these worlds some sums are not finite, and members skip these updates.
The worlds also have the faults of plain worlds, and all replicas must still come back.
"""

from msgspec.structs import replace
from sim.coverage import LATE_REASONS
from sim.world import World

# The rare events that must occur in a run over many of these worlds.
REQUIRED = (
    *LATE_REASONS.values(),
    "leader: too slow",
    "late: update skipped",
    "member: blocking join",
    "during blocking join",
)

# These faults hit the newcomer, or a waiting member, during a blocking join.
AIMS = (
    ("blocking join", "kill host"),
    ("blocking join", "isolate"),
    ("blocking join", "reset link"),
    ("blocking join", "kill two"),
)


def late_world(seed: int) -> World:
    """Return one world: with slow replay (two thirds) or without replay; a third of them have aimed
    faults.
    """
    aims = (("commit vote", "kill trainer"), AIMS[seed // 3 % len(AIMS)]) if seed % 3 == 1 else ()
    world = World(seed, aims=aims)
    if seed % 3:
        world.settings.replay_s = (0.1, 0.4)[seed // 3 % 2]
    else:
        world.settings.member = replace(world.settings.member, replay=False, digest_every=0)
    if aims:
        world.faults.not_before = 10.0
    if seed % 2:
        world.settings.nan_every = 4
        world.settings.member = replace(world.settings.member, on_nan="skip")
    if seed % 5 == 0:
        world.settings.fetch_s = 3.0  # a fetch lasts longer than the other members wait
    return world
