"""Members that hold the others up are named and left out, whatever else goes wrong; then they come back."""

import pytest
from sim import noticing, stall_worlds
from sim.run import hunt
from sim.stall_mutations import STALLS

SEEDS = 48
MUTATION_SEEDS = 100


def test_nobody_is_waited_for_without_an_end_and_nobody_else_is_blamed():
    counts, failures = hunt(0, SEEDS, "stall")
    for name, number in sorted(counts.items()):
        print(f"{number:9} {name}")
    assert not failures, "\n".join(failures)
    missing = [name for name in stall_worlds.REQUIRED if not counts[name]]
    assert not missing, f"never happened in {SEEDS} seeds: {missing}"


@pytest.mark.parametrize("name", sorted(STALLS))
def test_the_simulator_notices_who_is_waited_for_or_blamed_wrongly(name):
    mutate, kind = STALLS[name]
    noticing.find(mutate, lambda number: stall_worlds.play_alone(kind, number), MUTATION_SEEDS)
