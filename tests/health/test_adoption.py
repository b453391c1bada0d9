"""The plan in force, and the reasons that hold a remedy back: two planners, deaths, budget and veto."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.health.planning.adaptation_plan import AdaptationPlan, ReplicaPlan, adopt
from fabric.health.planning.layout import StageLayout
from fabric.health.planning.limits import Veto, hold, next_action
from fabric.health.planning.remedies import ActionRules, Remedy, RemedyKind

ALONE = StageLayout(((0,),), (4,))
ROSTER = {"r0": 1, "r1": 1, "r2": 1}


def plan(version: int = 1, counts=(3, 3, 2), **values) -> AdaptationPlan:
    entries = tuple(ReplicaPlan(name, 1, ALONE, n) for name, n in zip(ROSTER, counts, strict=True))
    return AdaptationPlan(version, entries, **values)


def with_entry(**values) -> AdaptationPlan:
    whole_plan = plan()
    return replace(whole_plan, replicas=(*whole_plan.replicas[:2], replace(whole_plan.replicas[2], **values)))


# --- adoption ---------------------------------------------------------------------------------------------


def test_a_plan_that_fits_is_in_force():
    proposed = plan()
    assert adopt(None, proposed, ROSTER, {}, 8).in_force is proposed


@pytest.mark.parametrize(
    ("proposed", "roster", "sentence"),
    [
        (plan(), {"r0": 1, "r1": 1}, "plan 1 is for incarnation 1 of replica r2, and 0 is there now"),
        (plan(), {**ROSTER, "r2": 2}, "plan 1 is for incarnation 1 of replica r2, and 2 is there now"),
        (with_entry(incarnation=0), ROSTER, "plan 1 is for incarnation 0 of replica r2, and 1 is there now"),
        (plan(), {**ROSTER, "r3": 1}, "plan 1 leaves out replica r3"),
        (plan(joins="s0"), ROSTER, "plan 1 needs the spare s0, which is gone"),
        (
            with_entry(rejoins=True, donors=("r8", "r9")),
            ROSTER,
            "all donors of replica r2 in plan 1 are gone",
        ),
        (with_entry(replica="r1"), ROSTER, "plan 1 names a replica twice"),
        (plan(counts=(3, 3, 3)), ROSTER, "plan 1 gives out 9 micro-batches, and the global batch has 8"),
        (plan(3), ROSTER, "plan 3 does not follow plan 0"),
    ],
    ids=["died", "restarted", "came back", "joined", "spare gone", "donors gone", "twice", "sum", "version"],
)
def test_a_plan_that_no_longer_fits_is_refused_whole(proposed, roster, sentence):
    outcome = adopt(None, proposed, roster, {}, 8)
    assert outcome.in_force is None
    assert outcome.refusal.startswith(sentence) and outcome.refusal.endswith(("plan again", "with it", "it"))


def test_one_remaining_source_is_enough():
    assert adopt(None, with_entry(rejoins=True, donors=("gone", "r0")), ROSTER, {}, 8).refusal == ""


def test_a_drained_replica_may_be_missing_from_the_plan():
    short = replace(plan(counts=(4, 4, 0)), replicas=plan(counts=(4, 4, 0)).replicas[:2], leaves="r2")
    assert adopt(None, short, ROSTER, {}, 8).refusal == ""


@given(st.lists(st.sampled_from(["a plans", "b plans", "a writes", "b writes"]), max_size=20))
def test_of_two_planners_the_later_record_wins_and_the_other_is_refused(moves):
    in_force, drafts, writes = None, {}, 0
    for move in moves:
        planner, verb = move.split()
        if verb == "plans":
            version = in_force.version if in_force else 0
            drafts[planner] = plan(version + 1, (4, 2, 2) if planner == "a" else (2, 2, 4))
        elif planner in drafts:
            outcome = adopt(in_force, drafts[planner], ROSTER, {}, 8)
            fits = drafts[planner].version == (in_force.version if in_force else 0) + 1
            assert outcome.in_force is (drafts[planner] if fits else in_force)
            assert bool(outcome.refusal) != fits
            in_force, writes = outcome.in_force, writes + fits
    assert (in_force.version if in_force else 0) == writes


# --- limits -----------------------------------------------------------------------------------------------


def remedy(kind: RemedyKind, replica: str = "r1", rejoins: bool = False) -> Remedy:
    entries = tuple(replace(e, rejoins=rejoins and e.replica == replica) for e in plan().replicas)
    return Remedy(kind, replica, 0.3, 0.0, "it is slow", AdaptationPlan(1, entries))


SHARES, LAYOUT = remedy(RemedyKind.SHARES), remedy(RemedyKind.REPARTITION, rejoins=True)


NO_VETO = Veto()


def held(*, veto: Veto = NO_VETO, acted_s=(), now_s: float = 10_000.0, budget: int = 2):
    rules = ActionRules(actions_per_hour=budget)
    return hold((SHARES, LAYOUT), rules, veto, acted_s, now_s)


def test_the_cheapest_remedy_is_the_next_action():
    assert next_action(held()).kind is RemedyKind.SHARES
    assert next_action(()) is None


def test_a_veto_of_one_kind_of_remedy_lets_other_kinds_pass():
    remedies = held(veto=Veto(frozenset({RemedyKind.SHARES})))
    assert remedies[0].held == "an operator's veto forbids every shares remedy"
    assert next_action(remedies).kind is RemedyKind.REPARTITION


def test_a_veto_of_a_replica_holds_every_remedy_for_that_replica():
    remedies = held(veto=Veto(replicas=frozenset({"r1"})))
    assert [r.held for r in remedies] == ["an operator's veto forbids every remedy for replica r1"] * 2
    assert next_action(held(veto=Veto(replicas=frozenset({"r2"})))) is not None


def test_a_spent_budget_holds_everything_until_an_action_is_an_hour_old():
    assert next_action(held(acted_s=(9_000, 9_500))) is None
    assert held(acted_s=(9_000, 9_500))[0].held == "the budget of 2 actions per hour is spent"
    assert next_action(held(acted_s=(6_400, 9_500))) is not None  # the older remedy was exactly an hour ago
    assert next_action(held(acted_s=(6_401, 9_500))) is None
    # one time is in the future, by a clock that is ahead
    assert next_action(held(acted_s=(9_500, 20_000))) is None
    assert next_action(held(budget=0)) is None


@pytest.mark.parametrize("bad", [{"least_gain": -1.0}, {"horizon_s": float("nan")}, {"actions_per_hour": -1}])
def test_negative_or_nonfinite_rules_of_adaptation_are_refused(bad):
    with pytest.raises(ValueError, match="a rule of adaptation is negative or no number"):
        ActionRules(**bad)
