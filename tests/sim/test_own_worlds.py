"""Replicas begin again from their own hosts' memory, and no world breaks an invariant."""

import pytest
from sim import noticing, own_worlds

SEEDS = 400  # few lose the lighthouse during a join


@pytest.mark.parametrize(
    ("kind", "required"),
    [
        ("own", own_worlds.REQUIRED),
        ("own-ranks", own_worlds.RANKS_REQUIRED),
        ("replaced", own_worlds.REPLACED_REQUIRED),
    ],
)
def test_replicas_begin_again_from_their_own_hosts_memory(kind, required):
    noticing.meet(kind, required, SEEDS)


def test_the_simulator_notices_gradients_that_a_process_outside_keeps():
    noticing.find(own_worlds.keep_gradients_outside, "own-ranks", range(SEEDS))


def test_the_simulator_notices_a_newcomer_that_gets_its_own_state_again_and_again():
    noticing.find(own_worlds.insist_on_its_own_memory, "own", range(SEEDS))
