"""An operator restores an older copy of the store while the members run in newer epochs."""

from protocol.makers import record_of
from protocol.test_leader import Lighthouse

from fabric.protocol.messages import network as m


def back(lighthouse, name, epoch, roster="", generation=1, phase="run", store="s"):
    """A member of a newer epoch comes back to the leader of the restored store."""
    known = {"known_generation": generation, "store_id": store, "roster": roster}
    lighthouse.open(name, generation=generation, step=50, epoch=epoch, **known)
    lighthouse.status(name)
    lighthouse.say(name, m.Heartbeat(1, epoch, generation, 50, phase=phase))


def test_the_next_epoch_is_above_all_that_the_sessions_know():
    lighthouse = Lighthouse(record_of("a b c", epoch=3))
    for name in "ab":
        back(lighthouse, name, 9)
    back(lighthouse, "d", 9, phase="outside")
    lighthouse.wait(10.0)
    record = lighthouse.record
    assert (record.epoch, record.generation, record.is_forced) == (10, 1, True)
    assert record.names == ("a", "b"), "members of the newest epoch, and no replica outside"
    assert "restored from an older copy" in record.reason


def test_the_leader_waits_for_the_grace_period_until_it_knows_the_members():
    lighthouse = Lighthouse(record_of("a b c", epoch=3))
    back(lighthouse, "a", 9)
    lighthouse.wait(1.0)
    assert not lighthouse.records
    back(lighthouse, "b", 9)
    lighthouse.wait(10.0)
    assert lighthouse.record.names == ("a", "b")


def test_two_rosters_under_one_fence_end_in_an_epoch_above_both():
    lighthouse = Lighthouse(record_of("a c", epoch=6))
    back(lighthouse, "a", 6, roster=record_of("a b", epoch=6).roster_digest)
    back(lighthouse, "b", 6, roster=record_of("a b", epoch=6).roster_digest)
    lighthouse.wait(10.0)
    assert lighthouse.record.epoch > 6 and lighthouse.record.is_forced
    assert "restored" in lighthouse.records[0].reason and lighthouse.records[0].names == ("a", "b")


def test_a_newer_generation_that_the_store_has_lost_is_not_used_again():
    lighthouse = Lighthouse(record_of("a b", epoch=3))
    for name in "ab":
        back(lighthouse, name, 9, generation=4)
    lighthouse.wait(10.0)
    assert (lighthouse.record.generation, lighthouse.record.epoch, lighthouse.record.cold) == (5, 10, 10)


def test_numbers_of_another_store_change_nothing():
    lighthouse = Lighthouse(record_of("a b", epoch=3))
    for name in "ab":
        back(lighthouse, name, 9, store="another")
    lighthouse.wait(10.0)
    assert not [x for x in lighthouse.records if x.epoch > 4]
