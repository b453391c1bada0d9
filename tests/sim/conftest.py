"""The seeds whose worlds notice the deliberate bugs, by test, and meet the rare events, by kind of worlds."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from sim import noticing

PLACE = Path(__file__).with_name("noticing_seeds.json")


@pytest.fixture(scope="session", autouse=True)
def known_seeds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Try the seed that has noticed each bug first; ``--hunt`` looks for them anew and writes them down, and
    ``--renew`` looks for those that notice it no longer."""
    hunts, renews = request.config.getoption("--hunt"), request.config.getoption("--renew")
    known = json.loads(PLACE.read_text())
    for name, seeds in ((k, v) for k, v in known.items() if not hunts):
        (noticing.SEEDS if isinstance(seeds, int) else noticing.COVERS)[name] = seeds
    yield
    if noticing.STALE and not (hunts or renews):
        names = ", ".join(sorted(noticing.STALE))
        warnings.warn(f"run pytest tests/sim --renew: known seeds are stale of {names}", stacklevel=1)
    if hunts or renews:
        found = dict(sorted({**known, **noticing.SEEDS, **noticing.COVERS}.items()))
        lines = [f" {json.dumps(name)}: {seeds}" for name, seeds in found.items()]
        PLACE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
