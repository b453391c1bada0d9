"""Operators' orders, penalties and stand-bys under the same faults: what was ordered holds, all come back."""

from sim import order_worlds

SEEDS = 60


def test_orders_hold_under_faults_and_everybody_is_wanted_again_in_the_end():
    counts, failures = order_worlds.hunt(0, SEEDS)
    for name, number in sorted(counts.items()):
        print(f"{number:9} {name}")
    assert not failures, "\n".join(failures)
    missing = [name for name in order_worlds.REQUIRED if not counts[name]]
    assert not missing, f"never happened in {SEEDS} seeds: {missing}"
