"""The golden scenarios: the cores' messages and effects as text. ``--rewrite-scenarios`` writes the accounts
again.
"""

from pathlib import Path

import pytest
from sim.scenario import blocks, replay

FOLDER = Path(__file__).parent / "scenarios"
SCENARIOS = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_plays_as_it_is_written(path, request):
    written, played = path.read_text(), replay(path.read_text())
    if request.config.getoption("--rewrite-scenarios"):
        path.write_text(played)
    else:
        assert played == written, "see the difference; pytest --rewrite-scenarios accepts it"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_says_what_it_shows(path):
    (first, *_), *_ = [comments for comments, _, _ in blocks(path.read_text())]
    assert first.startswith("# ")


def test_the_twelve_basic_scenarios_exist():
    assert {path.stem for path in SCENARIOS} >= {
        *("start", "death", "death_in_an_exchange", "join", "death_during_a_join", "fail_over", "cold_start"),
        *("partition", "wrong_suspicion", "corrupted_gradient", "drain", "end"),
    }
