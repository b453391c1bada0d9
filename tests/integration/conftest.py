"""The forking parents for all integration tests of a session."""

import pytest
from job import Zygote


@pytest.fixture(scope="session")
def zygote():
    parent = Zygote()
    yield parent
    parent.close()


@pytest.fixture(scope="session")
def transformers_zygote():
    """Has imported the frameworks, which takes seconds: every trainer that it forks starts at once."""
    modules = ("transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate")
    own = (f"fabric.integrations.{name}" for name in ("transformers", "accelerate", "lightning"))
    parent = Zygote((*modules, "pytorch_lightning", "torch.utils.tensorboard", *own))
    yield parent
    parent.close()


@pytest.fixture(scope="session")
def lightning_zygote(transformers_zygote):
    """The same parent: another one would import torch again."""
    return transformers_zygote


@pytest.fixture(scope="session")
def logging_zygote(transformers_zygote):
    """As ``lightning_zygote``."""
    return transformers_zygote
