"""Whether the simulator notices a deliberate bug. A bug is noticed by a checker's violation or by a
transition that a core refuses. Any other exception is a defect of the mutation and fails its test. The
noticing seed must pass without the bug, because a world that fails anyway notices nothing.

``noticing_seeds.json`` has the seed that has noticed each bug, and the seeds that meet all rare events of a
kind of worlds. They are tried first. When the protocol has changed, other seeds may do so: the search then
takes longer, until ``pytest tests/sim --hunt`` plays all seeds and writes the file again.
"""

import os
from collections.abc import Callable, Iterable, Sequence

import pytest
from sim.checkers import Violation
from sim.run import hunt

from fabric.errors import IllegalTransition

NOTICED = (Violation, IllegalTransition)
SEEDS: dict[str, int] = {}  # test -> the seed that noticed its bug
ALWAYS = 5  # of each kind of worlds, so many are played in any case
COVERS: dict[str, list[int]] = {}  # kind of worlds -> the seeds that meet all its rare events


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


def meet(kind: str, required: Sequence[str], seeds: int) -> None:
    """Play worlds of this kind: no world fails, and each rare event of ``required`` occurs in some world.

    This plays the known seeds and a few more. Without known seeds, or where an event has not occurred in
    them, it plays all ``seeds``.
    """
    known = COVERS.get(kind, [])
    met = {seed: _met(kind, seed) for seed in (*known, *range(ALWAYS if known else 0))}
    if not known or _missing(required, met):
        met |= {seed: _met(kind, seed) for seed in range(seeds) if seed not in met}
    missing = _missing(required, met)
    assert not missing, f"never happened in {len(met)} {kind} worlds: {missing}"
    left, COVERS[kind] = set(required), []
    while left:
        best = max(met, key=lambda seed: len(left & met[seed]))
        COVERS[kind].append(best)
        left -= met[best]


def _met(kind: str, seed: int) -> set[str]:
    counts, failures = hunt(seed, seed + 1, kind)
    assert not failures, failures[0]
    return {name for name, number in counts.items() if number}


def _missing(required: Sequence[str], met: dict[int, set[str]]) -> list[str]:
    there = set[str]().union(*met.values())
    return [name for name in required if name not in there]
