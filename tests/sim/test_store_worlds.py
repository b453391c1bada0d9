"""If the control store is wiped while a job runs, all replicas go on under the new store."""

import pytest
from sim import noticing, store_worlds

SEEDS = 60
MUTATION_SEEDS = 20


def test_a_job_survives_the_loss_of_its_store():
    noticing.meet("store", store_worlds.REQUIRED, SEEDS)


@pytest.mark.parametrize("name", sorted(store_worlds.MUTATIONS))
def test_the_simulator_notices_bugs_after_the_loss_of_a_store(name):
    noticing.find(store_worlds.MUTATIONS[name], "store", range(MUTATION_SEEDS))
