"""accelerate under the variables of ``fabric launch``, without a device and with one that is pretended."""

import os
import sys

import accelerate.state
import pytest
import torch
from accelerate.state import DistributedType, PartialState

from fabric.errors import ConfigError
from fabric.integrations.accelerate import FabricAccelerator

sys.path.insert(0, __file__.rpartition("/tests/")[0] + "/tests/integration")
import pretended_device


@pytest.fixture(params=[False, True], ids=["no device", "a device"])
def launched(request, monkeypatch, tmp_path):
    monkeypatch.setenv("FABRIC_LIGHTHOUSE", "http://127.0.0.1:9")
    monkeypatch.setenv("FABRIC_REPLICA", "r0")
    monkeypatch.setenv("FABRIC_REPLICAS", "3")
    monkeypatch.setenv("FABRIC_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    monkeypatch.setattr(accelerate.state, "torch", accelerate.state.torch)
    if request.param:
        pretended_device.pretend()
    return monkeypatch


@pytest.mark.parametrize("arguments", [{}, {"cpu": True}], ids=str)
def test_a_launched_replica_is_one_process(launched, arguments):
    accelerator = FabricAccelerator(**arguments)
    assert accelerator.distributed_type == DistributedType.NO and accelerator.num_processes == 3
    model = torch.nn.Linear(1, 1)
    assert accelerator.prepare(model) is model, "accelerate has wrapped the model"
    assert not torch.distributed.is_initialized()


def test_a_group_of_one_that_the_script_has_made_before_is_one_process(launched):
    assert PartialState(cpu=True).distributed_type == DistributedType.MULTI_CPU
    assert FabricAccelerator(cpu=True).distributed_type == DistributedType.NO


def test_the_variables_are_there_again_for_the_script(launched):
    FabricAccelerator()
    assert (os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")


def test_several_ranks_are_refused_in_the_words_of_the_launcher(launched):
    launched.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"this replica has 2 ranks: start each one as .* --ranks 1"):
        FabricAccelerator()
