"""A check of the check: deliberate protocol bugs, each of which the simulator must notice in time."""

import pytest
from sim import noticing
from sim.mutations import MUTATIONS
from sim.world import run_seed

# Seeds within which a bug must show. Most show within ten.
SEEDS = 100


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_the_simulator_notices(name):
    mutate, aims = MUTATIONS[name]
    noticing.find(mutate, lambda seed: run_seed(seed, aims=aims), SEEDS)


def test_a_bug_that_trips_over_itself_is_not_noticed_but_fails():
    def broken(patch):
        patch.setattr("sim.world.World.living", lambda world: world.nonsense)

    with pytest.raises(AttributeError, match="nonsense"):
        noticing.find(broken, run_seed, 1)


def test_what_fails_without_the_bug_is_not_noticed_but_fails():
    class Broken(noticing.Violation):
        pass

    def play(seed):
        raise Broken(f"seed {seed}")

    with pytest.raises(Broken, match="seed 0"):
        noticing.find(lambda patch: None, play, 1)


def test_no_bug_is_not_noticed():
    with pytest.raises(pytest.fail.Exception, match="2 worlds did not notice: no bug"):
        noticing.find(no_bug, run_seed, 2)


def no_bug(patch):
    """Changes nothing."""
