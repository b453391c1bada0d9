"""The message about differing states: the first differing entries, with bounded text."""

import pytest
from msgspec.structs import replace
from protocol.makers import record_of
from protocol.test_member import FIRST, contribution, vote
from protocol.test_member_digests import at_step_1

from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.divergence import MAX_ENTRIES, bounded, differences

LR = "optimizer/param_groups/0/lr"


def test_the_first_entries_that_differ_are_named_with_every_value_and_member():
    said = {
        "r0": ((LR, "0.0003"), ("scaler/scale", "64.0")),
        "r1": ((LR, "0.00029"), ("scaler/scale", "64.0"), ("ema/step", "3")),
        "r2": ((LR, "0.0003"), ("scaler/scale", "64.0")),
    }
    assert differences(said) == (
        f"they differ in {LR}: 0.0003 on r0, r2, 0.00029 on r1; ema/step: nothing on r0, r2, 3 on r1; "
        "likely a schedule, a scaler or random numbers that are not shared state steer the update: share the "
        "object"
    )


NOISY, STATISTIC, MOMENTUM = (
    "~parameter model/1.noisy",
    "~buffer model/2.mean",
    "~optimizer optimizer/state/0/exp_avg",
)


@pytest.mark.parametrize(
    ("differing", "named"),
    [
        ([NOISY], "model/1.noisy; likely an update with random numbers of each replica's own"),
        ([STATISTIC, MOMENTUM], "model/2.mean (and 1 more); likely forward changes this buffer"),
        ([MOMENTUM], "optimizer/state/0/exp_avg; likely a schedule, a scaler or random numbers"),
        (["~object ema/centers"], "ema/centers; likely a callback, a counter or a generator"),
        (["~of a later release ema/x"], "a later release ema/x; likely a callback"),
    ],
)
def test_the_first_tensor_that_differs_is_named_with_its_likely_source(differing, named):
    paths = [LR, "~parameter model/0.weight", *differing]
    said = {x: tuple((p, x if p in differing else "same") for p in paths) for x in ("r0", "r1")}
    assert differences(said).startswith(f"the first tensor that differs is {named}")
    assert "memory" not in differences(said)
    said["r1"] = tuple((p, "other") for p in paths)
    assert differences(said).startswith(f"they differ in {LR}: "), "a number says more than a tensor"
    assert "~" not in differences(said)


def test_only_where_no_sample_differs_the_memory_of_the_hosts_is_to_be_checked():
    same = ((LR, "0.1"), (NOISY, "aa"))
    assert differences({"r0": same, "r1": same}) == (
        "their numbers and the samples of their tensors are equal, so only a few bytes differ: check "
        "these hosts' memory"
    )


def test_with_equal_entries_the_sentence_says_that_a_tensor_differs():
    said = {"r0": ((LR, "0.1"),), "r1": ((LR, "0.1"),), "r2": ()}
    assert differences(said) == "their learning rates and other numbers are equal, so a tensor differs"
    assert differences({"r0": ((LR, "0.1"),), "r1": ()}) == "", "of an older release, which says nothing"


def test_the_differences_are_bounded_and_printable_for_any_entries_of_a_peer():
    hostile = tuple((f"{i}\n\x1b[31m" + "x" * 1000, "y" * 1000) for i in range(1000))
    assert len(bounded(hostile)) == MAX_ENTRIES
    said = differences({"r0": hostile, **{f"r{i}": ((LR, str(i)),) for i in range(1, 200)}})
    assert said.isprintable() and len(said) < 3000
    assert f"and {MAX_ENTRIES + 1 - 3} more; likely" in said


def test_a_member_names_the_differences_when_it_aborts_and_in_its_report():
    trainer = at_step_1()
    trainer.do(io.Computed(1, (0, 1), 2.0), io.Digested(1, "mine", ((LR, "0.1"),)))
    trainer.peer("b", contribution(FIRST, 1, (2, 3)))
    trainer.do(io.Exchanged(1, 1, "g1"))
    (said,) = trainer.told_peers(m.CommitVote)
    assert said.entries == ((LR, "0.1"),)
    theirs = vote(FIRST, 1, gradient="g1", state="theirs")
    trainer.peer("b", replace(theirs, entries=((LR, "0.2"),)))
    (aborted,) = trainer.said(m.Aborted)
    parted = f"they differ in {LR}: 0.1 on a, 0.2 on b; likely a schedule"
    assert aborted.why.startswith(f"digests of the state at step 1 differ: a mine, b theirs; {parted}")
    trainer.leader(m.Epoch(record_of("a b", epoch=2)))
    assert [x.parted.startswith(parted) for x in trainer.said(m.Report)] == [True]


def test_a_vote_without_a_digest_does_not_judge_the_state():
    trainer = at_step_1(later=False)
    trainer.do(io.Computed(1, (0, 1), 2.0))
    trainer.peer("b", contribution(FIRST, 1, (2, 3)))
    trainer.do(io.Exchanged(1, 1, "g1"))
    assert [x.entries for x in trainer.told_peers(m.CommitVote)] == [()]
