"""The leader's rule 13: when a member leaves for another layout, when it waits, and when the layout ends."""

from dataclasses import replace

import pytest
from protocol.makers import record_of, session_of
from protocol.test_leader import Lighthouse, runs

from fabric.model import Adaptation, LaunchedLayouts, LayoutChange, ReplicaProcess
from fabric.protocol.leader.adaptations import TRIAL_S
from fabric.protocol.messages import leader_events as io

UNIX_S = 1_800_000_000.0
USUAL = LaunchedLayouts("ranks=2", ("ranks=2", "ranks=1"))
ORDER = "ranks=1 without 1"


def session(name, record, incarnation=1, launched=USUAL, **more):
    fields = {"generation": 1, "step": 5, "epoch": record.epoch, "adapt": "act", "micro_batches": 12, **more}
    return io.SessionOpened(session_of(name, incarnation, launched=launched, **fields))


def acting(names="a b c", adapt="act", cuts="x", changes=(), now_s=UNIX_S, **launched):
    """Return a leader of these members, all at step 5."""
    words = names.split()
    seats = {name: {"data_slot": number, "cuts": cuts} for number, name in enumerate(words)}
    record = replace(record_of(names, epoch=1, **seats), adaptation=Adaptation(layouts=changes))
    record = replace(
        record, roster=tuple(replace(x, incarnation=7 if x.replica in launched else 1) for x in record.roster)
    )
    lighthouse = Lighthouse()
    lighthouse.do(io.Elected("s", record, now_s))
    for name in words:
        incarnation = lighthouse.incarnations[name] = 7 if name in launched else 1
        own = launched.get(name, USUAL)
        lighthouse.do(session(name, record, incarnation, own, adapt=adapt, cuts=cuts))
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
    assert not leaving(lighthouse) and lighthouse.core.adaptations.layouts.advice is None


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
    assert (
        not leaving(lighthouse) and "veto keeps the layout of b" in lighthouse.core.adaptations.layouts.held
    )


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
    assert lighthouse.record.adaptation.layouts == ()


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


def test_the_replica_that_still_has_to_leave_keeps_its_order():
    lighthouse = acting(changes=(replace(changed(), incarnation=1),))
    assert lighthouse.record.adaptation.layouts, "its present process is the one that got the order"
