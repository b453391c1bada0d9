"""Play the worlds of one kind, seed by seed."""

from collections import Counter
from collections.abc import Callable

from sim.world import World


def hunt(kind: str, make: Callable[[int], World], first: int, last: int) -> tuple[Counter[str], list[str]]:
    """Play what ``make`` makes of ``first`` to ``last`` (exclusive): the counters, and a line per failure."""
    counts: Counter[str] = Counter()
    failures = []
    for seed in range(first, last):
        world = make(seed)
        try:
            world.run()
        except Exception as error:  # noqa: BLE001  (whatever a core raises is a finding)
            failures.append(f"{kind} seed {seed}: {type(error).__name__}: {error}")
        counts.update(world.clockwork.counts)
    return counts, failures
