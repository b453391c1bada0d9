"""The status of data that only some replicas can read: the readers, and shards with one reader left."""

import pytest
from rich.console import Console

from fabric.cli.status import _shards
from fabric.lighthouse.http.job_status import shard_readers
from fabric.model import Base, Member, Record, Sharing
from fabric.protocol.rules.assignment import Work, share_out


def state(present, readers=3, count=7, **more):
    """Return the status of a job of ``count`` shards whose members have the data slots ``present``."""
    roster = tuple(Member(f"r{n}", 1, "", "", data_slot=n, rack=f"k{n}") for n in present)
    sharing = Sharing(data_slots=count, readers=readers, **more)
    return shard_readers(Record("store", 1, 1, 1, 1, "n", roster, Base(1, 0), sharing=sharing))


def test_a_job_in_which_all_replicas_read_all_data_shows_no_shards():
    assert shard_readers(None) is None and state([0, 1], readers=0) is None
    assert _shards(None) == []


def test_with_everybody_there_each_member_computes_its_own_shard():
    found = state(range(7))
    assert (found["redundancy"], found["shards"], found["depth"]) == (3, 7, 1)
    assert found["members"][5] == {
        "replica": "r5",
        "data_slot": 5,
        "rack": "k5",
        "reads": [1, 5, 6],
        "computes": [5],
    }
    assert (found["last_reader"], found["lost"], found["warning"]) == ({}, [], "")


def test_the_depth_and_the_computed_shards_are_those_of_the_steps():
    for away in ([1], [1, 2], [1, 2, 4], [0, 1, 2, 3]):
        present = [n for n in range(7) if n not in away]
        found = state(present, on_loss="shrink")
        roster = [Member(f"r{n}", 1, "", "", data_slot=n) for n in present]
        given = share_out(Work(7, Sharing(data_slots=7, readers=3, on_loss="shrink")), roster, roster)
        assert {x["replica"]: tuple(x["computes"]) for x in found["members"]} == given
        assert found["depth"] == max(len(ids) for ids in given.values())
        assert all(set(x["computes"]) <= set(x["reads"]) for x in found["members"])


def test_a_shard_with_one_reader_left_is_named_with_the_consequence():
    """Shard 1 is read on the data slots 1, 0 and 5."""
    found = state([1, 2, 3, 4, 6])
    assert found["last_reader"] == {"1": "r1"} and not found["lost"]
    assert found["warning"] == (
        "shard 1 (r1) has one reader left: when it dies, the job waits for a replica that can read it; bring "
        "back a replica that reads the same data"
    )
    assert "its part of each step is skipped" in state([1, 2, 3, 4, 6], on_loss="shrink")["warning"]
    assert "the job stops" in state([1, 2, 3, 4, 6], on_loss="stop")["warning"]


def test_lost_shards_are_listed_and_many_last_readers_are_counted():
    found = state([0, 1])
    assert found["lost"] and not set(map(str, found["lost"])) & set(found["last_reader"])
    assert state([0], count=13, readers=6)["warning"].startswith("shards ")
    assert " and 2 more have one reader left" in state([0], count=13, readers=6)["warning"]


def test_without_redundancy_no_warning_is_given():
    found = state(range(3), readers=1, count=3)
    assert found["last_reader"] == {"0": "r0", "1": "r1", "2": "r2"} and found["warning"] == ""


@pytest.mark.parametrize("policy", ["constant", "shrink"])
def test_a_member_without_a_shard_reads_and_computes_none(policy):
    found = state([0, 1, 2, 3], readers=2, count=3, policy=policy)
    assert (found["members"][3]["reads"], found["members"][3]["computes"]) == ([], [])


def test_under_shrink_a_member_computes_its_own_shard_alone():
    found = state([0, 2], readers=2, count=3, policy="shrink")
    assert [x["computes"] for x in found["members"]] == [[0], [2]] and found["depth"] == 1


def test_status_shows_it_in_lines():
    console = Console(width=200)
    with console.capture() as captured:
        for line in _shards(state([1, 2, 3, 4, 6])):
            console.print(line, markup=False)
    text = captured.get()
    assert "data shards: 7, redundancy 3, stack depth 2, on_loss=wait" in text
    assert "r6 in rack k6 reads 0, 2, 6, computes " in text
    assert "shard 1 (r1) has one reader left" in text
    assert "shard 5, 6: no member can read it" in "\n".join(_shards(state([0, 1]) | {"lost": [5, 6]}))
