"""What ``attach`` refuses with FABRIC_UNEQUAL, and which entries of modules each rank counts."""

from types import SimpleNamespace

import pytest
import torch

from fabric.client.attach import _lanes, _ModuleEntries
from fabric.client.process.incarnation_lock import ProcessIdentity
from fabric.errors import ConfigError

ALONE = ProcessIdentity(1, ())


@pytest.mark.parametrize(
    ("plane", "stand_ins", "sentence"),
    [
        ("auto", ["a buffer"], "a replica with fewer ranks has fewer running statistics to average"),
        ("nccl", [], "FABRIC_UNEQUAL is for parameters on the CPU so far"),
    ],
)
def test_what_unequal_replicas_cannot_do_is_refused(plane, stand_ins, sentence):
    parameters = [("w", torch.nn.Parameter(torch.empty(2)))]
    settings, averaged = SimpleNamespace(unequal=True, data_plane=plane), SimpleNamespace(stand_ins=stand_ins)
    with pytest.raises(ConfigError, match=sentence):
        _lanes(settings, ALONE, parameters, averaged)


def test_the_lowest_rank_with_an_entry_counts_it():
    entries = _ModuleEntries([{"model": ["0.weight", "norm"]}, {"model": ["1.weight", "norm"], "ema": ["n"]}])
    assert entries.everywhere == {
        "model": frozenset({"0.weight", "1.weight", "norm"}),
        "ema": frozenset({"n"}),
    }
    assert entries.lowest(0) == {"model": {"0.weight": True, "norm": True}}
    assert entries.lowest(1) == {"model": {"1.weight": True, "norm": False}, "ema": {"n": True}}
