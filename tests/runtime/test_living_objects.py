"""A search of all living objects leaves the other threads alone."""

import sys
import threading
from pathlib import Path

import pytest

from fabric.runtime import living_objects

FABRIC = Path(living_objects.__file__).parents[1]


class Marked(list):
    pass


class Deeper(Marked):
    pass


@pytest.fixture
def quick_switches():
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    "search",
    [lambda: living_objects.living(Marked), lambda: living_objects.contents_of_tuples(range(60), {Marked})],
    ids=["objects", "tuples"],
)
def test_no_thread_that_builds_a_tuple_meanwhile_fails(quick_switches, search):
    """Python raised SystemError in the thread while the search held its half-built tuple."""
    ended, built, failures = threading.Event(), [0], []

    def build() -> None:
        while not ended.is_set():
            try:
                tuple(x for x in range(50))
            except SystemError as error:
                failures.append(error)
                return
            built[0] += 1

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        before = built[0]
        search()
        while built[0] == before and not failures:  # the others have a turn between two searches
            threading.Event().wait(0.0001)
    ended.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_objects_are_found_by_their_types_and_tuples_by_their_contents():
    own, deeper = Marked([1]), Deeper([2])
    pair = (own, deeper)
    assert {id(own), id(deeper)} <= {id(x) for x in living_objects.living(Marked)}
    of_own = [id(x) for x in living_objects.of_types({Marked})]
    assert of_own.count(id(own)) == 1 and id(deeper) not in of_own
    rows = living_objects.contents_of_tuples(range(2, 3), {Deeper})
    assert rows == [(id(pair), [deeper, own])]
    assert not living_objects.contents_of_tuples(range(3, 9), {Deeper})


def test_a_search_for_lists_does_not_find_its_own_answer():
    """A list in itself keeps all that it holds until the next collection."""
    objects = living_objects.of_types({list})
    assert not any(x is objects for x in objects)


def test_nothing_else_holds_all_objects():
    asking = [p.name for p in FABRIC.rglob("*.py") if "get_objects" in p.read_text()]
    assert asking == ["living_objects.py"]
