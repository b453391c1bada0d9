"""The forking parents of the recipes: without frameworks, with the usual ones, and for each further set."""

import pytest
from job import Zygote

# What `import` of a framework leaves for its first use, where it takes each process seconds.
BEHIND = {"transformers": ("transformers.trainer",), "torchdata": ("torchdata.stateful_dataloader",)}

# One parent imports all of them, because each parent imports torch again.
USUAL = ("accelerate", "pytorch_lightning", "torchdata", "transformers")


@pytest.fixture(scope="session")
def zygotes():
    """Call it with the modules that a recipe needs."""
    made = {}

    def get(needs):
        needs = USUAL if needs and set(needs) <= set(USUAL) else needs
        if needs not in made:
            made[needs] = Zygote([x for name in needs for x in (name, *BEHIND.get(name, ()))])
        return made[needs]

    yield get
    for zygote in made.values():
        zygote.close()
