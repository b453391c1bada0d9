"""GPU tests are skipped where there is no CUDA device; ``benchmarks/gpu/run.py`` runs them where there is."""

import sys
from pathlib import Path

import pytest
import torch

# The whole-job test is one of the integration tests, and uses their forking parent.
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))


@pytest.fixture(scope="session")
def zygote():
    from job import Zygote

    parent = Zygote()
    yield parent
    parent.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device; run benchmarks/gpu/run.py where there is one")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
