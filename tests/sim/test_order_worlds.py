"""Overrides, penalties and spares under faults: overrides hold, and all replicas come back."""

import pytest
from sim import noticing, order_worlds, penalties
from sim.order_mutations import CUT_LINKS, ORDERS

SEEDS = 60
MUTATION_SEEDS = 100


def test_orders_are_kept_under_faults_and_every_replica_is_wanted_again_in_the_end():
    noticing.meet("order", order_worlds.REQUIRED, SEEDS)


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_the_simulator_notices_admissions_too_early_or_never(name):
    mutate, aims = ORDERS[name]
    noticing.find(mutate, "order", range(MUTATION_SEEDS), aims=aims)


def test_an_eviction_for_a_cut_link_is_no_failure():
    # In world 2 the leader leaves a member out for a cut link. In world 60158 that member comes back at once.
    worlds = [order_worlds.OrderWorld(2, CUT_LINKS), order_worlds.OrderWorld(60158)]
    for world in worlds:
        world.run()
    assert [x.checks.penalties.no_failures for x in worlds] == [1, 1]


def test_a_leader_that_was_just_elected_waits_for_the_state_of_a_replica_outside_the_roster():
    # In world 95397 the generation once began from step 1, and a newcomer's server held step 4.
    order_worlds.OrderWorld(95397).run()


@pytest.mark.parametrize("why", ["", "a reason of a later version", "it and r1 cannot agree"])
def test_the_checker_refuses_a_reason_without_a_row(why):
    with pytest.raises(LookupError, match="give this reason for an eviction a row"):
        penalties.is_failure(why)
