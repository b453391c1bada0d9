"""Replicas of unequal layouts, which change while others die: each lane has one holder in each replica, no
piece is lost, all copies of an element are equal, and deliberate bugs are noticed."""

import pytest
import sim.unequal_worlds
from sim import noticing
from sim.unequal_mutations import MUTATIONS

SEEDS = 40
MUTATION_SEEDS = 40


def test_without_faults_no_replica_is_ever_outside():
    for seed in range(4):
        counts = sim.unequal_worlds.play(seed, faultless=True).clockwork.counts
        assert counts["member: outside"] == counts["path: cold start"] == 0, seed
        assert counts["path: lanes of unequal layouts"] or counts["path: complete"], seed


def test_worlds_of_unequal_replicas_keep_every_invariant_in_every_lane():
    noticing.meet("unequal", sim.unequal_worlds.REQUIRED, SEEDS)


def test_a_seed_replays_exactly():
    first, second = sim.unequal_worlds.play(3, tracing=True), sim.unequal_worlds.play(3, tracing=True)
    assert first.clockwork.lines == second.clockwork.lines and len(first.clockwork.lines) > 100


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_the_simulator_notices_bugs_in_unequal_replicas(name):
    noticing.find(MUTATIONS[name], "unequal", range(MUTATION_SEEDS))
