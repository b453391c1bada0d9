"""Seeded worlds about the end of a job: without a lighthouse, with loops of unequal lengths, with a
newcomer that counts its own steps, and with one in a blocking join.
"""

import pytest
from sim import end_worlds, noticing
from sim.end_mutations import MUTATIONS, MUTATIONS_OF_LATE
from sim.world import run_seed

SEEDS = 64


def test_every_job_ends_in_time_and_only_when_all_loops_have_ended():
    noticing.meet("end", end_worlds.REQUIRED, SEEDS)


def test_a_drained_member_that_finishes_says_nothing_in_the_epoch_without_it():
    run_seed(4551)


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_the_simulator_notices_a_bug_in_the_end(name):
    noticing.find(MUTATIONS[name], "end", range(SEEDS))


def test_no_member_waits_for_a_newcomer_whose_join_is_of_no_use_any_more():
    noticing.meet("late-end", end_worlds.REQUIRED_OF_LATE, SEEDS)


@pytest.mark.parametrize("name", sorted(MUTATIONS_OF_LATE))
def test_the_simulator_notices_a_wait_for_a_late_newcomer(name):
    noticing.find(MUTATIONS_OF_LATE[name], "late-end", range(SEEDS))
