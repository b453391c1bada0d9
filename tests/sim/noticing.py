"""Whether the simulator notices a deliberate bug. A bug is noticed by a checker's violation or by a
transition that a core refuses. Any other exception is a defect of the mutation and fails its test. The
noticing seed must pass without the bug, because a world that fails anyway notices nothing.
"""

from collections.abc import Callable

import pytest
from sim.checkers import Violation

from fabric.errors import IllegalTransition

NOTICED = (Violation, IllegalTransition)


def find(mutate: Callable[[pytest.MonkeyPatch], None], play: Callable[[int], object], seeds: int) -> int:
    """Return the first of ``seeds`` worlds that notices the bug; fail the test if none does."""
    name = mutate.__name__.replace("_", " ")
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        seed = _first(play, seeds, name)
    if seed < 0:
        pytest.fail(f"{seeds} worlds did not notice: {name}")
    play(seed)
    return seed


def _first(play: Callable[[int], object], seeds: int, name: str) -> int:
    for seed in range(seeds):
        try:
            play(seed)
        except NOTICED as error:
            print(f"{name}: seed {seed}: {type(error).__name__}: {error}")
            return seed
    return -1
