"""The rules of a cold start, checked from outside.

A cold start ignores no process that may still commit, and begins from the newest reachable state in memory.
"""

from typing import TYPE_CHECKING

from sim.checkers import demand
from sim.server import FLIPPED

from fabric.model import Member, Record

if TYPE_CHECKING:
    from sim.server import Server
    from sim.trainer import Trainer
    from sim.world import World

# A leader must know a state when a reachable server has held it for this many seconds.
KNOWN_S = 1.0


class ColdStarts:
    """Checks every record that begins a new generation."""

    def __init__(self, world: "World") -> None:
        self.world = world

    def began(self, before: Record, after: Record, revision: int) -> None:
        """Check the record of a new generation against the record that it replaces."""
        self.world.clockwork.counts["cold: generation begun again"] += 1
        if not before.failed:
            for member in before.roster:
                self._is_justified(member, after)
        self._has_the_newest_base(after, revision)

    def _is_justified(self, member: Member, after: Record) -> None:
        """Return whether the member is dead, must have stopped itself, or has reported that it holds no
        state.
        """
        trainer = self.world.by_key.get((member.replica, member.incarnation))
        if member.joining or trainer is None or not trainer.alive or self._is_worthless(trainer):
            return
        silent_s = trainer.clock() - trainer.answered
        demand(
            silent_s > self.world.settings.member.autonomy_s,
            f"generation {after.generation} begins while {trainer.name} lives, and was answered "
            f"{silent_s:.2f} s ago: {after.reason}",
        )

    def _is_worthless(self, trainer: "Trainer") -> bool:
        return trainer.fallen or trainer.name in self.world.checks.outvoted

    def _has_the_newest_base(self, after: Record, revision: int) -> None:
        leader = next((x for x in self.world.lighthouses.values() if x.revision == revision), None)
        whys = ("could not be loaded", "is not trusted", "is disputed", "of another job")
        passed = any(why in after.reason for why in whys)
        if leader is None or not leader.leads or passed or not self.world.has_one_lane:
            return
        base = (after.base.generation, after.base.step)
        for server in self.world.servers.values():
            newest = max(self._known(server, leader.name), default=base)
            demand(
                newest <= base,
                f"generation {after.generation} begins from {base} while {server.url} holds {newest}: "
                f"{after.reason}",
            )

    def _known(self, server: "Server", leader: str) -> list[tuple[int, int]]:
        """Return the states on this server that the leader can know."""
        world = self.world
        if not server.alive or server.paused or server.trainer is None:
            return []
        if server.world.find_leader(server.host) is None:
            return []
        if not world.network.could_talk(server.host, leader, KNOWN_S):
            return []
        return [
            (ref.generation, ref.step)
            for ref, since in server.held_since.items()
            if ref in server.memory.snapshots
            and FLIPPED not in ref.digest
            and world.clockwork.now - since > KNOWN_S
        ]
