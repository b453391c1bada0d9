"""The leader's plan: a table of rules in order, the same in the code and in the docs."""

import re
from pathlib import Path

from fabric.protocol.leader.plan import PLAN_RULES, SETTLED_RULES, PlanRule, first_move

DOCS = Path(__file__).parents[2] / "docs" / "architecture.md"


def rules(made, *moves):
    """Return one rule per entry of ``moves``; each rule records its number, and makes a move if the entry
    says so.
    """

    def rule(number, moves_now):
        return PlanRule(str(number), lambda leader, record: made.append(number) or moves_now)

    return tuple(rule(number, moves_now) for number, moves_now in enumerate(moves))


def test_the_first_rule_with_an_effect_ends_the_pass():
    made = []
    assert first_move(rules(made, False, True, True), None, None)
    assert made == [0, 1]


def test_without_an_effect_every_rule_is_tried():
    made = []
    assert not first_move(rules(made, False, False), None, None)
    assert made == [0, 1]


def test_a_rule_that_goes_on_never_ends_the_pass():
    assert not first_move((PlanRule("acts", lambda leader, record: None),), None, None)


def test_every_rule_has_a_name_of_its_own():
    names = [rule.name for rule in (*PLAN_RULES, *SETTLED_RULES)]
    assert len(set(names)) == len(names)


def test_the_docs_print_the_plan_in_its_order():
    rows = re.findall(r"^\| (\d+)(?:\.(\d+))? \| ([^|]+) \|", DOCS.read_text(), re.MULTILINE)
    number = next(i for i, rule in enumerate(PLAN_RULES, 1) if rule.name == "change a settled roster")
    expected = [(str(i), "", rule.name) for i, rule in enumerate(PLAN_RULES, 1)]
    settled = [(str(number), str(i), rule.name) for i, rule in enumerate(SETTLED_RULES, 1)]
    assert rows == expected[:number] + settled + expected[number:]
