"""The seeds whose worlds notice the deliberate bugs, by test."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sim import noticing

PLACE = Path(__file__).with_name("noticing_seeds.json")


@pytest.fixture(scope="session", autouse=True)
def known_seeds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Try the seed that has noticed each bug first; ``--hunt`` looks for them anew and writes them down."""
    hunts = request.config.getoption("--hunt")
    known = json.loads(PLACE.read_text())
    noticing.SEEDS.update({} if hunts else known)
    yield
    if hunts:
        PLACE.write_text(json.dumps(dict(sorted({**known, **noticing.SEEDS}.items())), indent=1) + "\n")
