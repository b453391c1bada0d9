"""The leader names and evicts members that delay the others, under any further faults; then they come
back.
"""

import pytest
from sim import noticing, stall_worlds
from sim.stall_mutations import STALLS

from fabric.protocol.leader.starts import Starts

SEEDS = 48
MUTATION_SEEDS = 100


def test_no_wait_is_endless_and_only_the_guilty_member_is_blamed():
    noticing.meet("stall", stall_worlds.REQUIRED, SEEDS)


def begin_with_a_state_that_no_server_holds_yet(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Starts, "awaited_own_state", lambda starts, peers: None)


def test_the_seed_that_found_a_start_from_a_state_on_its_way_notices_it_again():
    """Other initial states than the first member's: the others asked for its state before it was copied."""
    noticing.find(begin_with_a_state_that_no_server_holds_yet, "stall", (90068,))


@pytest.mark.parametrize("name", sorted(STALLS))
def test_the_simulator_notices_wrong_waits_and_wrong_blame(name):
    mutate, kind = STALLS[name]
    noticing.find(mutate, "stall", stall_worlds.seeds_of(kind)[:MUTATION_SEEDS])
