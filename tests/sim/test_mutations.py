"""A check of the check: deliberate protocol bugs, each of which the simulator must notice in time."""

import pytest
from sim.mutations import MUTATIONS
from sim.world import run_seed

# Seeds within which a bug must show. Those that aim at a moment of a recovery need more of them.
SEEDS = 300


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_the_simulator_notices(name, monkeypatch):
    mutate, aims = MUTATIONS[name]
    mutate(monkeypatch)
    for seed in range(SEEDS):
        try:
            run_seed(seed, aims=aims)
        except Exception as error:  # noqa: BLE001  (a core that trips over itself is noticed too)
            print(f"{name}: seed {seed}: {type(error).__name__}: {error}")
            return
    pytest.fail(f"{SEEDS} worlds did not notice: {name.replace('_', ' ')}")
