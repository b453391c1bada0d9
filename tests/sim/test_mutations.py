"""The simulator must notice each deliberate protocol bug within its seeds."""

import re
from pathlib import Path

import pytest
from sim import noticing
from sim.mutations import MUTATIONS
from sim.order_mutations import ORDERS
from sim.rank_mutations import MUTATIONS as RANKS
from sim.stall_mutations import JOINS, STALLS
from sim.world import run_seed

# Seeds within which a bug must show. Most bugs show within ten seeds.
SEEDS = 100


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_the_simulator_notices_every_deliberate_bug(name):
    mutate, aims = MUTATIONS[name]
    noticing.find(mutate, lambda seed: run_seed(seed, aims=aims), SEEDS)


def test_the_bugs_that_the_docs_name_are_there():
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    rows = [row.split("|") for row in text.splitlines() if re.match(r"\|.*\| [0-9, ]+ \|$", row)]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row[2])]
    assert len(named) > 20
    assert not set(named) - {*MUTATIONS, *ORDERS, *RANKS, *STALLS, *JOINS}
    seeds = [int(x) for row in rows for x in row[3].split(",")]
    assert len(seeds) == len(named) and max(seeds) < SEEDS


def test_a_deliberate_bug_that_raises_does_not_count_as_noticed():
    def broken(patch):
        patch.setattr("sim.world.World.living", lambda world: world.nonsense)

    with pytest.raises(AttributeError, match="nonsense"):
        noticing.find(broken, run_seed, 1)


def test_a_seed_that_fails_without_the_bug_does_not_count_as_noticed():
    class Broken(noticing.Violation):
        pass

    def play(seed):
        raise Broken(f"seed {seed}")

    with pytest.raises(Broken, match="seed 0"):
        noticing.find(lambda patch: None, play, 1)


def test_worlds_without_a_bug_are_not_counted_as_noticed():
    with pytest.raises(pytest.fail.Exception, match="2 worlds did not notice: no bug"):
        noticing.find(no_bug, run_seed, 2)


def no_bug(patch):
    """Changes nothing."""
