"""The assignment gives every micro-batch to exactly one member, by shares, and is stable while the roster
is.
"""

from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.model import Member, Sharing, apportion
from fabric.protocol.rules.assignment import (
    Work,
    assign,
    cut,
    data_slot_shares,
    hand_round,
    readers_of,
    seated,
    share_out,
    spread,
)

shares_of = st.lists(st.integers(0, 9), min_size=1, max_size=8)
counts = st.integers(0, 60)


def roster(shares):
    return [Member(f"r{i}", 1, "", "", shares=share) for i, share in enumerate(shares)]


def flat(given_out):
    return sorted(i for ids in given_out.values() for i in ids)


@given(counts, shares_of)
def test_apportioned_parts_sum_to_the_total_and_differ_from_their_quota_by_less_than_one(count, shares):
    parts = apportion(count, shares)
    assert sum(parts) == count
    weights = shares if sum(shares) else [1] * len(shares)
    for part, share in zip(parts, weights, strict=True):
        exact = count * share / sum(weights)
        assert floor(exact) <= part <= floor(exact) + 1
        assert share > 0 or part == 0


@given(counts, st.lists(shares_of, min_size=1, max_size=4))
def test_every_micro_batch_is_assigned_once_over_any_history_of_rosters(count, history):
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
def test_every_orphaned_micro_batch_is_given_to_one_member(count, shares, loads):
    members = roster(shares)
    load = {m.replica: loads[i] for i, m in enumerate(members)}
    assert flat(spread(range(count), members, load)) == list(range(count))


@given(st.integers(1, 40), st.lists(st.integers(0, 6), min_size=2, max_size=6))
def test_orphaned_micro_batches_level_the_loads_of_equal_members(count, loads):
    members = roster([1] * len(loads))
    given_out = spread(range(count), members, {f"r{i}": load for i, load in enumerate(loads)})
    after = [loads[i] + len(given_out[f"r{i}"]) for i in range(len(loads))]
    received = [i for i in range(len(loads)) if given_out[f"r{i}"]]
    assert max(after[i] for i in received) - min(after) <= 1


def test_an_assignment_without_members_is_an_error():
    with pytest.raises(ValueError, match="no member is left"):
        assign(range(3), [])
    with pytest.raises(ValueError, match="no member is left"):
        spread(range(3), [], {})


# --- parts and seats ------------------------------------------------------------------------------------

sharings = st.builds(
    Sharing, st.sampled_from(["constant", "shrink"]), st.integers(1, 6), st.integers(0, 3), st.just("skip")
)
rosters = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 3)), min_size=1, max_size=6, unique_by=lambda pair: pair[0]
)


def seated_roster(pairs):
    return [
        Member(f"r{data_slot}", 1, "", "", shares=share, data_slot=data_slot) for data_slot, share in pairs
    ]


def home_of(count, sharing, members):
    parts = cut(count, data_slot_shares(sharing, members))
    return {i: part for part, ids in enumerate(parts) for i in ids}


@given(counts, sharings, st.lists(rosters, min_size=1, max_size=4), st.sets(st.integers(0, 59), max_size=5))
def test_no_history_computes_a_micro_batch_twice_or_leaves_one_out_unexplained(count, sharing, history, skip):
    work = Work(count, sharing)
    for pairs in history:
        members = seated_roster(pairs)
        given_out = share_out(work, members, members, skip)
        ids = flat(given_out)
        assert len(ids) == len(set(ids)) and not set(ids) & skip
        left_out = set(range(count)) - set(ids) - skip
        home, there = home_of(count, sharing, members), {m.data_slot for m in members}
        if sharing.policy == "constant" and not sharing.readers:
            assert not left_out
        for i in left_out:
            may = {home[i]} if sharing.policy == "shrink" else set(readers_of(home[i], sharing))
            assert not may & there
        for member in members:
            for i in given_out[member.replica]:
                if sharing.policy == "shrink":
                    assert home[i] == member.data_slot
                elif sharing.readers:
                    assert member.data_slot in readers_of(home[i], sharing)
        assert share_out(work, members, members, skip) == given_out


@given(counts, st.integers(1, 6), st.sets(st.integers(0, 5), min_size=1))
def test_with_equal_shares_a_part_never_moves_under_shrink(count, data_slots, there):
    sharing = Sharing("shrink", data_slots)
    everybody = seated_roster([(data_slot, 1) for data_slot in range(data_slots)])
    some = [m for m in everybody if m.data_slot in there] or everybody[:1]
    whole = share_out(Work(count, sharing), everybody, everybody)
    part = share_out(Work(count, sharing), some, some)
    assert all(part[name] == whole[name] for name in part)


@given(counts, sharings, rosters, st.data())
def test_a_redone_step_gives_each_missing_micro_batch_to_one_able_member(count, sharing, pairs, data):
    members = seated_roster(pairs)
    whole = share_out(Work(count, sharing), members, members)
    dead = data.draw(st.sets(st.sampled_from([m.replica for m in members]), max_size=len(members) - 1))
    left = [m for m in members if m.replica not in dead]
    have = {m.replica: set(whole[m.replica]) for m in left}
    missing = set(range(count)) - set().union(*have.values())
    load = {name: len(ids) for name, ids in have.items()}
    extra = hand_round(Work(count, sharing), left if sharing.readers else members, left, missing, load)
    ids = flat(extra)
    assert len(ids) == len(set(ids)) and set(ids) <= missing
    if sharing.policy == "shrink":
        assert not ids, "the share of the dead is skipped"
    elif not sharing.readers:
        assert set(ids) == missing


@given(
    st.lists(st.integers(-1, 4), min_size=1, max_size=6),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5)),
)
def test_every_member_has_a_data_slot_of_its_own(wishes, remembered):
    members = [
        Member(name, 1, "", "", data_slot=data_slot)
        for name, data_slot in zip("abcdef", wishes, strict=False)
    ]
    found = seated(members, remembered)
    data_slots = [m.data_slot for m in found]
    assert len(set(data_slots)) == len(data_slots) and min(data_slots) >= 0
    assert seated(found, {}) == found, "who sits stays"
    for member, now in zip(members, found, strict=True):
        alone = wishes.count(member.data_slot) == 1
        assert now.data_slot == member.data_slot or not alone or member.data_slot < 0


def test_a_member_that_comes_back_gets_its_old_data_slot():
    members = [Member("b", 1, "", "", data_slot=1), Member("a", 2, "", "")]
    assert [m.data_slot for m in seated(members, {"a": 0, "c": 2})] == [1, 0]


def test_an_assignment_without_able_members_is_an_error_under_every_policy():
    with pytest.raises(ValueError, match="no member is left"):
        share_out(Work(4, Sharing("shrink")), [], [])
