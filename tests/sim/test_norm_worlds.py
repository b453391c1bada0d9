"""Seeded worlds whose replicas do not ask for the same."""

import pytest
from sim import norm_worlds, noticing

SEEDS = 45


def test_no_member_ends_or_waits_for_the_settings_of_another_replica():
    noticing.meet("norm", norm_worlds.REQUIRED, SEEDS)


@pytest.mark.parametrize("name", sorted(norm_worlds.MUTATIONS))
def test_the_simulator_notices_a_wrong_norm(name):
    noticing.find(norm_worlds.MUTATIONS[name], "norm", range(SEEDS))
