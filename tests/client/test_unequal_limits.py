"""What ``attach`` refuses with FABRIC_UNEQUAL, and which entries of modules each rank counts."""

from types import SimpleNamespace

import pytest
import torch

from fabric.client.attach import _lanes, _ModuleEntries
from fabric.client.gradients.forward_buffers import ForwardBuffers, choose_buffers
from fabric.client.process.incarnation_lock import ProcessIdentity
from fabric.errors import ConfigError
from fabric.protocol.rules.layout_text import read_layout

ALONE = ProcessIdentity(1, ())


def test_a_communicator_of_nccl_is_refused():
    parameters = [("w", torch.nn.Parameter(torch.empty(2)))]
    settings, bare = SimpleNamespace(unequal=True, data_plane="nccl"), torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="nccl, which does not go with FABRIC_UNEQUAL: use auto or tcp"):
        _lanes(settings, ALONE, parameters, ForwardBuffers(bare, choose_buffers(bare, "average")))


def test_averaged_buffers_are_part_of_the_announced_layout():
    model = torch.nn.BatchNorm1d(3)
    averaged = ForwardBuffers(model, choose_buffers(model, "average"))
    settings = SimpleNamespace(unequal=True, data_plane="auto", replica="r0")
    lanes = _lanes(settings, ALONE, list(model.named_parameters()), averaged)
    assert lanes is not None
    (row,) = read_layout(lanes.text).ranks
    assert [(x.name, x.dtype, x.shape) for x in row] == [
        ("weight", "float32", (3,)),
        ("bias", "float32", (3,)),
        ("buffer:running_mean", "float32", (3,)),
        ("buffer:running_var", "float32", (3,)),
        ("buffer:num_batches_tracked", "float64", ()),
    ]
    assert averaged.rank_means is None


def test_the_lowest_rank_with_an_entry_counts_it():
    entries = _ModuleEntries([{"model": ["0.weight", "norm"]}, {"model": ["1.weight", "norm"], "ema": ["n"]}])
    assert entries.everywhere == {
        "model": frozenset({"0.weight", "1.weight", "norm"}),
        "ema": frozenset({"n"}),
    }
    assert entries.lowest(0) == {"model": {"0.weight": True, "norm": True}}
    assert entries.lowest(1) == {"model": {"1.weight": True, "norm": False}, "ema": {"n": True}}
