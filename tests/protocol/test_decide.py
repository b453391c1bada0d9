"""The resume decision of a forced epoch: single cases, and properties over random reports."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from protocol.makers import record_of, report_of

from fabric.model import Base, DataPlan, Sharing
from fabric.protocol.messages.network import Resume
from fabric.protocol.rules.assignment import Work, share_out
from fabric.protocol.rules.decide import Evict, Undecidable, decide

M = 4
ABC = (1, 7, "a b c")


def table_of(decision, record=None, micro_batches=M):
    """The work of each member; those of ``record`` divide a step that none of them has begun."""
    if not decision.undivided:
        return {a.replica: a.micro_batches for a in decision.table}
    able = [x for x in record.roster if x.replica not in decision.idle]
    return share_out(Work(micro_batches, record.sharing), record.roster, able)


def dropped(decision):
    return {a.replica for a in decision.table if a.drop}


def test_a_round_that_all_have_prepared_is_committed():
    record = record_of("a b")
    reports = {n: report_of(record, 7, ABC, prepared="g", have=(0, 1)) for n in "ab"}
    decision = decide(record, reports)
    assert (decision.step, decision.commit_digest) == (8, "g")
    assert table_of(decision, record) == {"a": (0, 1), "b": (2, 3)}


def test_a_disputed_round_is_redone_by_the_members_that_are_left():
    """The other members voted for another digest and died, so no member can have committed the round."""
    record = record_of("a")
    report = report_of(record, 7, ABC, prepared="wrong", have=(0, 1))
    assert decide(record, {"a": report}).commit_digest == "wrong"
    decision = decide(record, {"a": replace(report, disputed=True)})
    assert (decision.step, table_of(decision)) == (7, {"a": (2, 3)})


def test_a_minority_in_a_disputed_round_is_evicted_all_the_same():
    record = record_of("a b c")
    reports = {n: report_of(record, 7, ABC, prepared="g") for n in "ab"}
    reports["c"] = replace(report_of(record, 7, ABC, prepared="h"), disputed=True)
    decision = decide(record, reports)
    assert isinstance(decision, Evict) and decision.replicas == ("c",)


def test_a_round_is_redone_when_one_member_has_not_prepared_it():
    record = record_of("a b")
    reports = {
        "a": report_of(record, 7, ABC, prepared="g", have=(0, 1)),
        "b": report_of(record, 7, ABC, have=(2,)),
    }
    decision = decide(record, reports)
    assert decision.step == 7
    assert table_of(decision) == {"a": (), "b": (3,)}


def test_a_member_that_never_entered_the_round_has_not_prepared_it():
    record = record_of("a b")
    reports = {"a": report_of(record, 7, ABC, prepared="g", have=range(4)), "b": report_of(record, 7)}
    assert decide(record, reports).step == 7


def test_a_prepared_older_round_does_not_count_in_a_newer_one():
    record = record_of("a b", epoch=4)
    reports = {
        "a": report_of(record, 7, (1, 7, "a b"), prepared="old", have=(0, 1)),
        "b": report_of(record, 7, (3, 7, "a b"), prepared="new", have=(2, 3)),
    }
    decision = decide(record, reports)
    assert decision.step == 7
    assert table_of(decision) == {"a": (), "b": ()}


def test_a_member_that_has_committed_pulls_the_others_after_it():
    record = record_of("a b")
    reports = {
        "a": report_of(record, 8, ABC, committed="g", have=()),
        "b": report_of(record, 7, ABC, prepared="g", have=(0, 1)),
    }
    decision = decide(record, reports)
    assert (decision.step, decision.commit_digest) == (8, "g")
    assert sorted(i for ids in table_of(decision).values() for i in ids) == [0, 1, 2, 3]
    assert all(table_of(decision).values()), "b commits at once, so it computes too"


def test_a_member_behind_without_a_prepared_round_computes_nothing():
    record = record_of("a b")
    reports = {"a": report_of(record, 8, (1, 8, "a b"), committed="g"), "b": report_of(record, 7, ABC)}
    decision = decide(record, reports)
    assert (decision.step, table_of(decision)) == (8, {"a": (0, 1, 2, 3), "b": ()})


def test_a_micro_batch_that_two_members_hold_is_dropped_by_the_later_one():
    record = record_of("a b")
    reports = {
        "a": report_of(record, 7, ABC, have=(0, 1)),
        "b": report_of(record, 7, ABC, have=(1, 2)),
    }
    decision = decide(record, reports)
    assert dropped(decision) == {"b"}
    assert table_of(decision) == {"a": (), "b": (2, 3)}


def test_rounds_before_the_cold_start_are_void():
    record = record_of("a b", epoch=6, cold=5, generation=2)
    reports = {n: report_of(record, 3, (4, 9, "a b"), prepared="g", generation=2) for n in "ab"}
    assert decide(record, reports).step == 3


def test_a_cold_start_begins_at_its_base_with_nothing_kept():
    record = record_of("a b", epoch=5, cold=5, generation=2, base=Base(1, 3, "d"))
    reports = {n: report_of(record, 9, (4, 9, "a b"), prepared="g", have=(0,)) for n in "ab"}
    decision = decide(record, reports)
    assert decision.step == 3
    assert table_of(decision, record) == {"a": (0, 1), "b": (2, 3)}


def test_a_generation_that_no_member_has_begun_begins_again():
    """A newer epoch superseded the cold start's own decision before any member adopted it."""
    record = record_of("a b", epoch=6, cold=5, generation=2, base=Base(1, 3, "d"))
    reports = {n: report_of(record, 0, generation=0) for n in "ab"}
    decision = decide(record, reports)
    assert decision.step == 3
    assert table_of(decision, record) == {"a": (0, 1), "b": (2, 3)}


def test_reports_of_members_without_a_state_of_the_generation_do_not_decide():
    record = record_of("a b", epoch=6, cold=5, generation=2)
    reports = {
        "a": report_of(record, 4, (5, 4, "a b"), have=(0,), generation=2),
        "b": report_of(record, 90, (3, 90, "a b"), prepared="g", generation=1),
    }
    decision = decide(record, reports)
    assert decision.step == 4
    assert table_of(decision) == {"a": (1, 2, 3), "b": ()}


def shards_of(on_loss):
    """Return three members of which two can read each of three parts; parts 0 and 1 lie with "a"."""
    record = record_of("a b c", **{name: {"data_slot": n} for n, name in enumerate("abc")})
    return replace(record, sharing=Sharing(data_slots=3, readers=2, on_loss=on_loss))


def without(record, name):
    return replace(record, roster=tuple(x for x in record.roster if x.replica != name))


def computed_by(decision, record):
    return sorted(i for ids in table_of(decision, record, 6).values() for i in ids)


@pytest.mark.parametrize("on_loss", ["wait", "shrink", "stop"])
def test_after_a_commit_a_newcomer_computes_the_part_that_it_alone_can_read(on_loss):
    record = without(shards_of(on_loss), "b")
    reports = {
        "a": report_of(record, 7, (1, 7, "a b"), prepared="g", have=(0, 1)),
        "c": report_of(record, 0, generation=0),
    }
    decision = decide(record, reports)
    assert (decision.step, computed_by(decision, record)) == (8, [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("on_loss", ["wait", "shrink", "stop"])
def test_at_a_redo_a_member_that_is_behind_computes_the_part_that_it_alone_can_read(on_loss):
    record = without(shards_of(on_loss), "b")
    reports = {
        "a": report_of(record, 8, (1, 8, "a b"), have=(0, 1), micro_batches=6),
        "c": report_of(record, 0, generation=0, micro_batches=6),
    }
    decision = decide(record, reports)
    assert (decision.step, computed_by(decision, record)) == (8, [2, 3, 4, 5])


@pytest.mark.parametrize("on_loss", ["wait", "shrink", "stop"])
def test_a_step_that_nobody_has_begun_is_divided_with_the_only_reader(on_loss):
    record = without(shards_of(on_loss), "b")
    begun = DataPlan(6, until=8)
    reports = {
        "a": replace(report_of(record, 7, (1, 7, "a b"), prepared="g"), plan=begun),
        "c": replace(report_of(record, 0, generation=0), plan=begun),
    }
    decision = decide(record, reports)
    assert decision.undivided and decision.idle == ()


@pytest.mark.parametrize("on_loss", ["wait", "shrink", "stop"])
def test_a_newcomer_whose_parts_others_can_read_computes_nothing_at_first(on_loss):
    record = shards_of(on_loss)
    reports = {n: report_of(record, 7, (1, 7, "a b"), prepared="g") for n in "ab"}
    reports["c"] = report_of(record, 0, generation=0)
    decision = decide(record, reports)
    assert computed_by(decision, record) == [0, 1, 2, 3, 4, 5] and decision.idle == ("c",)


@pytest.mark.parametrize("on_loss", ["shrink", "stop"])
def test_a_part_that_nobody_in_the_roster_can_read_brings_no_member_in(on_loss):
    record = shards_of(on_loss)
    record = replace(record, sharing=replace(record.sharing, readers=1))
    record = without(record, "c")
    reports = {n: report_of(record, 7, (1, 7, "a b"), prepared="g") for n in "ab"}
    assert computed_by(decide(record, reports), record) == [0, 1, 2, 3]


def test_a_digest_minority_is_evicted_before_anything_else():
    record = record_of("a b c")
    reports = {n: report_of(record, 7, ABC, digest="x") for n in "ab"}
    reports["c"] = report_of(record, 7, ABC, digest="y", prepared="g")
    decision = decide(record, reports)
    assert isinstance(decision, Evict) and decision.replicas == ("c",)


def split_in_two(**since):
    """Return reports in which a and d disagree with b and c, with the tenure of each."""
    record = record_of("a b c d", **{name: {"since": epoch} for name, epoch in since.items()})
    digests = {"a": "x", "b": "y", "c": "y", "d": "x"}
    reports = {n: report_of(record, 7, (1, 7, "a b c d"), digest=d) for n, d in digests.items()}
    return decide(record, reports)


def test_a_tie_goes_against_the_shortest_tenure_whatever_the_order_of_the_ring():
    assert split_in_two(a=1, b=1, c=3, d=1).replicas == ("b", "c")
    assert split_in_two(a=5, b=1, c=3, d=1).replicas == ("a", "d")
    assert split_in_two(a=5, b=5, c=3, d=1).replicas == ("b", "c"), "the next shortest decides"


def test_a_tie_between_members_of_equal_tenure_evicts_none():
    decision = split_in_two(a=1, b=1, c=1, d=1)
    assert isinstance(decision, Undecidable)
    assert "a (x) and b (y) and c (y) and d (x) disagree about the state at step 7" in decision.reason


def test_a_majority_of_digests_counts_more_than_tenure():
    record = record_of("a b c", a={"since": 1}, b={"since": 8}, c={"since": 9})
    reports = {n: report_of(record, 7, digest=d) for n, d in {"a": "x", "b": "y", "c": "y"}.items()}
    assert decide(record, reports) == Evict(
        ("a",), "a disagrees with the majority about the state at step 7", state=True
    )


@pytest.mark.parametrize("left", ["a", "a b"])
def test_an_outvoted_member_is_evicted_though_the_majority_is_gone(left):
    """Two of three members called a's state wrong; then both died, or one died and left a tie."""
    record = record_of(left)
    reports = {n: report_of(record, 7, ABC, digest="y") for n in left.split()}
    reports["a"] = replace(reports["a"], digest="x", outvoted=True)
    why = "a disagrees with the majority about the state at step 7"
    assert decide(record, reports) == Evict(("a",), why, state=True)


def test_a_verdict_on_a_state_of_an_earlier_generation_does_not_count():
    record = record_of("a b", generation=2)
    reports = {"a": replace(report_of(record, 7, generation=1), outvoted=True)}
    reports["b"] = report_of(record, 7, generation=2)
    assert isinstance(decide(record, reports), Resume)


def test_states_of_unequal_layouts_do_not_disagree():
    """Two layouts of ranks may round the same update differently."""
    record = record_of("a b c", a={"cuts": "x"}, b={"cuts": "y"}, c={"cuts": "y"})
    reports = {n: report_of(record, 7, ABC, digest=d) for n, d in {"a": "s", "b": "t", "c": "t"}.items()}
    assert isinstance(decide(record, reports), Resume)
    reports["c"] = replace(reports["c"], digest="u")
    decision = decide(record, reports)
    assert isinstance(decision, Undecidable)
    assert "b (t) and c (u) disagree about the state at step 7" in decision.reason


def test_two_members_that_disagree_about_the_state_stop_the_job():
    record = record_of("a b", a={"since": 1}, b={"since": 9})
    reports = {"a": report_of(record, 7, digest="x"), "b": report_of(record, 7, digest="y")}
    decision = decide(record, reports)
    assert isinstance(decision, Undecidable)
    assert "a (x) and b (y) disagree about the state at step 7" in decision.reason


@pytest.mark.parametrize("elder", [False, True])
def test_of_two_disagreeing_members_the_newer_is_evicted_if_it_has_agreed_with_none_since_its_admission(
    elder,
):
    """The older member's own flag does not count, because alone in the roster it could agree with no
    member.
    """
    record = record_of("a b", a={"since": 9}, b={"since": 1})
    reports = {
        "a": replace(report_of(record, 7, digest="x"), unconfirmed=True),
        "b": replace(report_of(record, 7, digest="y"), unconfirmed=elder),
    }
    why = (
        "a disagrees with b about the state at step 7, and was let in last, in epoch 9, and has agreed "
        "with no member since"
    )
    assert decide(record, reports) == Evict(("a",), why, state=True)


@pytest.mark.parametrize(("a", "b"), [(9, 9), (1, 9)])
def test_of_two_disagreeing_members_none_is_evicted_if_they_were_admitted_together_or_agreed_since(a, b):
    record = record_of("a b", a={"since": a}, b={"since": b})
    reports = {
        "a": replace(report_of(record, 7, digest="x"), unconfirmed=True),
        "b": replace(report_of(record, 7, digest="y"), unconfirmed=a == b),
    }
    assert isinstance(decide(record, reports), Undecidable)


def test_the_verdict_says_where_the_states_differ():
    record = record_of("a b", a={"since": 1}, b={"since": 9})
    reports = {n: report_of(record, 7, digest=d) for n, d in {"a": "x", "b": "y"}.items()}
    reports["a"] = replace(reports["a"], parted="they differ in lr: 1 on a, 2 on b")
    undecidable = decide(record, reports)
    assert isinstance(undecidable, Undecidable)
    assert undecidable.reason.endswith("restart the job from a checkpoint; they differ in lr: 1 on a, 2 on b")
    reports["b"] = replace(reports["b"], unconfirmed=True)
    evicted = decide(record, reports)
    assert isinstance(evicted, Evict) and evicted.reason.endswith("; they differ in lr: 1 on a, 2 on b")


def test_a_verdict_of_the_majority_says_where_the_state_differs():
    record = record_of("a b c")
    reports = {n: report_of(record, 7, digest=d) for n, d in {"a": "x", "b": "y", "c": "y"}.items()}
    reports["a"] = replace(reports["a"], outvoted=True)
    reports["b"] = replace(reports["b"], parted="the first tensor that differs is model/1.noisy")
    evicted = decide(record, reports)
    assert isinstance(evicted, Evict)
    assert evicted.reason == (
        "a disagrees with the majority about the state at step 7; the first tensor that differs is "
        "model/1.noisy"
    )


def test_two_of_three_that_have_a_digest_are_judged_as_two():
    record = record_of("a b c", a={"since": 1}, b={"since": 9}, c={"since": 4})
    reports = {n: report_of(record, 7, digest=d) for n, d in {"a": "x", "b": "y", "c": ""}.items()}
    reports["b"] = replace(reports["b"], unconfirmed=True)
    assert decide(record, reports).replicas == ("b",)


def test_prepared_rounds_with_other_content_are_not_committed():
    record = record_of("a b c")
    reports = {n: report_of(record, 7, ABC, prepared="g") for n in "ab"}
    reports["c"] = report_of(record, 7, ABC, prepared="h")
    decision = decide(record, reports)
    assert isinstance(decision, Evict) and decision.replicas == ("c",)


# --- properties ----------------------------------------------------------------------------------------

NAMES = ("a", "b", "c", "d")


@st.composite
def histories(draw):
    """Random reports after one round: some members have prepared it, some have not, some have committed
    it.
    """
    members = NAMES[: draw(st.integers(1, 4))]
    survivors = draw(st.lists(st.sampled_from(members), min_size=1, unique=True))
    survivors = [n for n in members if n in survivors]
    everybody_holds = draw(st.booleans())
    record = record_of(" ".join(survivors), epoch=3)
    last_round = (2, 7, " ".join(members))
    cut = sorted(draw(st.lists(st.integers(0, M), min_size=len(members) - 1, max_size=len(members) - 1)))
    bounds = [0, *cut, M]
    reports = {}
    for i, name in enumerate(members):
        have = range(bounds[i], bounds[i + 1])
        if everybody_holds and draw(st.booleans()):
            report = report_of(record, 8, last_round, committed="g")
        else:
            prepared = everybody_holds or draw(st.booleans())
            report = report_of(
                record, 7, last_round, prepared="g" if prepared else "", have=have, committed="f"
            )
        if name in survivors:
            reports[name] = report
    return record, reports


def reference(record, reports):
    """Return the step to resume at, by the plain words of the rule."""
    step = max(max(r.step, r.round_step) for r in reports.values())
    newest = max((r.round_epoch for r in reports.values() if r.round_step == step), default=None)
    if newest is None:
        return step
    of_it = [r for r in reports.values() if r.round_step == step and r.round_epoch == newest]
    names = set(reports) - set(of_it[0].round_lacked)
    hold = all(reports[n].prepared and reports[n].round_epoch == newest for n in names)
    return step + 1 if hold else step


@given(histories())
@settings(max_examples=300)
def test_the_decided_step_is_the_references_and_no_committed_step_is_undone(history):
    record, reports = history
    decision = decide(record, reports)
    assert isinstance(decision, Resume)
    assert decision.step == reference(record, reports)
    assert decision.step >= max(r.step for r in reports.values())


@given(histories(), st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_the_order_of_reports_is_irrelevant(history, random):
    record, reports = history
    shuffled = list(reports.items())
    random.shuffle(shuffled)
    assert decide(record, dict(shuffled)) == decide(record, reports)


@given(histories())
@settings(max_examples=300)
def test_every_micro_batch_of_the_round_is_kept_or_computed_once(history):
    record, reports = history
    decision = decide(record, reports)
    counted = [i for ids in table_of(decision, record).values() for i in ids]
    for row in decision.table:
        report = reports[row.replica]
        counted += report.have if report.step == decision.step and not row.drop else ()
    assert sorted(counted) == list(range(M))
