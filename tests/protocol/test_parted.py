"""The message about differing states: the first differing entries, with bounded text."""

from dataclasses import replace

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
        f"they differ in {LR}: 0.0003 on r0, r2, 0.00029 on r1; ema/step: nothing on r0, r2, 3 on r1"
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
    assert said.endswith(f"and {MAX_ENTRIES + 1 - 3} more")


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
    parted = f"they differ in {LR}: 0.1 on a, 0.2 on b"
    assert aborted.why == f"digests of the state at step 1 differ: a mine, b theirs; {parted}"
    trainer.leader(m.Epoch(record_of("a b", epoch=2)))
    assert [x.parted for x in trainer.said(m.Report)] == [parted]


def test_a_vote_without_a_digest_does_not_judge_the_state():
    trainer = at_step_1(later=False)
    trainer.do(io.Computed(1, (0, 1), 2.0))
    trainer.peer("b", contribution(FIRST, 1, (2, 3)))
    trainer.do(io.Exchanged(1, 1, "g1"))
    assert [x.entries for x in trainer.told_peers(m.CommitVote)] == [()]
