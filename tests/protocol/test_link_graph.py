"""The largest set of members that reach each other, compared with brute force; and the time that links must
hold.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.model import ReplicaProcess
from fabric.protocol.rules import link_graph
from fabric.protocol.rules.link_graph import (
    CALM_LIMIT_S,
    CALM_S,
    FORGET_S,
    Healing,
    missing_links,
    reachable_set,
)

NAMES = "abcdefgh"


def brute_force(names, missing, newcomers):
    """Try every subset without a missing link, by the plain words of the rule."""
    best = None
    for size in range(len(names) + 1):
        for kept in itertools.combinations(range(len(names)), size):
            inside = {names[i] for i in kept}
            if any(a in inside and b in inside for a, b in missing):
                continue
            worth = (len(inside - set(newcomers)), size, tuple(-i for i in kept))
            best = max(best, (worth, kept)) if best else (worth, kept)
    return tuple(names[i] for i in best[1])


pairs = st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)).filter(lambda p: p[0] < p[1])


@given(st.permutations(NAMES), st.sets(pairs, max_size=16), st.sets(st.sampled_from(NAMES), max_size=3))
def test_the_chosen_set_of_members_equals_a_brute_force_search(names, missing, newcomers):
    assert reachable_set(names, missing, newcomers) == brute_force(names, missing, newcomers)


@given(st.permutations(NAMES), st.sets(pairs, max_size=28), st.sets(st.sampled_from(NAMES), max_size=3))
def test_no_member_can_be_added_to_a_set_that_may_be_smaller(names, missing, newcomers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_graph, "EXACT", 0)
        kept = reachable_set(names, missing, newcomers)
    torn = [p for p in missing if p[0] in kept and p[1] in kept]
    assert not torn
    for name in set(names) - set(kept):
        assert any(name in p and (p[0] in kept or p[1] in kept) for p in missing), name


@pytest.mark.parametrize(
    ("missing", "kept"),
    [
        (set(), "abcd"),
        ({("a", "b")}, "acd"),  # of two members without a link the more senior one stays
        ({("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")}, "ab"),  # the network is split into halves
        ({("a", "b"), ("a", "c"), ("a", "d")}, "bcd"),  # member a reaches no other member
        ({("a", "b"), ("b", "c"), ("c", "d")}, "ac"),  # of three sets of equal size the most senior set stays
    ],
)
def test_the_members_that_reach_each_other_go_on(missing, kept):
    assert reachable_set("abcd", missing) == tuple(kept)


def test_a_newcomer_goes_before_a_veteran():
    assert reachable_set("abcd", {("a", "c"), ("b", "c")}, newcomers="ab") == tuple("cd")


def test_one_rack_of_many_goes_together():
    near, far = [f"a{i:03}" for i in range(500)], [f"b{i:03}" for i in range(500)]
    missing = set(itertools.product(near, far))
    assert reachable_set(near + far, missing) == tuple(near)


def test_a_link_is_missing_when_either_end_says_so():
    said = {"a": ("b", "x"), "b": ("a",), "c": ("d",), "d": ("d",)}
    assert missing_links(said, "abcd") == {("a", "b"), ("c", "d")}


def test_links_must_be_whole_for_longer_every_time():
    healing, process = Healing(), ReplicaProcess("a", 1)
    assert healing.is_calm(process, 0.0) and healing.calm_s(process) == 0
    healing.left_out(process, 100.0)
    assert not healing.is_calm(process, 100.0 + CALM_S - 0.1) and healing.is_calm(process, 100.0 + CALM_S)
    healing.missed(process, 103.0)
    assert not healing.is_calm(process, 100.0 + CALM_S), "it counts from the last word of a missing link"
    for _ in range(9):
        healing.left_out(process, 200.0)
    assert healing.calm_s(process) == CALM_LIMIT_S
    assert healing.is_calm(ReplicaProcess("a", 2), 200.0), "another process may have better links"


def test_old_trouble_is_forgotten():
    healing, process = Healing(), ReplicaProcess("a", 1)
    for at in (0.0, 1.0, 2.0 + FORGET_S):
        healing.left_out(process, at)
    assert healing.calm_s(process) == CALM_S
    healing.forget("a")
    assert healing.is_calm(process, 2.0 + FORGET_S)
