"""Who computes what: every micro-batch exactly once, by shares, stable while the roster is."""

from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.model import Member
from fabric.protocol.assignment import apportion, assign, spread

shares_of = st.lists(st.integers(0, 9), min_size=1, max_size=8)
counts = st.integers(0, 60)


def roster(shares):
    return [Member(f"r{i}", 1, "", "", shares=share) for i, share in enumerate(shares)]


def flat(given_out):
    return sorted(i for ids in given_out.values() for i in ids)


@given(counts, shares_of)
def test_apportion_gives_everything_and_nobody_is_off_by_one(count, shares):
    parts = apportion(count, shares)
    assert sum(parts) == count
    weights = shares if sum(shares) else [1] * len(shares)
    for part, share in zip(parts, weights, strict=True):
        exact = count * share / sum(weights)
        assert floor(exact) <= part <= floor(exact) + 1
        assert share > 0 or part == 0


@given(counts, st.lists(shares_of, min_size=1, max_size=4))
def test_every_micro_batch_once_over_any_history_of_rosters(count, history):
    for shares in history:
        members = roster(shares)
        assert flat(assign(range(count), members)) == list(range(count))
        assert assign(range(count), members) == assign(reversed(range(count)), members)


@given(counts, st.integers(1, 8))
def test_equal_shares_are_balanced_and_contiguous(count, size):
    sizes = []
    for ids in assign(range(count), roster([1] * size)).values():
        assert list(ids) == list(range(ids[0], ids[0] + len(ids))) if ids else True
        sizes.append(len(ids))
    assert max(sizes) - min(sizes) <= 1


@given(counts, shares_of, st.lists(st.integers(0, 20), min_size=8, max_size=8))
def test_spread_gives_every_orphan_once(count, shares, loads):
    members = roster(shares)
    load = {m.replica: loads[i] for i, m in enumerate(members)}
    assert flat(spread(range(count), members, load)) == list(range(count))


@given(st.integers(1, 40), st.lists(st.integers(0, 6), min_size=2, max_size=6))
def test_spread_levels_equal_members(count, loads):
    members = roster([1] * len(loads))
    given_out = spread(range(count), members, {f"r{i}": load for i, load in enumerate(loads)})
    after = [loads[i] + len(given_out[f"r{i}"]) for i in range(len(loads))]
    received = [i for i in range(len(loads)) if given_out[f"r{i}"]]
    assert max(after[i] for i in received) - min(after) <= 1


def test_nobody_left_is_an_error():
    with pytest.raises(ValueError, match="nobody is left"):
        assign(range(3), [])
    with pytest.raises(ValueError, match="nobody is left"):
        spread(range(3), [], {})
