"""How a job ends: who must have finished, and whom nobody waits for."""

from dataclasses import replace

from protocol.makers import record_of
from protocol.test_leader import started

from fabric.protocol import messages as m


def finished(lighthouse, *names, step=9):
    for name in names:
        lighthouse.say(name, m.Finished(lighthouse.record.fence, step))
    return lighthouse


def of_roster(names, **changes):
    """A job in its second epoch, planned, with these entries of its roster changed; all run but the fresh."""
    record = replace(record_of(names, epoch=2, forced=1, **changes), cause="e2")
    fresh = [x.replica for x in record.roster if x.fresh]
    lighthouse = started(names, record=record)
    for name in fresh:
        lighthouse.core.epoch.running.pop(name)
    return lighthouse


def test_who_leaves_need_not_finish_where_others_stay():
    lighthouse = of_roster("a b", a={"leaving": True})
    assert finished(lighthouse, "b").record.complete


def test_the_last_member_ends_the_job_though_it_is_to_leave():
    """Found in simulation: all others had died, so that nobody stayed, and nobody was ever done."""
    lighthouse = of_roster("a", a={"leaving": True})
    lighthouse.wait(1.0)
    assert not lighthouse.record.complete
    assert finished(lighthouse, "a").record.complete and lighthouse.record.base.step == 9


def test_a_newcomer_that_no_round_waits_for_does_not_keep_a_job_that_is_over():
    """Found in simulation: it was admitted at the last step, whose gradient died with a checkpoint server."""
    lighthouse = finished(of_roster("a b", b={"fresh": True}), "a")
    lighthouse.wait(50.0)
    assert not lighthouse.record.complete, "it may still get to the end by itself"
    lighthouse.wait(20.0)
    assert lighthouse.record.complete and lighthouse.record.base.step == 9
    assert sorted(x for x, _ in lighthouse.sent(m.Complete)) == ["a", "b"]


def test_a_newcomer_that_takes_part_is_waited_for():
    lighthouse = of_roster("a b", b={"fresh": True})
    lighthouse.say("b", m.Running(lighthouse.record.fence, 8))
    finished(lighthouse, "a").wait(100.0)
    assert not lighthouse.record.complete
    assert finished(lighthouse, "b").record.complete
