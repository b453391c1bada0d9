"""Members wait for newcomers that replay too slowly or not at all, and all replicas return."""

import pytest
from sim import late_worlds, noticing
from sim.stall_mutations import JOINS

SEEDS = 180
MUTATION_SEEDS = 100


def test_slow_newcomers_come_in_while_the_others_wait():
    noticing.meet("late", late_worlds.REQUIRED, SEEDS)


@pytest.mark.parametrize("name", sorted(JOINS))
def test_the_simulator_notices_a_wrong_fallback(name):
    noticing.find(JOINS[name], "late", range(MUTATION_SEEDS))
