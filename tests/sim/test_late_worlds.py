"""Newcomers that replay too slowly, or not at all: the others wait for them, and everybody returns."""

from sim import late_worlds

SEEDS = 180


def test_slow_newcomers_come_in_while_the_others_wait():
    counts, failures = late_worlds.hunt(0, SEEDS)
    for name, number in sorted(counts.items()):
        print(f"{number:9} {name}")
    assert not failures, "\n".join(failures)
    missing = [name for name in late_worlds.REQUIRED if not counts[name]]
    assert not missing, f"never happened in {SEEDS} seeds: {missing}"
