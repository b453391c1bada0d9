"""Overrides, penalties and spares under faults: overrides hold, and all replicas come back."""

import pytest
from sim import noticing, order_worlds
from sim.order_mutations import ORDERS

SEEDS = 60
MUTATION_SEEDS = 100


def test_orders_are_kept_under_faults_and_every_replica_is_wanted_again_in_the_end():
    noticing.meet("order", order_worlds.REQUIRED, SEEDS)


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_the_simulator_notices_admissions_too_early_or_never(name):
    mutate, aims = ORDERS[name]
    noticing.find(mutate, "order", range(MUTATION_SEEDS), aims=aims)
