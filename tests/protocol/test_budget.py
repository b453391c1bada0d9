"""``exchange_s`` determines every deadline of an exchange, and good rounds shorten the bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.protocol.rules.adaptive_timeout import ENOUGH, FLOOR_S, MARGIN, AdaptiveTimeout, Budget, problem


@given(st.floats(0.1, 1e5), st.floats(1, 1e5))
def test_every_deadline_inside_the_exchange_lies_within_it(exchange_s, more):
    budget = Budget(exchange_s, exchange_s * more)
    assert 0 < budget.link_s < budget.exchange_s <= budget.entry_s
    assert budget.entry_s > budget.user_code_s, "the leader names the late one before the data plane gives up"


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ((0, 1800, 1800), "exchange_s is 0: give the seconds that a round may take"),
        (
            (60, 30, 1800),
            "user_code_s (30) is below exchange_s (60): a member in user code would be given up",
        ),
        ((60, 1800, 20), "autonomy_s (20) is below exchange_s (60): one slow round without a lighthouse"),
        ((60, 1800, 1800), ""),
    ],
)
def test_an_impossible_budget_is_refused_with_a_sentence(budget, says):
    found = problem(*budget)
    assert found.startswith(says) and bool(found) == bool(says)


def learned(*seconds, cap_s=60.0):
    bound = AdaptiveTimeout(cap_s)
    for each in seconds:
        bound.took(each)
    return bound


def test_few_rounds_do_not_change_the_exchange_bound():
    assert learned(*[0.01] * (ENOUGH - 1)).bound_s == 60.0
    assert learned(*[0.01] * ENOUGH).bound_s == FLOOR_S


def test_the_bound_follows_the_slowest_of_a_hundred():
    assert learned(*[0.1] * 99, 1.0).bound_s == FLOOR_S, "one in a hundred is no rule"
    assert learned(*[0.1] * 98, 1.0, 1.0).bound_s == pytest.approx(MARGIN * 1.0)
    assert learned(*[10.0] * 100).bound_s == 60.0, "never above the setting"


def test_old_rounds_are_forgotten():
    assert learned(*[2.0] * 100, *[0.1] * 200).bound_s == FLOOR_S


def test_after_a_stall_there_is_more_time_until_a_round_goes_well():
    bound = learned(*[0.1] * 50)
    bounds = []
    for _ in range(5):
        bounds.append(bound.bound_s)
        bound.stalled()
    assert bounds == [5.0, 10.0, 20.0, 40.0, 60.0]
    bound.took(0.1)
    assert bound.bound_s == FLOOR_S
