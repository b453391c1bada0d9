"""The simulator must notice each deliberate protocol bug within its seeds."""

import pytest
from sim import noticing
from sim.mutations import MUTATIONS
from sim.world import World

# Seeds within which a bug must show. Most bugs show within ten seeds.
SEEDS = 150


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_the_simulator_notices_every_deliberate_bug(name):
    mutate, aims = MUTATIONS[name]
    noticing.find(mutate, "plain", range(SEEDS), aims=aims)


def test_a_deliberate_bug_that_raises_does_not_count_as_noticed():
    def broken(patch):
        patch.setattr("sim.world.World.living", lambda world: world.nonsense)

    with pytest.raises(AttributeError, match="nonsense"):
        noticing.find(broken, "plain", range(1))


def test_a_seed_that_fails_without_the_bug_does_not_count_as_noticed():
    class Broken(noticing.Violation):
        pass

    class BrokenWorld(World):
        def run(self):
            raise Broken(f"seed {self.clockwork.seed}")

    with pytest.raises(Broken, match="seed 0"):
        noticing.find(no_bug, BrokenWorld, range(1))


def test_worlds_without_a_bug_are_not_counted_as_noticed():
    with pytest.raises(pytest.fail.Exception, match="2 worlds did not notice: no bug"):
        noticing.find(no_bug, "plain", range(2))


def no_bug(patch):
    """Changes nothing."""
