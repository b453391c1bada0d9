"""If the control store is wiped while a job runs, all replicas go on under the new store."""

import pytest
from sim import noticing, store_worlds
from sim.run import hunt

SEEDS = 60
MUTATION_SEEDS = 20


def test_a_job_survives_the_loss_of_its_store():
    counts, failures = hunt(0, SEEDS, "store")
    for name, number in sorted(counts.items()):
        print(f"{number:9} {name}")
    assert not failures, "\n".join(failures)
    missing = [name for name in store_worlds.REQUIRED if not counts[name]]
    assert not missing, f"never happened in {SEEDS} seeds: {missing}"


@pytest.mark.parametrize("name", sorted(store_worlds.MUTATIONS))
def test_the_simulator_notices_bugs_after_the_loss_of_a_store(name):
    noticing.find(store_worlds.MUTATIONS[name], store_worlds.play, MUTATION_SEEDS)
