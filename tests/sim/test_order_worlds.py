"""Overrides, penalties and spares under faults: overrides hold, and all replicas come back."""

import pytest
from sim import noticing, order_worlds
from sim.order_mutations import ORDERS
from sim.run import hunt

SEEDS = 60
MUTATION_SEEDS = 100


def test_orders_are_kept_under_faults_and_every_replica_is_wanted_again_in_the_end():
    counts, failures = hunt(0, SEEDS, "order")
    for name, number in sorted(counts.items()):
        print(f"{number:9} {name}")
    assert not failures, "\n".join(failures)
    missing = [name for name in order_worlds.REQUIRED if not counts[name]]
    assert not missing, f"never happened in {SEEDS} seeds: {missing}"


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_the_simulator_notices_admissions_too_early_or_never(name):
    mutate, aims = ORDERS[name]
    noticing.find(mutate, lambda seed: order_worlds.play(seed, aims), MUTATION_SEEDS)
