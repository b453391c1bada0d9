"""Members that hold the others up are named and left out, whatever else goes wrong; then they come back."""

from sim import stall_worlds

SEEDS = 40


def test_nobody_is_waited_for_without_an_end():
    counts, failures = stall_worlds.hunt(0, SEEDS)
    for name, number in sorted(counts.items()):
        print(f"{number:9} {name}")
    assert not failures, "\n".join(failures)
    missing = [name for name in stall_worlds.REQUIRED if not counts[name]]
    assert not missing, f"never happened in {SEEDS} seeds: {missing}"
