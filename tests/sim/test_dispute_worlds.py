"""Seeded worlds in which members disagree about the state while a newcomer joins."""

from sim import dispute_worlds, noticing
from sim.run import hunt

SEEDS = 60
REPORTED_SEEDS = 8


def test_no_newcomer_makes_a_wrong_state_the_majority():
    required = ("dispute: a bit flipped before a join", "dispute: a newcomer got no state")
    noticing.meet("dispute", (*required, "path: stopped rather than guess"), SEEDS)


def test_a_member_that_is_evicted_by_reports_comes_back_with_another_state():
    noticing.meet("reported", ("dispute: evicted by reports",), REPORTED_SEEDS)


def test_no_job_begins_again_from_a_disputed_state():
    required = ("dispute: all died with unequal states", "dispute: began from an earlier state")
    noticing.meet("cold-dispute", (*required, "path: stopped rather than guess"), SEEDS)


def test_the_simulator_notices_a_job_that_begins_from_a_disputed_state():
    noticing.find(dispute_worlds.believe_any_holder, "cold-dispute", range(SEEDS))


def test_the_simulator_notices_a_newcomer_with_a_disputed_state():
    noticing.find(dispute_worlds.serve_the_most_common_snapshot, "dispute", range(SEEDS))


def test_a_replica_that_was_evicted_by_reports_loads_another_state():
    """Its own state was wrong, and it came back with this state again and again."""
    _, failures = hunt(179, 180, "stall")
    assert not failures, "\n".join(failures)
