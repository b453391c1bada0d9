"""Worlds with settings and faults that plain worlds lack, and seeds with former false alarms."""

import sim.ranks
from msgspec.structs import replace
from sim import mixed_worlds, noticing
from sim.world import World, run_seed

SEEDS = 60


def test_other_settings_and_faults_break_nothing():
    noticing.meet("mixed", mixed_worlds.REQUIRED, SEEDS)


def test_a_gradient_that_user_code_changes_needs_a_leader_and_no_blackout_begins_behind_it():
    run_seed(5007647)


def test_a_crash_in_a_write_hits_the_lighthouse_that_writes(monkeypatch):
    class Seldom(World):
        def choose(self):
            chosen = super().choose()
            return replace(chosen, member=replace(chosen.member, digest_every=10))

    Seldom(6001419).run()
    monkeypatch.setattr("fabric.protocol.leader.state.MANY", 2)
    run_seed(6001578)


def test_a_round_before_an_eviction_does_not_confirm_a_returned_member():
    sim.ranks.play(8000522)


def test_large_jobs_take_the_same_path_in_small_worlds(monkeypatch):
    """The leader plans once for many events in jobs of hundreds; here already in jobs of two."""
    monkeypatch.setattr("fabric.protocol.leader.state.MANY", 2)
    for seed in range(15):
        run_seed(seed)
