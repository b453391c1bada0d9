"""The placement of data slots by rack is optimal in small jobs, and takes bounded time in large jobs."""

import functools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.model import Member, Sharing
from fabric.protocol.rules.assignment import lost_parts, place, readers_of, seated


def arrangements(labels):
    """All distinct orders of ``labels``."""
    if not labels:
        yield ()
    for label in sorted(set(labels), key=str):
        rest = list(labels)
        rest.remove(label)
        for tail in arrangements(rest):
            yield (label, *tail)


def partitions(total, most):
    """``total`` as sums of descending positive numbers up to ``most``."""
    if total == 0:
        yield ()
    for first in range(min(total, most), 0, -1):
        for rest in partitions(total - first, first):
            yield (first, *rest)


@functools.cache
def readers_by_shard(data_slots, readers):
    return [readers_of(shard, Sharing("constant", data_slots, readers)) for shard in range(data_slots)]


def quality(rack_on, data_slots, readers):
    """Return the numbers of shards without reader, with all readers in one rack, and with two readers in one
    rack.
    """
    unread = one_rack = shared = 0
    for slots in readers_by_shard(data_slots, readers):
        present = [rack_on[s] for s in slots if s in rack_on]
        named = [rack for rack in present if rack]
        unread += not present
        one_rack += bool(present) and len(named) == len(present) and len(set(named)) == 1
        shared += len(set(named)) < len(named)
    return unread, one_rack, shared


def placed(racks, data_slots, readers, before=None):
    slots = place(before or {}, racks, data_slots, readers)
    assert len(set(slots)) == len(racks) and not set(slots) & set(before or {})
    return {**(before or {}), **dict(zip(slots, racks, strict=True))}


@pytest.mark.parametrize("data_slots", [2, 3, 4, 5, 6, 7])
def test_no_arrangement_of_a_small_job_is_better(data_slots):
    """Every division of the replicas among racks, with all replicas there and with one or two away."""
    for away in range(3 if 2 < data_slots < 7 else 1):
        for sizes in partitions(data_slots - away, data_slots - away):
            racks = [f"rack{i}" for i, size in enumerate(sizes) for _ in range(size)]
            for readers in range(2, min(data_slots, 4) + 1):
                best = min(
                    quality({s: x for s, x in enumerate(order) if x is not None}, data_slots, readers)
                    for order in arrangements([*racks, *[None] * away])
                )
                ours = quality(placed(racks, data_slots, readers), data_slots, readers)
                assert ours == best, (sizes, readers, away)


def test_newcomers_get_the_best_free_data_slots_beside_the_members():
    rng = random.Random(1)
    for _ in range(60):
        data_slots = rng.randrange(3, 8)
        readers = rng.randrange(2, min(data_slots, 4) + 1)
        racks = [rng.choice(["", "a", "b", "c"]) for _ in range(data_slots)]
        sitting = rng.sample(range(data_slots), rng.randrange(data_slots))
        before = {slot: racks[slot] for slot in sitting}
        free = [slot for slot in range(data_slots) if slot not in before]
        coming = [racks[slot] for slot in free][rng.randrange(2) :]
        best = min(
            quality(
                before | {s: x for s, x in zip(free, order, strict=True) if x is not None},
                data_slots,
                readers,
            )
            for order in arrangements([*coming, *[None] * (len(free) - len(coming))])
        )
        assert quality(placed(coming, data_slots, readers, before), data_slots, readers) == best


@pytest.mark.parametrize(
    ("replicas", "per_rack", "readers"), [(12, 4, 2), (16, 4, 3), (24, 4, 3), (200, 4, 3), (1500, 16, 3)]
)
def test_the_readers_of_every_shard_of_a_larger_job_are_in_distinct_racks(replicas, per_rack, readers):
    racks = [f"rack{i // per_rack}" for i in range(replicas)]
    assert quality(placed(racks, replicas, readers), replicas, readers) == (0, 0, 0)
    assert quality(dict(enumerate(racks)), replicas, readers)[2] > 0, "by number they would not be"


def test_with_fewer_racks_than_readers_every_shard_is_read_in_at_least_two_racks():
    """With two racks and three readers, two readers share a rack and the third is in the other rack."""
    racks = ["a"] * 6 + ["b"] * 6
    assert quality(placed(racks, 12, 3), 12, 3)[:2] == (0, 0)
    assert quality(dict(enumerate(racks)), 12, 3)[1] > 0


def test_with_fewer_replicas_than_shards_every_shard_has_a_reader_where_that_can_be():
    assert quality(placed(["a", "b", "c"], 6, 2), 6, 2)[0] == 0
    assert quality({0: "a", 1: "b", 2: "c"}, 6, 2)[0] > 0


def test_a_replica_that_finds_no_shard_free_gets_the_next_number():
    assert sorted(place({}, ["a", "b", "c", "a"], 3, 2)) == [0, 1, 2, 3]
    assert place({0: "a", 1: "b", 2: "c", 3: "a"}, ["b", ""], 3, 2) == [4, 5]
    assert place({}, [], 3, 2) == []


# --- in a roster ---------------------------------------------------------------------------------------

SHARING = Sharing("constant", 6, 2)


def roster_of(racks, wishes=()):
    return tuple(
        Member(f"r{n}", 1, "", "", rack=rack, data_slot=wishes[n] if wishes else -1)
        for n, rack in enumerate(racks)
    )


def test_the_death_of_a_rack_loses_no_shard_in_the_roster_that_the_leader_writes():
    roster = seated(roster_of("aabbcc"), {}, SHARING)
    for rack in "abc":
        assert not lost_parts(SHARING, [m for m in roster if m.rack != rack])
    by_number = seated(roster_of("aabbcc"), {})
    assert any(lost_parts(SHARING, [m for m in by_number if m.rack != rack]) for rack in "abc")


@given(
    st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
    st.integers(1, 3),
)
def test_members_that_stay_and_replicas_that_come_back_keep_their_data_slots(racks, away, readers):
    sharing = Sharing("constant", 6, readers)
    roster = seated(roster_of(racks), {}, sharing)
    slots = {m.replica: m.data_slot for m in roster}
    assert len(set(slots.values())) == len(roster)
    staying = tuple(m for n, m in enumerate(roster) if n not in away)
    assert seated(staying, {}, sharing) == staying
    back = tuple(m for n, m in enumerate(roster_of(racks)) if n in away)
    assert {m.replica: m.data_slot for m in seated(staying + back, slots, sharing)} == slots


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=6), st.integers(1, 3))
def test_without_racks_the_number_of_readers_does_not_change_the_data_slots(wishes, readers):
    roster = roster_of([""] * len(wishes), wishes)
    assert seated(roster, {"r1": 4}, Sharing("constant", 6, readers)) == seated(roster, {"r1": 4})


def test_a_data_slot_that_is_asked_for_is_given_whatever_the_rack():
    roster = seated(roster_of("aab", (1, 2, -1)), {}, Sharing("constant", 3, 2))
    assert [m.data_slot for m in roster] == [1, 2, 0]


def test_a_member_without_a_shard_takes_the_one_that_becomes_free():
    sharing = Sharing("constant", 3, 2)
    roster = seated(roster_of("aabc"), {}, sharing)
    (idle,) = [m for m in roster if m.data_slot == 3]
    left = [m for m in roster if m is idle or m.data_slot != 1]
    assert {m.data_slot for m in seated(left, {}, sharing)} == {0, 1, 2}
