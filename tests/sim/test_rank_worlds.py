"""Simulated replicas of several ranks: no lane breaks an invariant, all rare paths occur, and deliberate bugs
are noticed.
"""

import pytest
import sim.ranks
from sim import noticing
from sim.rank_mutations import MUTATIONS

import fabric.client.control.rank_engines
import fabric.protocol.ranks

SEEDS = 100
MUTATION_SEEDS = 100


def test_the_simulator_drives_the_very_classes_that_ship():
    assert issubclass(sim.ranks._Core, fabric.client.control.rank_engines.Ranks)
    assert set(vars(sim.ranks._Core)) - {"__module__", "__doc__"} <= {"__getattr__", "__firstlineno__"}
    follower = fabric.protocol.ranks.FollowerRank
    assert sim.ranks.FollowerRank is fabric.client.control.rank_engines.FollowerRank is follower


def test_without_faults_no_replica_is_ever_outside():
    for seed in range(6):
        counts = sim.ranks.play(seed, faultless=True).clockwork.counts
        assert counts["member: outside"] == counts["path: cold start"] == 0, seed


def test_worlds_of_ranks_keep_every_invariant_in_every_lane():
    noticing.meet("ranks", sim.ranks.REQUIRED, SEEDS)


@pytest.mark.parametrize("seed", [5000401, 5000494, 5000620])
def test_a_late_digest_ends_no_replica(seed):
    sim.ranks.play(seed)


def test_a_seed_replays_exactly():
    first, second = sim.ranks.play(3, tracing=True), sim.ranks.play(3, tracing=True)
    assert first.clockwork.lines == second.clockwork.lines and len(first.clockwork.lines) > 100


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_the_simulator_notices_bugs_in_replicas_of_several_ranks(name):
    noticing.find(MUTATIONS[name], "ranks", range(MUTATION_SEEDS))
