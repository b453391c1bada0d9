"""Every test of the adapters runs under the variables that ``fabric launch`` sets, as people run adapters."""

import pytest
import torch
from accelerate.state import AcceleratorState

from fabric.cli.launch.attempt import AttemptSpec, Place
from fabric.runtime.rank_layout import RankLayout


@pytest.fixture(autouse=True)
def launched_rank(monkeypatch):
    """Set the variables of the only rank of a replica, and yield their names."""
    variables = AttemptSpec((), {}, RankLayout(1), Place(), number=0, run="a.0").rank_environment(0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield list(variables)
    AcceleratorState._reset_state(reset_partial_state=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
