"""Worlds whose shares follow slow replicas: all members read each record alike, and lowered shares are given
back.
"""

import pytest
from sim import adapt_worlds, noticing
from sim.adapt_mutations import SHARES

SEEDS = 60
MUTATION_SEEDS = 100


def test_shares_follow_speeds_under_faults_and_are_given_back_in_the_end():
    noticing.meet("adapt", adapt_worlds.REQUIRED, SEEDS)


@pytest.mark.parametrize("name", sorted(SHARES))
def test_the_simulator_notices_shares_that_are_wrong_or_stay(name):
    mutate, aims = SHARES[name]
    noticing.find(mutate, "adapt", range(MUTATION_SEEDS), aims=aims)
