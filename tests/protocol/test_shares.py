"""Shares by speed: the same for every roster, at least one micro-batch, and the planner's division."""

import random

import pytest
from msgspec.structs import replace
from protocol.makers import member_of, record_of

from fabric.health.planning import micro_batch_shares
from fabric.model import Adaptation, MemberSpeed, Sharing
from fabric.protocol.rules.assignment import (
    FULL_SPEED,
    apportion,
    asked_share,
    for_roster,
    objection_to_shares,
    with_shares,
)

TOTAL = 12


def adaptation(micro_batches=TOTAL, **speeds):
    return Adaptation(
        tuple(MemberSpeed(name, 1, speed) for name, speed in speeds.items()), micro_batches=micro_batches
    )


def roster_of(names):
    return tuple(member_of(name) for name in names.split())


def counts(roster, asked, adapted, total=TOTAL):
    return apportion(total, [x.shares for x in with_shares(roster, asked, adapted)])


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({}, [3, 3, 3, 3]),
        ({"d": 500}, [4, 3, 3, 2]),
        ({"c": 500, "d": 500}, [4, 4, 2, 2]),
        ({"a": 250}, [1, 4, 4, 3]),
    ],
)
def test_micro_batches_follow_the_speeds_by_the_largest_remainder(speeds, expected):
    assert counts(roster_of("a b c d"), [1] * 4, adaptation(**speeds)) == expected


def test_sixteen_micro_batches_at_half_speed_are_those_of_the_design_note():
    assert counts(roster_of("a b c d"), [1] * 4, adaptation(16, d=500), 16) == [5, 5, 4, 2]


def test_the_division_is_the_planners_for_every_speed_that_leaves_a_micro_batch():
    rng = random.Random(3)
    for _ in range(500):
        size = rng.randrange(2, 8)
        total = rng.randrange(2 * size, 6 * size)
        names = [f"r{i}" for i in range(size)]
        speeds = {name: rng.randrange(300, 1000) for name in names if rng.random() < 0.4}
        roster = tuple(member_of(name) for name in names)
        capacities = [speeds.get(name, FULL_SPEED) for name in names]
        if min(total * c for c in capacities) < sum(capacities):
            continue
        ours = counts(roster, [1] * size, adaptation(total, **speeds), total)
        assert ours == list(micro_batch_shares(total, capacities))


def test_a_slow_member_keeps_one_micro_batch_at_any_speed_and_in_any_roster():
    for size in range(2, 9):
        roster = roster_of(" ".join(f"r{i}" for i in range(size)))
        for total in range(size, 4 * size):
            given = counts(roster, [1] * size, adaptation(total, r0=1), total)
            assert given[0] >= 1 and sum(given) == total


def test_a_member_never_gets_more_than_it_asked_for():
    roster = roster_of("a b")
    shares = [x.shares for x in with_shares(roster, [1, 1000], adaptation(2, a=1))]
    assert shares == [FULL_SPEED, 1000 * FULL_SPEED]


def test_without_a_slow_member_each_share_is_the_asked_one():
    roster = with_shares(roster_of("a b c"), [2, 1, 3], adaptation(b=600))
    assert [x.shares for x in roster] == [2000, 600, 3000]
    assert [x.shares for x in with_shares(roster, [2, 1, 3], Adaptation())] == [2, 1, 3]


def test_the_asked_share_is_read_back_from_the_record_for_every_member():
    speeds = tuple(MemberSpeed("b", 1, 7, asked=2) for _ in range(1))
    adapted = Adaptation(speeds, micro_batches=TOTAL)
    record = record_of("a b c")
    record = replace(record, roster=with_shares(record.roster, [3, 2, 1], adapted), adaptation=adapted)
    assert [asked_share(record, x) for x in record.roster] == [3, 2, 1]
    newcomer = member_of("d", shares=5)
    assert asked_share(record, newcomer) == 5, "a newcomer's entry has the share that it asks for"
    again = member_of("b", incarnation=2, shares=4)
    assert asked_share(record, again) == 4, "so has the next process of the slow replica"


def test_a_process_that_left_the_roster_takes_its_speed_with_it():
    adapted = replace(adaptation(a=300, b=500), gain=0.5, reason="both are slow", acted=(7.0,))
    assert for_roster(adapted, roster_of("a b c")) is adapted
    left = for_roster(adapted, (member_of("a"), member_of("b", incarnation=2)))
    assert [x.replica for x in left.speeds] == ["a"] and left.acted == (7.0,)
    assert for_roster(adapted, roster_of("c d")) == Adaptation(acted=(7.0,))


@pytest.mark.parametrize(
    ("sharing", "words"),
    [
        (Sharing("constant"), ""),
        (Sharing("constant", data_slots=4, readers=2), "only its part of the data"),
        (Sharing("shrink", data_slots=4), "skips the part of an absent replica"),
    ],
)
def test_only_a_constant_batch_that_all_can_read_takes_unequal_shares(sharing, words):
    why = objection_to_shares(sharing)
    assert words in why and bool(words) == bool(why)
