"""The cyclic collector runs a full collection in a quiet moment, or after a bounded time."""

import asyncio
import gc

import pytest

from fabric.lighthouse import service
from fabric.lighthouse.service import (
    CALM_LOOKS,
    MOST_LOOKS,
    THRESHOLDS,
    WHOLE,
    CollectionSchedule,
    collect_when_calm,
)


def first(
    due: CollectionSchedule, is_calm: bool, counts: tuple[int, int, int], looks: int
) -> tuple[int, int] | None:
    """Return the number of the first look with a collection, and the collected generation."""
    for number in range(1, looks + 1):
        generation = due.look(is_calm, counts)
        if generation is not None:
            return number, generation
    return None


def test_no_collection_runs_before_it_is_due():
    assert first(CollectionSchedule(), True, (49_000, 0, WHOLE - 1), 10 * MOST_LOOKS) is None


@pytest.mark.parametrize(("counts", "generation"), [((0, 1, 0), 1), ((0, 0, WHOLE), 2), ((0, 3, WHOLE), 2)])
def test_a_due_collection_waits_for_calm_but_not_for_ever(counts, generation):
    assert first(CollectionSchedule(), True, counts, MOST_LOOKS) == (CALM_LOOKS, generation)
    assert first(CollectionSchedule(), False, counts, 2 * MOST_LOOKS) == (MOST_LOOKS, generation)
    changing = CollectionSchedule()
    assert first(changing, True, counts, CALM_LOOKS - 1) is None
    assert first(changing, False, counts, 1) is None, "a change begins"
    assert first(changing, True, counts, MOST_LOOKS) == (CALM_LOOKS, generation), "and it is calm again"


def test_python_collects_all_but_the_oldest_generation_on_its_own():
    assert THRESHOLDS[0] * THRESHOLDS[1] < 1_000_000 < THRESHOLDS[2]


async def test_due_collections_find_garbage_of_the_oldest_generation(monkeypatch):
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            gone.set()

    monkeypatch.setattr(service, "LOOK_S", 0.001)
    gone, before = asyncio.Event(), gc.get_threshold()
    gc.set_threshold(1 << 30, 1 << 30, 1 << 30)
    task = asyncio.ensure_future(collect_when_calm(lambda: True))
    try:
        kept = [Cycle()]
        gc.collect(0)  # this moves all existing objects to the middle generation
        kept.clear()
        gc.collect(0)
        assert not gone.is_set()
        async with asyncio.timeout(20):
            await gone.wait()
    finally:
        gc.set_threshold(*before)
        task.cancel()
