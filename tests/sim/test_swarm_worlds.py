"""Worlds in which several features and faults meet: all go on in the end, and no invariant breaks."""

import pytest
from sim import swarm_worlds
from sim.checkers import Violation
from sim.noticing import met_without_a_bug
from sim.swarm_worlds import seeds_with_every_pair, swarm_world

SEEDS = range(120)
HUNTED_SEEDS = range(250)


def test_worlds_of_several_features_go_on_apply_each_step_once_and_say_the_truth(request):
    """Each pair of features meets in one of them; ``--hunt`` plays all seeds."""
    hunts = request.config.getoption("--hunt")
    met = [met_without_a_bug("swarm", x) for x in (HUNTED_SEEDS if hunts else seeds_with_every_pair(SEEDS))]
    assert set(swarm_worlds.REQUIRED) <= frozenset().union(*met)


def test_a_status_that_hides_a_wait_is_noticed(monkeypatch):
    monkeypatch.setattr(swarm_worlds, "waiting_for", lambda view, now: "nothing: every member runs")
    with pytest.raises(Violation, match="of a long wait the status said"):
        for seed in (23, *range(30)):  # world 23 noticed it
            swarm_world(seed).run()


def test_a_part_that_only_two_newcomers_can_read_is_computed():
    """They join in two epochs that follow each other, and one has committed a step in the first of them."""
    swarm_world(281).run()


def test_an_epochs_number_of_two_rosters_is_judged_by_the_roster_of_each_process():
    """A restored store gives a number again. A member applied a step of the first roster of this number."""
    swarm_world(526).run()


def test_a_replica_on_several_hosts_makes_none_of_them_suspect():
    """It joined again after two failures, and the checker took its name for the name of a host."""
    swarm_world(622).run()


def test_where_another_feature_adds_a_replica_each_replica_has_a_share():
    settings = swarm_world(95033).settings
    assert len(settings.shares) == settings.replicas == 3


def test_a_newcomer_without_replay_joins_although_it_passes_many_stages():
    """While it waited for its next try, the job passed more stages than it can pass while others wait."""
    swarm_world(95142).run()


def test_failures_that_a_restored_store_has_lost_keep_nobody_out():
    """The checker counted the death of one process twice: before the store was put back, and after it."""
    swarm_world(96333).run()
