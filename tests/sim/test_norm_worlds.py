"""Seeded worlds whose replicas do not ask for the same."""

import pytest
from sim import norm_worlds, noticing
from sim.run import hunt

SEEDS = 45


def test_no_member_ends_or_waits_for_the_settings_of_another_replica():
    counts, failures = hunt(0, SEEDS, "norm")
    assert not failures, "\n".join(failures)
    missing = [name for name in norm_worlds.REQUIRED if not counts[name]]
    assert not missing, f"never happened in {SEEDS} seeds: {missing}"


@pytest.mark.parametrize("name", sorted(norm_worlds.MUTATIONS))
def test_the_simulator_notices_a_wrong_norm(name):
    noticing.find(norm_worlds.MUTATIONS[name], norm_worlds.play, SEEDS)
