"""The lighthouse keeps a complete job for the requested time, even if lighthouses' clocks are wrong."""

import pytest

from fabric.lighthouse.jobs.job import WITNESSED_S, Retention
from fabric.lighthouse.jobs.job_history import EventLog

DAY_S = 86400.0
WEEK_S, YEAR_S = 7 * DAY_S, 365 * DAY_S
ENDED = 1.8e9


def forgotten_after(kept: Retention, ended: float, unix_s, now: float) -> float:
    """Return the seconds after ``now`` at which the job is deleted; ``unix_s`` maps this time to the time of
    day.
    """
    for hours in range(24 * 30):
        if kept.is_over(ended, WEEK_S, unix_s(hours * 3600.0), now + hours * 3600.0):
            return hours * 3600.0
    return float("inf")


def test_with_right_clocks_a_complete_job_is_kept_for_the_configured_time():
    kept = Retention(ENDED, 50.0)
    assert forgotten_after(kept, ENDED, lambda gone_s: ENDED + gone_s, 50.0) == WEEK_S


@pytest.mark.parametrize("age_s", [3 * DAY_S, 6.5 * DAY_S, WEEK_S, YEAR_S])
def test_the_next_leader_goes_on_counting_and_watches_for_a_day(age_s):
    kept = Retention(ENDED + age_s, 50.0)
    found = forgotten_after(kept, ENDED, lambda gone_s: ENDED + age_s + gone_s, 50.0)
    assert found == max(WEEK_S - age_s, WITNESSED_S)


@pytest.mark.parametrize("leap_s", [YEAR_S, -YEAR_S])
def test_a_time_of_day_that_leaps_forgets_nothing(leap_s):
    kept = Retention(ENDED, 50.0)
    found = forgotten_after(kept, ENDED, lambda gone_s: ENDED + gone_s + leap_s * (gone_s > 3 * DAY_S), 50.0)
    assert found == (WEEK_S if leap_s > 0 else float("inf")), "the year that has not been yet has to go by"


def test_a_clock_that_was_years_ahead_at_the_start_and_is_set_right_forgets_nothing():
    kept = Retention(ENDED + YEAR_S, 50.0)
    found = forgotten_after(kept, ENDED, lambda gone_s: ENDED + gone_s + YEAR_S * (gone_s < 3600.0), 50.0)
    assert found == WEEK_S


def test_a_job_that_ended_by_a_clock_of_long_ago_is_kept_for_a_day_by_the_next_leader():
    kept = Retention(ENDED, 50.0)
    assert forgotten_after(kept, 100.0, lambda gone_s: ENDED + gone_s, 50.0) == WITNESSED_S


def test_a_job_that_ended_by_a_clock_of_the_future_is_kept():
    kept = Retention(ENDED, 50.0)
    assert forgotten_after(kept, ENDED + YEAR_S, lambda gone_s: ENDED + gone_s, 50.0) == float("inf")


def test_a_record_that_does_not_say_when_counts_from_the_first_look():
    kept = Retention(ENDED, 50.0)
    assert forgotten_after(kept, 0.0, lambda gone_s: ENDED + gone_s, 50.0) == WEEK_S


def test_a_complete_job_that_is_still_asked_for_is_kept_another_day():
    kept = Retention(ENDED + YEAR_S, 50.0)
    assert not kept.is_over(ENDED, WEEK_S, ENDED + YEAR_S, 50.0)
    kept.is_in_use()
    for gone_s, over in ((WITNESSED_S, False), (2 * WITNESSED_S - 1, False), (2 * WITNESSED_S, True)):
        assert kept.is_over(ENDED, WEEK_S, ENDED + YEAR_S + gone_s, 50.0 + gone_s) is over


def test_a_retention_of_less_than_a_day_is_kept_exactly():
    kept = Retention(ENDED, 50.0)
    assert not kept.is_over(ENDED, 60.0, ENDED, 50.0)
    assert kept.is_over(ENDED, 60.0, ENDED + 60.0, 110.0)


def test_ids_of_events_do_not_leap_with_the_time_of_day():
    """Otherwise a follower of the events would get none from the next leader, whose clock is right."""
    unix_s, now = [ENDED], [50.0]
    log = EventLog(clock=lambda: unix_s[0], steady=lambda: now[0])
    ids = [log.add("a", 1, "", "").id]
    for leap_s in (YEAR_S, -2 * YEAR_S):
        unix_s[0] += leap_s
        now[0] += 1.0
        event = log.add("b", 1, "", "")
        assert event.t == unix_s[0]
        ids.append(event.id)
    assert ids == [int(ENDED * 1e6) + seconds * 1_000_000 for seconds in range(3)]
