"""The device of a FabricStrategy is that of the Trainer's accelerator. The GPUs here are pretended."""

import pytest
import torch

pytest.importorskip("pytorch_lightning")
import lightning_fabric.accelerators.cuda
import pytorch_lightning.accelerators.cuda
from pytorch_lightning import Trainer
from test_lightning_refusals import DATA, Net
from torch.utils.data import DataLoader

from fabric.errors import ConfigError
from fabric.integrations.adopt.adoption import run_adopted
from fabric.integrations.lightning import FabricStrategy

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}


class Attached(Exception):
    """The training has begun: it joins its job."""


@pytest.fixture(autouse=True)
def selected(monkeypatch, tmp_path):
    """A replica on a host with two GPUs, as Lightning sees it. Return the GPUs that Lightning selects."""
    for module in (lightning_fabric.accelerators.cuda, pytorch_lightning.accelerators.cuda):
        monkeypatch.setattr(module, "num_cuda_devices", lambda: 2)
    devices = []
    monkeypatch.setattr(pytorch_lightning.accelerators.cuda, "_check_cuda_matmul_precision", lambda _: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append(str(device)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(FabricStrategy, "model_to_device", lambda self: None)
    monkeypatch.setattr("fabric.client.attach", attach)
    monkeypatch.setenv("FABRIC_LIGHTHOUSE", "http://127.0.0.1:9")
    monkeypatch.setenv("FABRIC_REPLICA", "r0")
    monkeypatch.setenv("FABRIC_REPLICAS", "3")
    monkeypatch.setenv("FABRIC_RUN_DIR", str(tmp_path / "run"))
    return devices


def attach(*_, **__):
    raise Attached


def fit(**named):
    """Train until the job is joined; return the strategy's device."""
    trainer = Trainer(enable_checkpointing=False, **QUIET, **named)
    with pytest.raises(Attached):
        trainer.fit(Net(), DataLoader(DATA, batch_size=2))
    return str(trainer.strategy.root_device)


@pytest.mark.parametrize("strategy", [FabricStrategy, lambda: "fabric"], ids=["class", "name"])
@pytest.mark.parametrize(
    ("named", "device"),
    [
        ({}, "cuda:0"),
        ({"accelerator": "auto", "devices": 1}, "cuda:0"),
        ({"accelerator": "gpu", "devices": 1}, "cuda:0"),
        ({"accelerator": "gpu", "devices": [1]}, "cuda:1"),
        ({"accelerator": "cpu"}, "cpu"),
    ],
    ids=str,
)
def test_a_trainer_starts_on_the_device_of_its_accelerator(selected, strategy, named, device):
    assert fit(strategy=strategy(), **named) == device
    assert selected == ([device] if device != "cpu" else [])


def test_a_device_that_the_strategy_was_given_is_kept(selected):
    assert fit(strategy=FabricStrategy("cuda:1"), accelerator="gpu") == "cuda:1"
    assert selected == ["cuda:1"]


@pytest.mark.parametrize(("accelerator", "device"), [("auto", "cuda:0"), ("gpu", "cuda:0"), ("cpu", "cpu")])
def test_an_adopted_trainer_starts_on_the_device_of_its_accelerator(accelerator, device):
    found = []
    run_adopted(lambda: found.append(fit(accelerator=accelerator)))
    assert found == [device]


@pytest.mark.parametrize(
    "named", [{"accelerator": "cpu", "devices": 2}, {"devices": 3}, {"devices": [0, 1, 2]}], ids=str
)
def test_several_devices_for_one_replica_are_refused(monkeypatch, named):
    for module in (lightning_fabric.accelerators.cuda, pytorch_lightning.accelerators.cuda):
        monkeypatch.setattr(module, "num_cuda_devices", lambda: 4)
    trainer = Trainer(strategy=FabricStrategy(), enable_checkpointing=False, **QUIET, **named)
    with pytest.raises(ConfigError, match=r"refuses Trainer\(devices=\d\), because a replica is one process"):
        trainer.fit(Net(), DataLoader(DATA, batch_size=2))


@pytest.mark.parametrize(("device", "count"), [(None, 1), ("cuda:1", 0)])
def test_a_replica_that_takes_one_of_all_devices_says_so(caplog, device, count):
    fit(strategy=FabricStrategy(device))
    said = [x for x in caplog.messages if "alone, although the Trainer found 2 devices" in x]
    assert len(said) == count
