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
    """Has imported transformers, which takes seconds: every trainer that it forks starts at once."""
    modules = ("transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate")
    parent = Zygote((*modules, "fabric.integrations.transformers", "fabric.integrations.accelerate"))
    yield parent
    parent.close()


@pytest.fixture(scope="session")
def lightning_zygote():
    """As ``transformers_zygote``, with Lightning."""
    parent = Zygote(("pytorch_lightning", "fabric.integrations.lightning"))
    yield parent
    parent.close()


@pytest.fixture(scope="session")
def logging_zygote():
    """As ``transformers_zygote``, with TensorBoard."""
    parent = Zygote(("torch.utils.tensorboard",))
    yield parent
    parent.close()
