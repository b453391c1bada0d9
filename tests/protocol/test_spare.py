"""SPARe's assignment: layouts, the matching compared with brute force, and the changes after a failure."""

import random
from itertools import combinations

import pytest

from fabric.protocol.rules import spare

LENGTHS = [0, 1, 3, 6, 11, 17, 25, 34, 44, 55, 72, 85, 106, 127, 151, 177, 199, 216, 246, 283, 333, 356, 372]
LENGTHS += [425, 480, 492]  # OEIS A003022


def test_the_table_holds_optimal_golomb_rulers():
    for marks, ruler in enumerate(spare.GOLOMB_RULERS, 1):
        differences = [b - a for a, b in combinations(ruler, 2)]
        assert len(ruler) == marks
        assert len(set(differences)) == len(differences)
        assert ruler[-1] == LENGTHS[marks - 1]


@pytest.mark.parametrize(("groups", "redundancy"), [(7, 3), (13, 4), (23, 5), (200, 9), (1000, 26)])
def test_two_types_of_a_golomb_layout_share_at_most_one_host(groups, redundancy):
    stacks = spare.ring_layout(groups, spare.golomb_offsets(groups, redundancy))
    hosts = [set() for _ in range(groups)]
    for group, stack in enumerate(stacks):
        for type_ in stack:
            hosts[type_].add(group)
    assert all(len(h) == redundancy for h in hosts)
    assert all(len(hosts[0] & hosts[other]) <= 1 for other in range(1, groups))


@pytest.mark.parametrize(
    ("groups", "redundancy", "sentence"),
    [
        (6, 3, "6 groups are too few for a Golomb layout of redundancy 3: it needs 7"),
        (5, 6, "the redundancy must be 1 to 5, the number of groups, not 6"),
        (0, 1, "a job needs at least 1 group, not 0"),
        (2000, 27, "no optimal Golomb ruler of 27 marks is known"),
    ],
)
def test_an_impossible_layout_is_refused_with_a_sentence(groups, redundancy, sentence):
    with pytest.raises(ValueError, match=sentence):
        spare.golomb_offsets(groups, redundancy)


def test_the_best_offsets_fall_back_to_consecutive_ones_where_the_ring_is_too_small():
    assert spare.best_offsets(7, 3) == (0, 1, 3)
    assert spare.best_offsets(5, 3) == (0, 1, 2)
    # Below the ruler's general condition (35), but no difference repeats around a ring of 31.
    assert spare.best_offsets(31, 6) == spare.GOLOMB_RULERS[5]
    assert spare.best_offsets(30, 6) == (0, 1, 2, 3, 4, 5)


def test_a_layout_without_a_host_for_each_type_is_refused():
    with pytest.raises(ValueError, match="no group hosts type 1"):
        spare.StackedShards([[0], [0]])
    with pytest.raises(ValueError, match="the stack of group 0 repeats a type"):
        spare.StackedShards([[0, 0], [1]])


def test_without_failures_every_group_computes_one_type_and_owns_it():
    shards = spare.StackedShards(spare.ring_layout(7, (0, 1, 3)))
    assert shards.depth == 1
    assert sorted(shards.owner) == list(range(7))
    assert all(shards.computes(group) == (group,) for group in range(7))


@pytest.mark.parametrize(("groups", "offsets"), [(7, (0, 1, 3)), (13, (0, 1, 3, 9))])
def test_the_depth_is_the_lower_bound_for_every_set_of_survivors_of_a_perfect_difference_set(groups, offsets):
    wiped = masked = 0
    for lost in range(1, groups):
        for failed in combinations(range(groups), lost):
            shards = spare.StackedShards(spare.ring_layout(groups, offsets))
            if shards.fail(failed) is None:
                wiped += 1
                continue
            masked += 1
            assert shards.depth == -(-groups // (groups - lost))
    assert wiped and masked


def test_a_failure_costs_no_more_than_brute_force_finds():
    """Compare depth, cost, owners and patch of every failure in random layouts of up to 7 groups."""
    rng = random.Random(5)
    checked = 0
    while checked < 400:
        groups = rng.randint(2, 7)
        offsets = sorted(rng.sample(range(groups), rng.randint(1, groups)))
        shards = spare.StackedShards(spare.ring_layout(groups, offsets))
        while len(shards.alive) > 1:
            lost = rng.sample(sorted(shards.alive), min(len(shards.alive), rng.choice((1, 1, 2, 3))))
            best = brute_force(shards, lost)
            computed = {group: set(shards.computes(group)) for group in shards.alive - set(lost)}
            alive_before, owners_before = set(shards.alive), list(shards.owner)
            patch = shards.fail(lost)
            checked += 1
            if best is None:
                assert patch is None
                assert (shards.alive, shards.owner) == (alive_before, owners_before)
                break
            assert patch is not None
            check(shards, patch, computed, best, offsets)


def check(shards, patch, computed, best, offsets):
    groups = len(shards.owner)
    moved = sum(type_ not in computed[owner] for type_, owner in enumerate(shards.owner))
    assert (shards.depth, moved) == best
    for type_, owner in enumerate(shards.owner):
        assert owner in shards.alive
        assert type_ in shards.computes(owner)
    for group in shards.alive:
        assert sorted(shards.stack(group)) == sorted((group + offset) % groups for offset in offsets)
        assert set(shards.computes(group)) - computed[group] == set(patch.compute.get(group, ()))


def brute_force(shards, lost):
    """Return (smallest depth, least number of types that their owner has not computed), or None if a type is
    lost.
    """
    alive = sorted(shards.alive - set(lost))
    computed = {group: set(shards.computes(group)) for group in alive}
    hosts = [[g for g in alive if type_ in shards.stack(g)] for type_ in range(len(shards.owner))]
    if not all(hosts):
        return None
    depth = shards.depth
    while (cost := cheapest(hosts, computed, dict.fromkeys(alive, depth))) is None:
        depth += 1
    return depth, cost


def cheapest(hosts, computed, free, type_=0):
    if type_ == len(hosts):
        return 0
    best = None
    for group in hosts[type_]:
        if free[group]:
            free[group] -= 1
            rest = cheapest(hosts, computed, free, type_ + 1)
            free[group] += 1
            if rest is not None:
                cost = rest + (type_ not in computed[group])
                best = cost if best is None else min(best, cost)
    return best


def test_the_depth_never_falls_below_the_bound_in_large_rings():
    rng = random.Random(1)
    for groups, redundancy in ((60, 4), (200, 9)):
        shards = spare.StackedShards(spare.ring_layout(groups, spare.golomb_offsets(groups, redundancy)))
        for failures, group in enumerate(rng.sample(range(groups), groups), 1):
            if shards.fail([group]) is None:
                break
            assert shards.depth >= -(-groups // (groups - failures))
        assert failures > groups // 4


def test_owners_with_some_groups_absent_are_a_pure_function_of_the_present_ones():
    rng = random.Random(2)
    for groups, redundancy in ((7, 3), (13, 4), (6, 3), (12, 2)):
        stacks = spare.ring_layout(groups, spare.best_offsets(groups, redundancy))
        for _ in range(60):
            present = frozenset(rng.sample(range(groups), rng.randint(1, groups)))
            settled = spare.settle(groups, redundancy, present)
            loads = [settled.owner.count(group) for group in range(groups)]
            for type_, owner in enumerate(settled.owner):
                hosts = {g for g, stack in enumerate(stacks) if type_ in stack}
                assert set(spare.hosts_of(type_, groups, redundancy)) == hosts
                assert owner in (hosts & present if hosts & present else {-1})
                assert owner == type_ or type_ not in present or max(loads) == settled.depth
            assert max(loads) == settled.depth
            whole = spare.StackedShards(stacks)
            if whole.fail(set(range(groups)) - present) is not None:
                assert settled.depth == whole.depth
    assert spare.settle(5, 2, frozenset()).owner == (-1,) * 5


def test_the_same_failures_give_the_same_stacks_everywhere():
    def play(order):
        shards = spare.StackedShards(spare.ring_layout(13, (0, 1, 3, 9)))
        for group in order:
            shards.fail([group])
        return [shards.stack(g) for g in sorted(shards.alive)], shards.owner, shards.depth

    assert play([4, 9, 1]) == play([4, 9, 1])
