"""The forking parents of the recipes, one for each set of frameworks."""

import pytest
from job import Zygote

# What `import` of a framework leaves for its first use, where it takes each process seconds.
BEHIND = {"transformers": ("transformers.trainer",), "torchdata": ("torchdata.stateful_dataloader",)}


@pytest.fixture(scope="session")
def zygotes():
    """Call it with the modules that a recipe needs."""
    made = {}

    def get(needs):
        if needs not in made:
            made[needs] = Zygote([x for name in needs for x in (name, *BEHIND.get(name, ()))])
        return made[needs]

    yield get
    for zygote in made.values():
        zygote.close()
