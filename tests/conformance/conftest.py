"""The forking parents of the recipes, one for each set of frameworks."""

import pytest
from job import Zygote


@pytest.fixture(scope="session")
def zygotes():
    """Call it with the modules that a recipe needs."""
    made = {}

    def get(needs):
        if needs not in made:
            made[needs] = Zygote(needs)
        return made[needs]

    yield get
    for zygote in made.values():
        zygote.close()
