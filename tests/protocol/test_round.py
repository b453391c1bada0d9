"""One round: when it is prepared, for which members it waits, when it is committed, and its next epoch."""

from protocol.makers import record_of

from fabric.protocol.member.rounds import Round
from fabric.protocol.messages.network import CommitVote, Contribution


def contribution(round_, ids, **metrics):
    return Contribution(
        round_.record.fence, round_.step, float(len(ids)), tuple(ids), metrics=tuple(metrics.items())
    )


def vote(round_, gradient="g", state="", ready=2):
    return CommitVote(round_.record.fence, round_.step, ready, gradient, state)


def test_a_round_is_prepared_only_when_reduced_with_every_contribution_known():
    round_ = Round(record_of("b a"), 7)
    round_.contributions["a"] = contribution(round_, [0], loss=1.0)
    assert round_.missing() == ("b",)
    round_.gradient_digest = "g"
    assert round_.prepared() is None
    round_.contributions["b"] = contribution(round_, [1, 2], loss=2.5, correct=1.0)
    prepared = round_.prepared()
    assert prepared is not None
    assert (prepared.epoch, prepared.step, prepared.weight) == (2, 7, 3.0)
    assert prepared.contributions == (("b", (1, 2)), ("a", (0,))), "in roster order"
    assert prepared.metrics == (("correct", 1.0), ("loss", 3.5))
    assert round_.missing() == ("b", "a")


def test_a_commit_needs_the_vote_of_every_member():
    round_ = Round(record_of("a b"), 7)
    round_.votes["a"] = vote(round_)
    assert not round_.complete()
    round_.votes["b"] = vote(round_)
    assert round_.complete()
    assert round_.disagreement() == ""


def test_digests_that_differ_are_named_by_member():
    round_ = Round(record_of("a b"), 7)
    round_.votes = {"a": vote(round_, "g"), "b": vote(round_, "h")}
    assert round_.disagreement() == "digests of the reduced gradient at step 7 differ: a g, b h"
    round_.votes = {"a": vote(round_, state="x"), "b": vote(round_, state="y")}
    assert "digests of the state at step 7 differ: a x, b y" in round_.disagreement()


def test_a_state_is_outvoted_when_most_of_the_roster_name_one_other():
    round_ = Round(record_of("a b c d e"), 7)
    round_.votes = {n: vote(round_, state="y") for n in "bc"}
    assert not round_.is_outvoted("a", "x"), "perhaps the other three say x"
    round_.votes["d"] = vote(round_, state="z")
    assert not round_.is_outvoted("a", "x"), "they do not agree among themselves"
    round_.votes["e"] = vote(round_, state="y")
    assert round_.is_outvoted("a", "x") and round_.is_outvoted("a", "z")
    assert not round_.is_outvoted("a", "y") and not round_.is_outvoted("a", ""), "its own was not taken"


def test_states_of_unequal_layouts_are_not_compared():
    """Two layouts of ranks may round the same update differently."""
    round_ = Round(
        record_of("a b c d", a={"cuts": "x"}, b={"cuts": "x"}, c={"cuts": "y"}, d={"cuts": "y"}), 7
    )
    round_.votes = {n: vote(round_, state="s") for n in "ab"} | {n: vote(round_, state="t") for n in "cd"}
    assert round_.disagreement() == round_.parted() == ""
    assert not any(round_.is_outvoted(n, "s") for n in "ab")
    round_.votes["d"] = vote(round_, state="u")
    assert round_.disagreement() == "digests of the state at step 7 differ: c t, d u"
    assert not round_.is_outvoted("d", "u"), "one of two is no majority"
    round_.votes["d"] = vote(round_, "another gradient", state="t")
    assert "digests of the reduced gradient at step 7 differ" in round_.disagreement()


def test_a_result_is_disputed_while_no_majority_of_the_roster_has_said_it():
    round_ = Round(record_of("a b c"), 7)
    round_.votes = {"a": vote(round_, "g"), "b": vote(round_, "g")}
    assert not round_.is_disputed("a"), "nobody has said anything else"
    round_.votes = {"a": vote(round_, "g"), "b": vote(round_, "h")}
    assert round_.is_disputed("a") and round_.is_disputed("b"), "perhaps the third says h"
    assert not round_.is_disputed("c"), "it holds nothing yet"
    round_.votes["c"] = vote(round_, "h")
    assert round_.is_disputed("a") and not round_.is_disputed("b")


def test_a_state_digest_that_was_not_taken_agrees_with_any():
    round_ = Round(record_of("a b"), 7)
    round_.votes = {"a": vote(round_, state="x"), "b": vote(round_, state="")}
    assert round_.disagreement() == ""


def test_the_next_epoch_is_the_one_that_all_are_ready_for():
    round_ = Round(record_of("a b"), 7)
    round_.votes = {"a": vote(round_, ready=3), "b": vote(round_, ready=2)}
    assert round_.next_epoch() == 2
    round_.votes["b"] = vote(round_, ready=3)
    assert round_.next_epoch() == 3
