"""Data that change with the step: whose number of micro-batches counts, and members with unequal data."""

import pytest
from msgspec.structs import replace
from protocol.makers import record_of, report_of, session_of
from protocol.test_member import FIRST, Trainer, contribution, resume_of

from fabric.exit_codes import FAILED
from fabric.model import DataPlan
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.compatibility import incompatibility, split_by_data
from fabric.protocol.rules.decide import decide


def table_of(decision):
    return {a.replica: a.micro_batches for a in decision.table}


def reports_of(record, step, **plans):
    return {name: replace(report_of(record, step), plan=plan) for name, plan in plans.items()}


def test_a_redone_step_has_the_micro_batches_that_its_members_name():
    record, plan = record_of("a b"), DataPlan(6)
    decision = decide(record, reports_of(record, 7, a=plan, b=plan))
    assert sorted(sum(table_of(decision).values(), ())) == [0, 1, 2, 3, 4, 5]


def test_one_member_that_has_begun_the_next_stage_is_enough():
    record = record_of("a b")
    reports = reports_of(record, 7, a=DataPlan(4, begin=0, until=7), b=DataPlan(6, begin=7, until=9))
    assert sorted(sum(table_of(decide(record, reports)).values(), ())) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("prepared", ["", "g"])
def test_a_step_that_no_member_has_begun_is_divided_by_its_members(prepared):
    """All members are in user code between two stages, so nobody knows the next one."""
    record, over = record_of("a b c"), DataPlan(4, begin=0, until=7)
    reports = {
        name: replace(report_of(record, 6, (1, 6, "a b"), prepared=prepared), plan=over) for name in "ab"
    }
    if not prepared:
        reports = reports_of(record, 7, a=over, b=over)
    reports["c"] = replace(report_of(record, 0, generation=0), plan=over)
    decision = decide(record, reports)
    assert (decision.step, decision.undivided, decision.idle) == (7, True, ("c",))
    assert not decision.table


def test_an_undivided_step_is_divided_when_the_loop_comes_to_it():
    trainer = Trainer()
    record = record_of("a b c", epoch=1)
    resume = m.Resume(record.fence, 0, (), undivided=True, idle=("c",))
    trainer.core.memory.waiting = False
    trainer.leader(m.Epoch(record), resume)
    trainer.do(io.Linked(1), io.Ready(0, "start", plan=DataPlan(6, "dataset B", 0, 5)))
    assert trainer.found(io.Compute) == [io.Compute(0, (0, 1, 2))]


def test_a_report_names_the_stage_of_its_member():
    trainer = Trainer()
    plan = DataPlan(6, "dataset B", 0, 5)
    trainer.leader(m.Epoch(FIRST), resume_of(FIRST, 0, a=(0,), b=(1,)))
    trainer.do(io.Linked(1), io.Computed(0, (0,), 1.0), io.Ready(0, "start", plan=plan))
    trainer.leader(m.Epoch(record_of("a", epoch=2)))
    (report,) = trainer.said(m.Report)
    assert report.plan == replace(plan, described="")


# --- unequal data ----------------------------------------------------------------------------------------


def in_the_first_round(described, since):
    """Return member ``a`` after the first round's contributions of ``described``, by member."""
    changes = {name: {"since": epoch} for name, epoch in since.items()}
    record = record_of(" ".join(described), epoch=1, **changes)
    trainer = Trainer()
    trainer.core.memory.plan = DataPlan(4, described["a"])
    trainer.leader(m.Epoch(record), resume_of(record, 0, a=(0,)))
    trainer.do(io.Linked(1), io.Computed(0, (0,), 1.0))
    (sent, *_) = trainer.told_peers(m.Contribution)
    assert sent.data == described["a"]
    for number, (name, data) in enumerate(described.items()):
        if name != "a":
            trainer.peer(name, replace(contribution(record, 0, (number,)), data=data))
    trainer.do(io.Exchanged(1, 0, "g0"))
    return trainer


def test_the_member_with_other_data_than_the_rest_ends_before_the_commit():
    trainer = in_the_first_round(
        {"a": "seed 1", "b": "seed 0", "c": "seed 0"}, since={"a": 1, "b": 1, "c": 1}
    )
    (stop,) = trainer.found(io.Stop)
    assert stop.code == FAILED
    assert stop.reason == (
        "a has other data than b at step 0 (seed is 1 here and 0 there): give session.steps the same loaders "
        "and the same steps on every replica"
    )
    assert not trainer.told_peers(m.CommitVote)


def test_the_others_wait_without_a_vote_for_the_end_of_that_member():
    trainer = in_the_first_round(
        {"a": "seed 0", "b": "seed 0", "c": "seed 1"}, since={"a": 1, "b": 1, "c": 1}
    )
    assert not trainer.found(io.Stop) and not trainer.told_peers(m.CommitVote)


def test_of_two_members_the_newer_one_is_wrong():
    assert in_the_first_round({"a": "seed 1", "b": "seed 0"}, since={"a": 5, "b": 1}).found(io.Stop)
    assert not in_the_first_round({"a": "seed 1", "b": "seed 0"}, since={"a": 1, "b": 5}).found(io.Stop)


def test_the_job_fails_where_no_side_is_wrong():
    trainer = in_the_first_round({"a": "seed 1", "b": "seed 0"}, since={"a": 1, "b": 1})
    assert trainer.found(io.Stop)
    (failed,) = trainer.said(m.LoopFailed)
    assert "seed is 0 here and 1 there" in failed.why


def test_equal_data_are_told_once_in_each_epoch():
    trainer = in_the_first_round({"a": "seed 0", "b": "seed 0"}, since={"a": 1, "b": 1})
    trainer.peer("b", m.CommitVote(record_of("a b", epoch=1).fence, 0, 1, "g0", "start"))
    trainer.do(io.Ready(1, "d1"))
    trainer.do(io.Computed(1, (0, 1), 2.0))
    assert [c.data for c in trainer.told_peers(m.Contribution)] == [""]


def test_a_member_of_an_older_version_is_not_compared():
    assert split_by_data(record_of("a b"), {"a": "seed 1", "b": ""}, 3) is None


def test_processes_that_began_at_unequal_steps_may_begin_with_unequal_data():
    first = session_of("a", data="until 10")
    assert "until is 10 here and 40 there" in incompatibility(first, session_of("b", data="until 40"))
    assert not incompatibility(first, session_of("b", data="until 40", began=30))
