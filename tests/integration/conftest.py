"""One forking parent for all integration tests of a session."""

import pytest
from job import Zygote


@pytest.fixture(scope="session")
def zygote():
    parent = Zygote()
    yield parent
    parent.close()
