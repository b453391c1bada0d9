"""Worlds in which the leader orders layouts: each order ends, and each replica runs what the record says."""

import pytest
from sim import noticing, relayout_worlds
from sim.relayout_mutations import RELAYOUTS

SEEDS = 60
MUTATION_SEEDS = 120


def test_every_order_of_a_layout_ends_under_faults():
    noticing.meet("relayout", relayout_worlds.REQUIRED, SEEDS)


@pytest.mark.parametrize("name", sorted(RELAYOUTS))
def test_the_simulator_notices_layouts_that_are_wrong_or_stay(name):
    mutate, aims = RELAYOUTS[name]
    noticing.find(mutate, "relayout", range(MUTATION_SEEDS), aims=aims)


@pytest.mark.parametrize("seed", [96067, 96177])
def test_the_stand_ins_of_a_fetch_and_of_an_end_do_as_the_services(seed):
    """A gradient of another layout did not fit. An end was named after the loaded state's generation."""
    relayout_worlds.RelayoutWorld(seed).run()
