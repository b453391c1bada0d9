"""Whether the simulator notices a deliberate bug. A bug is noticed by a checker's violation or by a
transition that a core refuses. Any other exception is a defect of the mutation and fails its test. The
noticing seed must pass without the bug, because a world that fails anyway notices nothing.

``noticing_seeds.json`` has the seed that has noticed each bug, which is tried first. When the protocol has
changed, another seed may notice it: the search then takes longer, until ``pytest tests/sim --hunt`` writes
the file again.
"""

import os
from collections.abc import Callable, Iterable

import pytest
from sim.checkers import Violation

from fabric.errors import IllegalTransition

NOTICED = (Violation, IllegalTransition)
SEEDS: dict[str, int] = {}  # test -> the seed that noticed its bug


def find(mutate: Callable[[pytest.MonkeyPatch], None], play: Callable[[int], object], seeds: int) -> int:
    """Return the first of ``seeds`` worlds that notices the bug; fail the test if none does."""
    name = mutate.__name__.replace("_", " ")
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition("/")[2].rpartition(" ")[0]
    known = [SEEDS[test]] if test in SEEDS else []
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        seed = _first(play, [*known, *range(seeds)], name)
    if seed < 0:
        pytest.fail(f"{seeds} worlds did not notice: {name}")
    play(seed)
    SEEDS[test] = seed
    return seed


def _first(play: Callable[[int], object], seeds: Iterable[int], name: str) -> int:
    for seed in seeds:
        try:
            play(seed)
        except NOTICED as error:
            print(f"{name}: seed {seed}: {type(error).__name__}: {error}")
            return seed
    return -1
