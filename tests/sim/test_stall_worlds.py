"""The leader names and evicts members that delay the others, under any further faults; then they come
back.
"""

import pytest
from sim import noticing, stall_worlds
from sim.stall_mutations import STALLS

SEEDS = 48
MUTATION_SEEDS = 100


def test_no_wait_is_endless_and_only_the_guilty_member_is_blamed():
    noticing.meet("stall", stall_worlds.REQUIRED, SEEDS)


@pytest.mark.parametrize("name", sorted(STALLS))
def test_the_simulator_notices_wrong_waits_and_wrong_blame(name):
    mutate, kind = STALLS[name]
    noticing.find(mutate, "stall", stall_worlds.seeds_of(kind)[:MUTATION_SEEDS])
