"""Blame after a stall: the wait-for graph, ring orders without bad links, and the lateness of members."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.protocol.rules.wait_graph import StragglerTracker, blamed_link, ring_order, root_waiters


@pytest.mark.parametrize(
    ("waiting", "guilty"),
    [
        ({"a": "d", "b": "a", "c": "b", "d": ""}, "d"),  # all wait in a row for d, and d waits for no member
        ({"a": "d", "b": "a", "c": "b"}, "d"),  # d does not answer at all
        # a circle of waits: the fault lies in a link, not in a member
        ({"a": "d", "b": "a", "c": "b", "d": "c"}, ""),
        ({"a": "c", "b": "d"}, "cd"),
        ({"a": "", "b": ""}, ""),  # no member waits
        # at the commit votes a misses three members, of which only d has no excuse
        ({"a": "bcd", "b": "d", "c": "d"}, "d"),
    ],
)
def test_the_member_that_waits_for_no_other_is_blamed(waiting, guilty):
    assert root_waiters({n: tuple(w) for n, w in waiting.items()}, "abcd") == tuple(guilty)


def cost(names, bad):
    return sum(bad.get((a, b), 0) for a, b in zip(names, names[1:] + names[:1], strict=True))


NAMES = "abcdef"


@given(
    st.integers(1, 6),
    st.dictionaries(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), st.integers(1, 3), max_size=2),
)
def test_a_bad_link_is_left_out_where_that_can_be(world, bad):
    names = tuple(NAMES[:world])
    found = ring_order(names, bad)
    assert sorted(found) == sorted(names)
    assert cost(found, bad) <= cost(names, bad)
    best = min(cost(order, bad) for order in itertools.permutations(names))
    if len(bad) == 1:
        assert cost(found, bad) == best


def test_without_complaints_the_order_stays():
    assert ring_order("abcd", {}) == ("a", "b", "c", "d")


def test_three_members_turn_the_ring_around():
    assert ring_order("abc", {("a", "b"): 1}) == ("c", "b", "a")


def test_the_order_of_two_thousand_members_avoids_bad_links():
    names = tuple(f"r{i:04}" for i in range(2000))
    found = ring_order(names, {("r0007", "r0008"): 2, ("r1999", "r0000"): 1})
    assert cost(found, {("r0007", "r0008"): 2, ("r1999", "r0000"): 1}) == 0


def test_a_complaint_is_about_the_link_between_neighbours():
    assert blamed_link("abcd", about="a", by="b") == ("a", "b")
    assert blamed_link("abcd", about="b", by="a") == ("a", "b")
    assert blamed_link("abcd", about="c", by="a") is None
    assert blamed_link("abcd", about="d", by="a") == ("d", "a")
    assert blamed_link("abcd", about="x", by="a") is None


def test_lateness_begins_again_with_every_step():
    late = StragglerTracker()
    assert late.waited_s("a", 7, 100.0) == 0
    assert late.waited_s("a", 7, 103.0) == 3.0
    assert late.waited_s("a", 8, 104.0) == 0
    late.came("a")
    assert late.waited_s("a", 8, 110.0) == 0


def test_a_member_that_no_report_names_any_more_has_come():
    late = StragglerTracker()
    late.report("c", ["a", "b"])
    late.report("b", ["a"])
    for name in ("a", "b"):
        assert late.waited_s(name, 7, 100.0) == 0
    late.report("c", [])
    late.report("c", ["a"])
    assert late.waited_s("a", 7, 130.0) == 30.0
    assert late.waited_s("b", 7, 130.0) == 0, "b came at once; now the others wait for its vote"


def test_a_member_that_another_report_still_names_has_not_come():
    late = StragglerTracker()
    late.report("c", ["a", "b"])
    late.report("d", ["a", "b"])
    assert late.waited_s("b", 7, 100.0) == 0
    late.report("c", ["a"])
    assert late.waited_s("b", 7, 130.0) == 30.0
