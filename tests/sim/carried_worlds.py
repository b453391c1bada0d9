"""Worlds whose rings carry contributions, with the faults of plain worlds and with stalls.

In some of them one link carries none, as a link of shared memory does.
"""

from sim.checkers import demand
from sim.stall_worlds import StallWorld
from sim.world import World

from fabric.protocol.messages import leader_events

REQUIRED = (
    "carried: by the ring alone",
    "carried: told because it is late",
    "carried: told because it is left behind",
    "stall: hung",
    "stall: the others went on",
)


class CarriedStallWorld(StallWorld):
    """A world with a stall. Members tell a hung exchange from user code, though the ring carries nothing."""

    def told(self, effect: leader_events.RecordEvent) -> None:
        super().told(effect)
        if self.alone and self.kind == "hung" and effect.kind == "evicting":
            is_known = "in user code" not in effect.why
            demand(is_known, f"{self.culprit} hangs in the exchange, and is evicted because {effect.why}")


def carried_world(seed: int) -> World:
    """Return a plain world, or one with a stall (a third)."""
    world = CarriedStallWorld(seed // 3) if seed % 3 == 2 else World(seed)
    world.carries = True
    if seed % 5 == 4:
        world.noteless = {"r1"}
    return world
