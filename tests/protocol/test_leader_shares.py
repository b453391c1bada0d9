"""The leader's rule 12: when it writes unequal shares, when it waits, and when it gives the shares back."""

import pytest
from msgspec.structs import replace
from protocol.makers import record_of
from protocol.test_leader import Lighthouse, runs

from fabric.model import Adaptation, MemberSpeed, OperatorOverrides, Sharing
from fabric.protocol.leader.adaptations import HOUR_S
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m

UNIX_S = 1_800_000_000.0


def elected(record, adapt="act", unix_s=UNIX_S):
    """Return a leader of the members of ``record``, all at step 5."""
    lighthouse = Lighthouse()
    lighthouse.do(io.Elected("s", record, unix_s))
    names = " ".join(record.names)
    for name in record.names:
        lighthouse.open(name, generation=1, step=5, epoch=record.epoch, adapt=adapt, micro_batches=12)
        lighthouse.status(name)
        lighthouse.beat(name, 5)
    lighthouse.spend_credit()
    return runs(lighthouse, names, 5)


def acting(names="a b c", adapt="act", **fields):
    seats = {name: {"data_slot": number} for number, name in enumerate(names.split())}
    return elected(replace(record_of(names, epoch=1, **seats), **fields), adapt)


def advise(lighthouse, epoch=None, incarnations=None, **speeds):
    epoch = lighthouse.record.epoch if epoch is None else epoch
    entries = tuple(
        MemberSpeed(name, (incarnations or {}).get(name, 1), speed) for name, speed in speeds.items()
    )
    return lighthouse.do(io.SharesAdvised(epoch, entries, 0.6, 0.0, "b computes at half the speed"))


def order(lighthouse, action, about="", mode=""):
    return lighthouse.do(io.Operator(action, about, "ann", "a test", mode=mode))


def shares(lighthouse):
    return {x.replica: x.shares for x in lighthouse.record.roster}


def kept(lighthouse):
    return [x.why for x in lighthouse.told("shares kept")]


EQUAL = {"a": 1, "b": 1, "c": 1}
HALF = {"a": 1000, "b": 500, "c": 1000}


def test_advice_becomes_one_planned_epoch_with_gain_cost_and_reason():
    lighthouse = acting()
    before, written = lighthouse.record, len(lighthouse.records)
    advise(lighthouse, b=500)
    record = lighthouse.record
    assert len(lighthouse.records) == written + 1 and record.epoch == before.epoch + 1
    assert not record.is_forced and shares(lighthouse) == HALF
    assert "b computes at half the speed" in record.reason and "throughput +60%, cost 0 s" in record.reason
    assert record.adaptation.gain == 0.6 and record.adaptation.reason == "b computes at half the speed"
    (event,) = lighthouse.told("shares")
    assert event.about == "b" and event.why == record.reason
    assert lighthouse.sent(m.Epoch) or lighthouse.sent(m.RosterDelta), "members hear of the new shares"


@pytest.mark.parametrize("mode", ["off", "advise", ""])
def test_in_every_other_mode_advice_changes_nothing(mode):
    lighthouse = acting(adapt=mode)
    advise(lighthouse, b=500)
    assert shares(lighthouse) == EQUAL


def test_shares_change_only_while_every_member_runs():
    lighthouse = acting()
    lighthouse.say("a", m.Aborted(lighthouse.record.fence, 5, "a link broke", "b"))
    advise(lighthouse, b=500)
    assert shares(lighthouse) == EQUAL


def test_advice_for_an_older_epoch_is_dropped():
    lighthouse = acting()
    advise(lighthouse, epoch=lighthouse.record.epoch - 1, b=500)
    assert shares(lighthouse) == EQUAL and lighthouse.core.adaptations.advice is None


def test_a_plan_for_a_replica_that_has_just_died_is_dropped():
    lighthouse = acting()
    lighthouse.commits = False
    lighthouse.status("b", "gone")
    lighthouse.wait(0.1)
    forced = lighthouse.records[-1]
    assert forced.names == ("a", "c")
    advise(lighthouse, b=500)
    lighthouse.commits = True
    lighthouse.do(io.RecordWritten(forced.nonce))
    runs(lighthouse, "a c", 5)
    assert shares(lighthouse) == {"a": 1, "c": 1} and not lighthouse.record.adaptation.speeds


def test_a_plan_for_a_process_that_another_one_has_replaced_is_dropped():
    lighthouse = acting()
    advise(lighthouse, incarnations={"b": 7}, b=500)
    assert shares(lighthouse) == EQUAL


def test_the_death_of_the_slow_member_gives_all_others_their_shares_back_in_the_same_record():
    lighthouse = acting()
    advise(lighthouse, b=500)
    runs(lighthouse, "a b c", 6)
    lighthouse.status("b", "gone")
    lighthouse.wait(0.1)
    assert lighthouse.record.is_forced and shares(lighthouse) == {"a": 1, "c": 1}


def test_the_death_of_another_member_keeps_the_slow_members_share():
    lighthouse = acting()
    advise(lighthouse, b=500)
    runs(lighthouse, "a b c", 6)
    lighthouse.status("c", "gone")
    lighthouse.wait(0.1)
    assert shares(lighthouse) == {"a": 1000, "b": 500}


def test_a_newcomer_gets_a_healthy_members_share():
    lighthouse = acting()
    advise(lighthouse, b=500)
    runs(lighthouse, "a b c", 6)
    lighthouse.open("d", generation=1, step=6, micro_batches=12)
    lighthouse.status("d")
    lighthouse.beat("d", 6)
    assert shares(lighthouse) == {**HALF, "d": 1000}


def test_shares_are_given_back_when_the_detector_says_so_and_need_no_budget():
    lighthouse = acting()
    lighthouse.core.state.config = replace(lighthouse.core.state.config, actions_per_hour=1)
    advise(lighthouse, b=500)
    runs(lighthouse, "a b c", 6)
    advise(lighthouse)
    assert shares(lighthouse) == EQUAL and "shares as asked for again" in lighthouse.record.reason
    assert len(lighthouse.record.adaptation.acted) == 1, "the budget remembers the action"
    runs(lighthouse, "a b c", 7)
    advise(lighthouse, b=500)
    assert shares(lighthouse) == EQUAL
    assert kept(lighthouse) == ["the budget of 1 actions per hour is spent"]
    advise(lighthouse, b=500)
    assert not kept(lighthouse), "said once"
    lighthouse.core.state.unix_offset_s += HOUR_S
    advise(lighthouse, b=500)
    assert shares(lighthouse) == HALF


def test_equal_advice_writes_nothing():
    lighthouse = acting()
    advise(lighthouse, b=500)
    runs(lighthouse, "a b c", 6)
    written = len(lighthouse.records)
    advise(lighthouse, b=500)
    assert len(lighthouse.records) == written


def test_a_veto_keeps_a_share_and_takes_a_lower_one_back_until_it_ends():
    lighthouse = acting()
    order(lighthouse, "veto", "b")
    advise(lighthouse, b=500)
    assert shares(lighthouse) == EQUAL and "an operator's veto keeps the share of b" in kept(lighthouse)[0]
    order(lighthouse, "allow", "b")
    assert shares(lighthouse) == HALF
    runs(lighthouse, "a b c", 6)
    order(lighthouse, "veto", "b")
    assert shares(lighthouse) == EQUAL and lighthouse.record.overrides.vetoed == ("b",)


def test_an_operator_switches_the_job_to_act_and_back():
    lighthouse = acting(adapt="advise")
    order(lighthouse, "adapt", mode="act")
    assert lighthouse.record.overrides.adapt == "act"
    advise(lighthouse, b=500)
    assert shares(lighthouse) == HALF
    runs(lighthouse, "a b c", 6)
    order(lighthouse, "adapt", mode="advise")
    assert shares(lighthouse) == EQUAL and "the mode is advise" in lighthouse.record.reason


@pytest.mark.parametrize(
    "sharing", [Sharing("shrink", data_slots=3), Sharing("constant", data_slots=3, readers=2)]
)
def test_data_that_cannot_be_divided_unequally_is_left_alone_with_a_sentence(sharing):
    lighthouse = acting(sharing=sharing)
    advise(lighthouse, b=500)
    assert shares(lighthouse) == EQUAL
    assert "drain the slow replica instead" in kept(lighthouse)[0]


# --- two planners -----------------------------------------------------------------------------------------


def test_the_next_leader_keeps_the_shares_and_the_budget():
    lighthouse = acting()
    advise(lighthouse, b=500)
    after = elected(lighthouse.record)
    assert shares(after) == HALF and not after.records, "the next leader changes nothing by itself"
    after.core.state.config = replace(after.core.state.config, actions_per_hour=1)
    after.core.state.unix_offset_s = lighthouse.core.state.unix_offset_s
    advise(after, b=500, c=300)
    assert shares(after) == HALF and "budget" in kept(after)[0]
    advise(after)
    assert shares(after) == EQUAL


def test_a_plan_whose_write_is_refused_applies_nothing():
    lighthouse = acting()
    lighthouse.commits = False
    advise(lighthouse, b=500)
    ordered, other = lighthouse.records[-1], replace(lighthouse.record, nonce="of another leader")
    lighthouse.do(io.WriteFailed(ordered.nonce, definite=True))
    lighthouse.do(io.RecordRead(other))
    assert shares(lighthouse) == EQUAL and not lighthouse.core.state.leading
    assert shares(elected(other)) == EQUAL


def test_a_plan_whose_write_landed_late_is_taken_whole():
    lighthouse = acting()
    lighthouse.commits = False
    advise(lighthouse, b=500)
    ordered = lighthouse.records[-1]
    lighthouse.do(io.WriteFailed(ordered.nonce, definite=False))
    lighthouse.do(io.RecordRead(ordered))
    assert lighthouse.record == ordered and shares(lighthouse) == HALF


def test_an_action_at_a_time_ahead_of_this_leaders_clock_counts():
    record = replace(record_of("a b c", epoch=1), adaptation=Adaptation(acted=(UNIX_S + 9999.0,) * 6))
    lighthouse = elected(record)
    advise(lighthouse, b=500)
    assert shares(lighthouse) == EQUAL and "budget of 6 actions" in kept(lighthouse)[0]
    assert (
        max(lighthouse.core.adaptations.recent_actions(lighthouse.record)) <= lighthouse.core.state.unix_now
    )


def test_a_leader_that_knows_no_session_yet_gives_no_share_back():
    adapted = Adaptation((MemberSpeed("b", 1, 500),), micro_batches=4)
    record = record_of("a b c", epoch=1, a={"shares": 1000}, b={"shares": 500}, c={"shares": 1000})
    record = replace(record, adaptation=adapted, overrides=OperatorOverrides())
    lighthouse = Lighthouse(record)
    lighthouse.wait(1.0)
    assert lighthouse.core.adaptations.mode == "" and not lighthouse.records


def test_a_cold_start_begins_with_the_asked_shares_and_keeps_the_budget():
    lighthouse = acting("a b")
    advise(lighthouse, b=500)
    runs(lighthouse, "a b", 6)
    for name in "ab":
        lighthouse.status(name, "gone")
    lighthouse.wait(0.1)
    for name in "ab":
        lighthouse.open(name, incarnation=2, predecessors=(1,), adapt="act", micro_batches=12)
    lighthouse.wait(10.0)
    record = lighthouse.record
    assert record.generation == 2 and {x.shares for x in record.roster} == {1}
    assert not record.adaptation.speeds and len(record.adaptation.acted) == 1
