"""Worlds whose control store is wiped or replaced by an empty store, and worlds whose leader hangs while the
store elects another lighthouse.
"""

from typing import Any

import pytest
from msgspec.structs import replace
from sim.lighthouse import Lighthouse
from sim.world import Settings, World

from fabric.model import Record
from fabric.protocol.leader.starts import Starts
from fabric.protocol.leader.state import JobState
from fabric.protocol.member.membership import Membership

# The rare events that must occur in a run over many of these worlds.
REQUIRED = (
    "store: wiped",
    "store: wiped while no server held a state",
    "path: a job goes on in another store",
    "store: a lighthouse was stuck",
    "store: restored over newer epochs",
    "path: sockets before timers",
)


def wipe_store(world: World) -> None:
    """Put an empty store in the place of the present one."""
    clockwork, store = world.clockwork, world.store
    clockwork.counts["store: wiped"] += 1
    clockwork.counts["path: a job goes on in another store"] += store.record is not None
    store.wipe(clockwork.random.choice(("aaa", "zzz")) + str(store.revision))
    if world.checks.shares is not None:
        world.checks.shares.actions = 0  # the next leader knows none
    if world.checks.penalties is not None:
        world.checks.penalties.forget()
    clockwork.trace("FAULT", f"store wiped: now {store.name}")


class WipedWorld(World):
    """An empty store takes the place of the job's, once or twice. The new store's id sorts before or after
    the old store's id. At about that time a trainer, one or all checkpoint servers, or the leader may die.

    No process is cut off or stopped, because an empty store names no members to wait for."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **{**options, "faultless": True})
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
        if clockwork.chance(0.2):
            clockwork.at(self.wiped_at, self.lose_memory)

    def lose_memory(self) -> None:
        """Kill every checkpoint server, so that only the trainers hold the job's state."""
        for name in self.hosts:
            self.kill_server(name)
        self.clockwork.counts["store: wiped while no server held a state"] += 1

    def wipe(self) -> None:
        """Wipe the store while a lighthouse leads."""
        wipe_store(self)


class DeposedWorld(World):
    """The leader hangs for longer than its lease, and the store elects another lighthouse. One replica
    reaches only the old leader, which finds this replica's heartbeats in its sockets after the hang. The
    other replica died before the hang. The dead replica comes back, and begins alone when the first replica
    must have stopped itself.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, faultless=True)
        self.faults.not_before = 14.0
        self.clockwork.at(1.0, lambda: self.kill_trainer("r1", 60.0) and None)
        self.clockwork.at(2.0, self.stop)

    def choose(self) -> Settings:
        settings = super().choose()
        policy = replace(settings.leader.policy, min_replicas=1, start_replicas=2)
        leader = replace(settings.leader, policy=policy)
        member = replace(settings.member, min_replicas=1)
        return replace(
            settings,
            replicas=2,
            lighthouses=2,
            min_replicas=1,
            micro_batches=2,
            leader=leader,
            member=member,
        )

    def stop(self) -> None:
        """Stop the leader until its members should soon stop themselves."""
        leading = [name for name, x in self.lighthouses.items() if x.leads]
        if not leading:
            self.clockwork.at(0.1, self.stop)
            return
        (name,) = leading
        other = next(n for n in self.lighthouses if n != name)
        self.network.block("r0", other)
        self.network.block(other, "r0")
        lighthouse = self.lighthouses[name]
        lighthouse.pause()
        self.clockwork.counts["store: a lighthouse was stuck"] += 1
        self.clockwork.at(self.clockwork.between(3.0, 6.0), lighthouse.resume)
        self.clockwork.at(0.5, lambda: self.start_trainer("r1"))


class RestoredWorld(World):
    """An operator restores a copy of the store that is some epochs old. Then a member dies."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **{**options, "faultless": True})
        self.copy = b""
        self.ends_early, self.until = False, 10**9
        self.faults.not_before = 9.0
        clockwork = self.clockwork
        clockwork.at(clockwork.between(0.8, 2.5), self._copy)
        for number in range(clockwork.random.randrange(1, 4)):
            clockwork.at(2.0 + number * 0.7, self._lose_one)
        self.restored_at = clockwork.between(3.0, 5.0)
        clockwork.at(self.restored_at, self._restore)
        if clockwork.chance(0.7):
            clockwork.at(self.restored_at + clockwork.between(-0.5, 3.0), self._lose_one)

    def _copy(self) -> None:
        self.copy = self.store.stored

    def _lose_one(self) -> None:
        self.kill_trainer(self.clockwork.random.choice(sorted(self.hosts)))

    def _restore(self) -> None:
        record = self.store.record
        if not self.copy or record is None:
            return
        self.store.restore(self.copy)
        assert self.store.record is not None
        self.checks.restored(self.store.record)
        if self.checks.shares is not None:
            self.checks.shares.actions = len(self.store.record.adaptation.acted)
        self.clockwork.counts["store: restored from an older copy"] += 1
        self.clockwork.counts["store: restored over newer epochs"] += self.store.record != record


def store_world(seed: int) -> World:
    """Return one world; every third is about a deposed leader, every fourth about a restored store."""
    if seed % 4 == 1:
        return RestoredWorld(seed)
    return DeposedWorld(seed) if seed % 3 == 0 else WipedWorld(seed)


# --- deliberate bugs -----------------------------------------------------------------------------------


def compare_the_ids_of_stores(patch: pytest.MonkeyPatch) -> None:
    """Bug: a record of a store whose id sorts lower counts as old."""

    def is_news(self: Membership, record: Record) -> bool:
        newest = self._epochs.newest
        if newest is not None and record.fence == newest.fence:
            self._repeat_answer()
        return newest is None or record.fence > newest.fence

    patch.setattr(Membership, "_is_news", is_news)


def begin_at_the_first_epoch_in_an_empty_store(patch: pytest.MonkeyPatch) -> None:
    """Bug: an empty store begins at epoch 1, although processes know higher epochs."""
    patch.setattr(Starts, "newest_of_another_store", lambda self: (0, 0))


def answer_members_when_the_lease_has_ended(patch: pytest.MonkeyPatch) -> None:
    """Bug: a lighthouse checks its lease only when it renews the lease."""
    patch.setattr(Lighthouse, "holds", lambda self: self.core is not None)


def number_epochs_by_a_restored_record(patch: pytest.MonkeyPatch) -> None:
    """Bug: the next epoch follows the record, although members know newer epochs."""
    patch.setattr(JobState, "note_named", lambda state, peer: None)


def wait_for_the_members_of_a_restored_record(patch: pytest.MonkeyPatch) -> None:
    """Bug: the leader of a restored store goes on with the members that its record names."""
    patch.setattr(Starts, "go_on_above", lambda starts, record: False)


MUTATIONS = {
    mutation.__name__: mutation
    for mutation in (
        number_epochs_by_a_restored_record,
        wait_for_the_members_of_a_restored_record,
        compare_the_ids_of_stores,
        begin_at_the_first_epoch_in_an_empty_store,
        answer_members_when_the_lease_has_ended,
    )
}
