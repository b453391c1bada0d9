"""Whether the simulator notices a deliberate bug. A bug is noticed by a checker's violation or by a
transition that a core refuses. Any other exception is a defect of the mutation and fails its test. The
noticing seed must pass without the bug, because a world that fails anyway notices nothing.

``noticing_seeds.json`` has the seed that has noticed each bug, and the seeds that meet all rare events of a
kind of worlds. They are tried first. When the protocol has changed, other seeds may do so: the search then
takes longer, and a warning says so. ``pytest tests/sim --renew`` writes down what this search has found.
``pytest tests/sim --hunt`` forgets the file, plays all seeds and writes the file again.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from sim.checkers import Violation
from sim.run import KINDS
from sim.world import World

from fabric.errors import IllegalTransition

NOTICED = (Violation, IllegalTransition)
Kind = str | Callable[..., World]  # a kind of worlds by its name, or what builds one from a seed and options
SEEDS: dict[str, int] = {}  # test -> the seed that noticed its bug
ALWAYS = 2  # of each kind of worlds, so many are played in any case
COVERS: dict[str, list[int]] = {}  # kind of worlds -> the seeds that meet all its rare events
STALE: set[str] = set()  # tests and kinds whose known seeds no longer do what they are for


def find(
    mutate: Callable[[pytest.MonkeyPatch], None], kind: Kind, seeds: Sequence[int], **options: Any
) -> int:
    """Return the first of ``seeds`` whose world notices the bug; fail the test if none does."""
    name = mutate.__name__.replace("_", " ")
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition("/")[2].rpartition(" ")[0]
    known = [SEEDS[test]] if test in SEEDS else []
    options = {key: value for key, value in options.items() if value}
    # Worlds that another test plays anyway cost less: without the bug each is played once in a session.
    played = [] if options else [seed for seed in COVERS.get(str(kind), []) if seed in seeds]
    first, *others = dict.fromkeys((*known, *played, *seeds))
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        for seed in (first, *others):
            try:
                _build(kind, seed, options).run()
            except NOTICED as error:
                print(f"{name}: seed {seed}: {type(error).__name__}: {error}")
                break
        else:
            pytest.fail(f"{len(seeds)} worlds did not notice: {name}")
    met_without_a_bug(kind, seed, **options)
    SEEDS[test] = seed
    if seed != first:
        STALE.add(test)
    return seed


@functools.cache
def met_without_a_bug(kind: Kind, seed: int, **options: Any) -> frozenset[str]:
    """Play a world without a bug, once in a session; return the events that it meets. No world may fail."""
    world = _build(kind, seed, options)
    try:
        world.run()
    except Exception as error:
        error.add_note(f"replay: python tests/sim/run.py --kind {kind} --seed {seed}")
        raise
    return frozenset(name for name, number in world.clockwork.counts.items() if number)


def _build(kind: Kind, seed: int, options: dict[str, Any]) -> World:
    build: Callable[..., World] = KINDS[kind] if isinstance(kind, str) else kind
    return build(seed, **options)


def meet(kind: str, required: Sequence[str], seeds: int) -> None:
    """Play worlds of this kind: no world fails, and each rare event of ``required`` occurs in some world.

    This plays the known seeds and a few more. Where an event has not occurred in them, it plays further seeds
    until each has. Without known seeds it plays all ``seeds``.
    """
    known = COVERS.get(kind, [])
    met = {seed: met_without_a_bug(kind, seed) for seed in (*known, *range(ALWAYS if known else 0))}
    for seed in range(seeds):
        if known and not _missing(required, met):
            break
        met[seed] = met_without_a_bug(kind, seed)
    missing = _missing(required, met)
    assert not missing, f"never happened in {len(met)} {kind} worlds: {missing}"
    if known and set(met) <= {*known, *range(ALWAYS)}:
        return
    STALE.add(kind)
    left, COVERS[kind] = set(required), []
    while left:
        best = max(met, key=lambda seed: len(left & met[seed]))
        COVERS[kind].append(best)
        left -= met[best]


def _missing(required: Sequence[str], met: dict[int, frozenset[str]]) -> list[str]:
    there = set[str]().union(*met.values())
    return [name for name in required if name not in there]
