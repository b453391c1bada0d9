"""Worlds whose shares follow slow replicas: all members read each record alike, and lowered shares are given
back.
"""

import pytest
from sim import adapt_worlds, noticing
from sim.adapt_mutations import SHARES
from sim.run import hunt

SEEDS = 60
MUTATION_SEEDS = 100


def test_shares_follow_speeds_under_faults_and_are_given_back_in_the_end():
    counts, failures = hunt(0, SEEDS, "adapt")
    for name, number in sorted(counts.items()):
        print(f"{number:9} {name}")
    assert not failures, "\n".join(failures)
    missing = [name for name in adapt_worlds.REQUIRED if not counts[name]]
    assert not missing, f"never happened in {SEEDS} seeds: {missing}"


@pytest.mark.parametrize("name", sorted(SHARES))
def test_the_simulator_notices_shares_that_are_wrong_or_stay(name):
    mutate, aims = SHARES[name]
    noticing.find(mutate, lambda seed: adapt_worlds.play(seed, aims), MUTATION_SEEDS)
