"""After the loss of all memory the job begins again from the newest loadable checkpoint, or fails."""

import pytest
from sim import durable_worlds, noticing
from sim.durable_mutations import DURABLE_BUGS

SEEDS = 24
MUTATION_SEEDS = 20


def test_all_begin_again_from_the_newest_checkpoint_that_can_be_loaded():
    noticing.meet("durable", durable_worlds.REQUIRED, SEEDS)


@pytest.mark.parametrize("name", sorted(DURABLE_BUGS))
def test_the_simulator_notices_a_wrong_beginning(name):
    mutate, kind = DURABLE_BUGS[name]
    noticing.find(mutate, "durable", durable_worlds.seeds_of(kind)[:MUTATION_SEEDS])


def test_a_job_fails_rather_than_begin_from_the_state_of_an_outvoted_member():
    """In world 96355 all memory is lost. A replica that was outvoted later held the older checkpoint."""
    durable_worlds.DurableWorld(96355).run()
