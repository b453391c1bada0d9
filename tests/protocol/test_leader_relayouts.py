"""The leader's rule 13: when a member leaves for another layout, when it waits, and when the layout ends."""

import pytest
from msgspec.structs import replace
from protocol.makers import record_of, session_of
from protocol.test_leader import Lighthouse, runs

from fabric.model import EVERYTHING, Adaptation, LaunchedLayouts, LayoutChange, ReplicaProcess, Sharing
from fabric.protocol.leader.state import LeaderConfig
from fabric.protocol.messages import leader_events as io

UNIX_S = 1_800_000_000.0
TRIAL_S = LeaderConfig().trial_s
USUAL = LaunchedLayouts("ranks=2", ("ranks=2", "ranks=1"))
ORDER = "ranks=1 without 1"


def session(name, record, incarnation=1, launched=USUAL, **more):
    fields = {"generation": 1, "step": 5, "epoch": record.epoch, "adapt": "act", "micro_batches": 12, **more}
    return io.SessionOpened(session_of(name, incarnation, launched=launched, **fields))


def acting(names="a b c", adapt="act", cuts="x", changes=(), sharing=EVERYTHING, **launched):
    """Return a leader of these members, all at step 5."""
    words = names.split()
    seats = {name: {"data_slot": number, "cuts": cuts} for number, name in enumerate(words)}
    record = record_of(names, epoch=1, **seats)
    record = replace(record, adaptation=Adaptation(layouts=changes), sharing=sharing)
    record = replace(
        record, roster=tuple(replace(x, incarnation=7 if x.replica in launched else 1) for x in record.roster)
    )
    lighthouse = Lighthouse()
    lighthouse.do(io.Elected("s", record, UNIX_S))
    for name in words:
        incarnation = lighthouse.incarnations[name] = 7 if name in launched else 1
        own = launched.get(name, USUAL)
        lighthouse.do(session(name, record, incarnation, own, adapt=adapt, cuts=cuts, sharing=sharing))
        lighthouse.status(name, incarnation=incarnation)
        lighthouse.beat(name, 5)
    lighthouse.spend_credit()
    return runs(lighthouse, names, 5)


def advise(lighthouse, name="b", layout=ORDER, epoch=None, incarnation=1):
    epoch = lighthouse.record.epoch if epoch is None else epoch
    process = ReplicaProcess(name, incarnation)
    return lighthouse.do(io.LayoutAdvised(epoch, process, layout, 0.2, 3.0, "rank 1 of b is slow"))


def order(lighthouse, action, about="", mode=""):
    return lighthouse.do(io.Operator(action, about, "ann", "a test", mode=mode))


def leaving(lighthouse):
    return {x.replica: x.returns for x in lighthouse.record.roster if x.leaving}


def kept(lighthouse):
    return [x.why for x in lighthouse.told("layout kept")]


def changed(name="b", at=UNIX_S):
    return LayoutChange(name, 1, ORDER, "ranks=2", at, "rank 1 of b is slow")


ONE_RANK = replace(USUAL, layout="ranks=1")


def test_a_slow_member_leaves_in_a_planned_epoch_and_takes_the_order_along():
    lighthouse = acting()
    advise(lighthouse)
    record = lighthouse.record
    assert leaving(lighthouse) == {"b": ORDER} and not record.is_forced
    assert record.adaptation.layouts == (changed(at=record.adaptation.acted[-1]),)
    assert "b comes back in the layout ranks=1 without 1: rank 1 of b is slow" in record.reason
    assert "throughput +20%, cost 3.0 s" in record.reason
    assert [x.about for x in lighthouse.told("layout")] == ["b"]
    runs(lighthouse, "a b c", 6)
    assert lighthouse.record.names == ("a", "c") and lighthouse.record.adaptation.layouts


@pytest.mark.parametrize("mode", ["off", "advise", ""])
def test_in_every_other_mode_no_member_leaves(mode):
    lighthouse = acting(adapt=mode)
    advise(lighthouse)
    assert not leaving(lighthouse)


def test_advice_for_an_older_epoch_or_another_process_is_dropped():
    lighthouse = acting()
    advise(lighthouse, epoch=lighthouse.record.epoch - 1)
    advise(lighthouse, incarnation=2)
    assert not leaving(lighthouse) and lighthouse.core.relayouts.advice is None


def test_without_unequal_layouts_the_member_stays_and_the_event_says_what_to_set():
    lighthouse = acting(cuts="")
    advise(lighthouse)
    (why,) = kept(lighthouse)
    assert not leaving(lighthouse) and "set FABRIC_UNEQUAL=1 on every replica" in why
    advise(lighthouse)
    assert not kept(lighthouse), "the reason is reported once"


def test_a_veto_keeps_the_layout():
    lighthouse = acting()
    order(lighthouse, "veto", "b")
    advise(lighthouse)
    assert not leaving(lighthouse) and "veto keeps the layout of b" in lighthouse.core.relayouts.held


def test_the_last_member_does_not_leave():
    lighthouse = acting("b")
    advise(lighthouse)
    assert not leaving(lighthouse)
    assert kept(lighthouse) == ["without b the job has 0 of the 1 members that it needs"]


def test_a_spent_budget_holds_layouts_too():
    lighthouse = acting()
    lighthouse.core.state.config = replace(lighthouse.core.state.config, actions_per_hour=0)
    advise(lighthouse)
    assert kept(lighthouse) == ["the budget of 0 actions per hour is spent"]


def test_a_slow_member_is_drained_for_good_only_where_a_spare_stands_by():
    lighthouse = acting()
    advise(lighthouse, layout="")
    assert kept(lighthouse) == ["no spare stands by for b"]
    lighthouse.open("s", generation=1, step=5, epoch=1, adapt="act", micro_batches=12, spare=True, cuts="x")
    advise(lighthouse, layout="")
    assert leaving(lighthouse) == {"b": ""} and not lighthouse.record.adaptation.layouts


@pytest.mark.parametrize(
    ("action", "about", "mode", "why"),
    [("adapt", "", "advise", "the mode is advise"), ("veto", "b", "", "an operator's veto")],
)
def test_an_operator_gets_the_usual_layout_back(action, about, mode, why):
    lighthouse = acting(changes=(changed(),), b=ONE_RANK)
    assert not leaving(lighthouse)
    order(lighthouse, action, about, mode=mode)
    assert leaving(lighthouse) == {"b": "ranks=2"} and why in lighthouse.record.reason
    (change,) = lighthouse.record.adaptation.layouts
    assert (change.process, change.layout, change.ends) == (ReplicaProcess("b", 7), "ranks=2", True)


@pytest.mark.parametrize(("ago_s", "again"), [(TRIAL_S - 60, {}), (TRIAL_S, {"b": "ranks=2"})])
def test_the_usual_layout_is_tried_again_after_a_while(ago_s, again):
    lighthouse = acting(changes=(changed(at=UNIX_S - ago_s),), b=ONE_RANK)
    lighthouse.wait(1.0)
    assert leaving(lighthouse) == again


def test_a_refused_layout_is_reported_and_forgotten():
    refusing = replace(USUAL, refused=("ranks=1",))
    lighthouse = acting(changes=(changed(),), b=refusing)
    assert lighthouse.record.adaptation.layouts == () and not leaving(lighthouse)
    assert lighthouse.record.reason == "the script of b cannot build the layout ranks=1 without 1"


def going_back(incarnation, at=UNIX_S):
    """The change of b whose process ``incarnation`` was ordered to come back in its usual layout."""
    return replace(changed(at=at), incarnation=incarnation, layout="ranks=2")


def test_a_member_that_was_left_out_before_it_heard_its_order_keeps_its_layout():
    """The process that got the order is a member and does not leave: no order comes a second time."""
    lighthouse = acting(changes=(changed(),))
    assert lighthouse.record.adaptation.layouts == () and not leaving(lighthouse)
    assert lighthouse.record.reason == "b was left out before it heard the order"


def test_a_member_that_did_not_hear_that_its_layout_ends_gets_the_order_again():
    lighthouse = acting(changes=(going_back(7),), b=ONE_RANK)
    assert leaving(lighthouse) == {"b": "ranks=2"}
    assert lighthouse.record.reason == "b comes back in the layout ranks=2: rank 1 of b is slow"


def test_an_order_to_come_back_ends_when_the_replica_is_a_member_in_its_usual_layout():
    lighthouse = acting(changes=(going_back(1),), b=USUAL)
    assert lighthouse.record.adaptation.layouts == () and not leaving(lighthouse)
    assert lighthouse.record.reason == "b is back in its usual layout ranks=2"


@pytest.mark.parametrize(("ago_s", "again"), [(TRIAL_S - 60, {}), (TRIAL_S, {"b": "ranks=2"})])
def test_a_replica_that_could_not_come_back_in_its_usual_layout_tries_again_after_a_while(ago_s, again):
    """Its launcher lacks a device, or it died before it left: the operator's veto does not hurry it."""
    lighthouse = acting(changes=(going_back(1, UNIX_S - ago_s),), b=ONE_RANK)
    order(lighthouse, "veto", "b")
    lighthouse.wait(1.0)
    assert leaving(lighthouse) == again
    assert [x.ends for x in lighthouse.record.adaptation.layouts] == [True]


def test_a_process_that_has_left_is_not_admitted_however_long_it_takes_to_end():
    lighthouse = acting()
    advise(lighthouse)
    runs(lighthouse, "a b c", 6)
    runs(lighthouse, "a c", 7)
    lighthouse.beat("b", 7)
    assert lighthouse.record.names == ("a", "c")
    lighthouse.core.admission.ending.clear()
    lighthouse.beat("b", 7)
    assert lighthouse.record.names == ("a", "c", "b"), "nothing else keeps it out"


def test_a_change_stays_while_its_replica_is_away():
    lighthouse = acting("a c", changes=(changed(),))
    order(lighthouse, "veto", "b")
    assert lighthouse.record.adaptation.layouts == (changed(),)


def test_an_operators_drain_takes_the_order_to_come_back_away():
    lighthouse = acting()
    advise(lighthouse)
    order(lighthouse, "drain", "b")
    runs(lighthouse, "a b c", 6)
    assert leaving(lighthouse) == {"b": ""} and not lighthouse.record.adaptation.layouts
    assert "b is being drained: drained by ann" in lighthouse.record.reason
    runs(lighthouse, "a b c", 7)
    assert lighthouse.record.names == ("a", "c")


def test_the_last_reader_of_a_part_does_not_leave():
    lighthouse = acting(sharing=Sharing(readers=1, data_slots=3, on_loss="stop"))
    advise(lighthouse)
    assert not leaving(lighthouse) and kept(lighthouse) == ["no other member can read shard 1"]


def test_a_replica_outside_that_alone_can_read_its_part_is_not_drained():
    """The leader chose its data slot, so its session names none."""
    sharing = Sharing(readers=1, data_slots=3, on_loss="wait")
    lighthouse = acting(sharing=sharing)
    order(lighthouse, "pause")
    lighthouse.status("c", "gone", incarnation=1)
    lighthouse.wait(0.1)
    assert lighthouse.record.names == ("a", "b")
    lighthouse.do(session("c", lighthouse.record, 2, sharing=sharing))
    lighthouse.status("c", incarnation=2)
    objection = lighthouse.core.orders.objection(io.Operator("drain", "c", "ann", "a test"))
    assert "c is not drained: no other member can read shard 2" in objection


@pytest.mark.parametrize("layout", [ORDER, ""])
def test_an_order_that_the_store_lost_is_written_again_and_counts_once(layout):
    lighthouse = acting()
    lighthouse.open("s", generation=1, step=1, epoch=1, adapt="act", micro_batches=12, spare=True, cuts="x")
    lighthouse.commits = False
    advise(lighthouse, layout=layout)
    lost = lighthouse.records[-1]
    lighthouse.do(io.WriteFailed(lost.nonce, definite=False))
    assert not leaving(lighthouse)
    lighthouse.commits = True
    lighthouse.do(io.RecordRead(lighthouse.record))
    assert leaving(lighthouse) == {"b": layout} and lighthouse.record.nonce != lost.nonce
    assert len(lighthouse.record.adaptation.acted) == 1


def test_a_spare_that_a_missing_member_needs_replaces_no_slow_one():
    lighthouse = acting()
    policy = replace(lighthouse.core.state.config.policy, start_replicas=4)
    lighthouse.core.state.config = replace(lighthouse.core.state.config, policy=policy)
    lighthouse.open("s", generation=1, step=1, epoch=1, adapt="act", micro_batches=12, spare=True, cuts="x")
    advise(lighthouse, layout="")
    assert kept(lighthouse) == ["no spare stands by for b"] and not leaving(lighthouse)


def test_while_one_replica_is_away_in_another_layout_no_other_one_leaves():
    """Two of three could be ordered away one after the other, and the job went on with one."""
    away = LayoutChange("c", 1, ORDER, "ranks=2", UNIX_S, "rank 1 of c is slow")
    lighthouse = acting("a b", changes=(away,))
    advise(lighthouse)
    why = "c is not back yet in its ordered layout, and one member leaves at a time"
    assert not leaving(lighthouse) and kept(lighthouse) == [why]
    lighthouse.core.state.unix_offset_s += TRIAL_S  # a replica that never returns keeps nobody
    lighthouse.wait(1.0)
    assert leaving(lighthouse) == {"b": ORDER}


def test_the_mode_is_that_of_the_most_senior_member_in_any_ring_order():
    lighthouse = acting("a b", adapt="act")
    record = lighthouse.record
    lighthouse.do(session("b", record, adapt="off", cuts="x"))
    for roster in (record.roster, record.roster[::-1]):
        lighthouse.core.state.record = replace(record, roster=roster)
        assert lighthouse.core.adaptations.mode == "act"
