"""Worlds about the cold start: the leader waits for every process that may still commit, and loses no held
state.
"""

import pytest
from sim import cold_worlds, noticing
from sim.world import run_seed

SEEDS = 56
TWIN_SEEDS = 12
MUTATION_SEEDS = 28
# In these plain worlds a cold start once began from an older state than a reachable server held.
BASE_SEEDS = (230, 753, 985, 8000253, 8001949, 8003351)


def test_no_cold_start_passes_a_process_over_or_loses_a_held_state():
    noticing.meet("cold", cold_worlds.REQUIRED, SEEDS)


def test_a_twin_that_speaks_first_after_a_fail_over_takes_no_members_place():
    required = ("cold: a twin spoke first after a fail-over", "cold: a second process refused")
    noticing.meet("twin", required, TWIN_SEEDS)


@pytest.mark.parametrize("name", sorted(cold_worlds.MUTATIONS))
def test_the_simulator_notices_bugs_in_cold_starts(name):
    noticing.find(cold_worlds.MUTATIONS[name], "cold", range(MUTATION_SEEDS))


@pytest.mark.parametrize("seed", BASE_SEEDS)
def test_seeds_that_once_began_from_an_older_state_begin_from_the_newest(seed):
    run_seed(seed)
