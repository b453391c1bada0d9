"""Rosters sent as differences: the receiver always ends with the same roster, or asks for the whole
roster.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from protocol.makers import member_of, record_of, report_of, session_of
from protocol.test_leader import runs, started
from protocol.test_member import FIRST, SECOND, running

from fabric.protocol.leader.core import MANY
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import member_events, roster_delta, wire
from fabric.protocol.messages import network as m
from fabric.protocol.rules.decide import decide

MEMBERS = st.builds(member_of, st.sampled_from("abcdef"), st.integers(1, 2), joining=st.booleans())
RECORDS = st.lists(MEMBERS, unique_by=lambda x: x.replica, max_size=6).map(
    lambda roster: replace(record_of(""), roster=tuple(roster))
)


@given(RECORDS, RECORDS)
def test_a_roster_delta_leads_from_any_roster_to_any_other(before, after):
    told = wire.decode(wire.encode(roster_delta.change(before, after)))
    assert told.record.roster == ()
    assert roster_delta.applied(told, before) == after
    assert roster_delta.applied(told, after) == after  # heard again


@given(RECORDS, RECORDS, RECORDS)
def test_a_roster_delta_is_never_applied_to_another_roster(before, after, other):
    told = roster_delta.change(before, after)
    fits = other.roster in (before.roster, after.roster)
    assert roster_delta.applied(told, other) == (after if fits else None)
    assert roster_delta.applied(told, None) is None


@given(RECORDS, RECORDS, st.sampled_from(["joined", "left", "order"]), st.data())
def test_a_wrong_roster_delta_gives_the_right_roster_or_none(before, after, name, data):
    wrong = data.draw(st.lists(MEMBERS if name == "joined" else st.sampled_from("abcxyz"), max_size=3))
    told = replace(roster_delta.change(before, after), **{name: tuple(wrong)})
    assert roster_delta.applied(told, before) in (after, None)


@given(RECORDS, RECORDS)
def test_rosters_with_equal_digests_are_equal(one, other):
    assert (one.roster_digest == other.roster_digest) == (one.roster == other.roster)


def test_the_messages_about_a_death_among_thousands_are_short():
    before = record_of(" ".join(f"r{i}" for i in range(10_000)))
    after = replace(before, epoch=3, roster=before.roster[:5000] + before.roster[5001:])
    told = roster_delta.change(before, after)
    assert (told.joined, told.left, told.order) == ((), ("r5000",), ())
    assert len(wire.encode(told)) < 1000


# --- the leader -------------------------------------------------------------------------------------------


def evicted(*knowing):
    """Return a leader after c's death; sessions of the named members understand roster deltas."""
    lighthouse = started("a b c")
    for name in knowing:
        digest = lighthouse.record.roster_digest
        lighthouse.open(name, generation=1, step=5, epoch=1, roster=digest)
        lighthouse.beat(name, 5)
    runs(lighthouse, "a b c", 5)
    lighthouse.effects.clear()
    lighthouse.status("c", "gone")
    lighthouse.wait(0.02)
    assert lighthouse.record.names == ("a", "b")
    return lighthouse


def test_members_get_the_roster_delta():
    lighthouse = evicted("a")
    assert {"a", "b"} <= {name for name, _ in lighthouse.sent(m.RosterDelta)}
    (_, told), *_ = lighthouse.sent(m.RosterDelta)
    assert told.left == ("c",) and told.after == lighthouse.record.roster_digest


def test_all_members_get_the_same_object_so_that_it_is_serialised_once():
    lighthouse = evicted("a", "b")
    (_, one), (_, other), *_ = lighthouse.sent(m.RosterDelta)
    assert one is other


def test_a_member_that_asks_gets_the_roster_of_the_epoch_in_force():
    lighthouse = evicted("a")
    lighthouse.effects.clear()
    lighthouse.say("a", m.RequestRoster(replace(lighthouse.record.fence, epoch=1)))
    assert not lighthouse.sent(m.Epoch)
    lighthouse.say("a", m.RequestRoster(lighthouse.record.fence))
    assert [message.record for _, message in lighthouse.sent(m.Epoch)] == [
        roster_delta.for_members(lighthouse.record)
    ]


@pytest.mark.parametrize("held", ["in force", "before", "another"])
def test_a_session_that_begins_again_gets_only_the_part_that_it_lacks(held):
    before = started("a b c").record
    lighthouse = evicted()
    after = roster_delta.for_members(lighthouse.record)
    digests = {"in force": after.roster_digest, "before": before.roster_digest, "another": "0" * 32}
    lighthouse.effects.clear()
    lighthouse.do(io.SessionOpened(session_of("a", generation=1, step=5, epoch=1, roster=digests[held])))
    changed, whole = lighthouse.sent(m.RosterDelta), lighthouse.sent(m.Epoch)
    if held == "another":
        assert not changed and whole[0][1].record == after
    else:
        known = {"in force": after, "before": before}[held]
        assert not whole and roster_delta.applied(changed[0][1], known) == after


def test_every_member_gets_its_own_row_of_the_decision():
    lighthouse = evicted()
    lighthouse.effects.clear()
    lighthouse.say("a", report_of(lighthouse.record, 5, have=(0, 1, 2)))
    lighthouse.say("b", report_of(lighthouse.record, 5, have=()))
    told = dict(lighthouse.sent(m.Resume))
    assert told["a"].table == ()
    assert [(row.replica, row.micro_batches) for row in told["b"].table] == [("b", (3,))]


# --- the member -------------------------------------------------------------------------------------------


def test_a_member_applies_a_roster_delta_and_reports_without_its_roster():
    trainer = running()
    trainer.leader(roster_delta.change(FIRST, SECOND))
    assert trainer.core.epochs.newest == SECOND
    (report,) = trainer.said(m.Report)
    assert report.round_lacked == ()


def test_a_member_that_missed_an_epoch_asks_for_the_roster_and_changes_nothing():
    trainer = running()
    third = record_of("a c", epoch=3)
    trainer.leader(roster_delta.change(SECOND, third))
    assert trainer.said(m.RequestRoster) == [m.RequestRoster(third.fence)]
    assert trainer.core.epochs.newest == FIRST and not trainer.found(member_events.LinkUp)
    trainer.leader(m.Epoch(third))
    assert trainer.core.epochs.newest == third


def test_a_member_does_not_ask_about_a_roster_delta_of_a_past_epoch():
    trainer = running()
    trainer.leader(m.Epoch(record_of("a", epoch=7)))
    trainer.leader(roster_delta.change(record_of("a x", epoch=4), record_of("a b x", epoch=5)))
    assert not trainer.said(m.RequestRoster) and trainer.core.epochs.newest.epoch == 7


def test_a_session_names_the_roster_of_its_member():
    trainer = running()
    trainer.do(member_events.LeaderConnected())
    (session,) = trainer.said(m.OpenSession)
    assert session.roster == FIRST.roster_digest


# --- the decision -----------------------------------------------------------------------------------------


def test_a_reason_counts_the_members_it_does_not_name():
    names = " ".join(f"r{i}" for i in range(MANY))
    record = record_of(names, epoch=2)
    reports = {n: report_of(record, 5, (1, 5, names), "g") for n in record.names}
    assert decide(record, reports).reason == f"all of {MANY} members have prepared step 5"
