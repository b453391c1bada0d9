"""Worlds whose control store is wiped, or replaced by an empty one, while the job runs."""

import pytest
from sim.world import World

from fabric.model import Record
from fabric.protocol.leader import Leader
from fabric.protocol.member import Member

# What a hunt over these worlds must have met.
REQUIRED = ("store: wiped", "path: a job goes on in another store")


class WipedWorld(World):
    """An empty store takes the place of the job's, once or twice. Its id sorts before or after the old one's.
    About then a trainer may die, a checkpoint server, or the lighthouse that leads.

    Nobody is cut off or stopped: an empty store names no member whose autonomy could be waited for."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, faultless=True)
        clockwork = self.clockwork
        self.wiped_at = clockwork.between(1.0, 2.0)
        self.faults.not_before = self.wiped_at + 3.0
        clockwork.at(self.wiped_at, self.wipe)
        if clockwork.chance(0.3):
            clockwork.at(self.wiped_at + clockwork.between(0.2, 2.0), self.wipe)
        for kind in ("kill trainer", "kill server", "lighthouse crash"):
            if clockwork.chance(0.4):
                when = self.wiped_at + clockwork.between(-0.5, 1.5)
                clockwork.at(when, lambda kind=kind: self.faults.strike(kind))

    def wipe(self) -> None:
        """Under the feet of whoever leads."""
        before = self.store.record
        self.clockwork.counts["store: wiped"] += 1
        self.store.wipe(self.clockwork.random.choice(("aaa", "zzz")) + str(self.store.revision))
        self.clockwork.trace("FAULT", f"store wiped: now {self.store.name}")
        if before is not None:
            self.clockwork.counts["path: a job goes on in another store"] += 1


def store_world(seed: int) -> World:
    """One world."""
    return WipedWorld(seed)


def play(seed: int) -> None:
    """Play one; raises what it finds."""
    store_world(seed).run()


# --- deliberate bugs -----------------------------------------------------------------------------------


def compare_the_ids_of_stores(patch: pytest.MonkeyPatch) -> None:
    """A record of a store whose name sorts lower is of the past."""

    def is_news(self: Member, record: Record) -> bool:
        newest = self.newest
        if newest is not None and record.fence == newest.fence:
            self._repeat_answer()
        return newest is None or record.fence > newest.fence

    patch.setattr(Member, "_is_news", is_news)


def begin_at_the_first_epoch_in_an_empty_store(patch: pytest.MonkeyPatch) -> None:
    """Whatever epochs its processes have known."""
    patch.setattr(Leader, "_told_of_another_store", lambda self: (0, 0))


MUTATIONS = {
    mutation.__name__: mutation
    for mutation in (compare_the_ids_of_stores, begin_at_the_first_epoch_in_an_empty_store)
}
