"""What ``attach`` refuses with FABRIC_UNEQUAL and FABRIC_EXCHANGE; which entries each rank counts."""

from types import SimpleNamespace

import pytest
import torch

from fabric.client.attach import _exact, _lanes, _ModuleEntries
from fabric.client.gradients.forward_buffers import ForwardBuffers, choose_buffers
from fabric.client.process.incarnation_lock import ProcessIdentity
from fabric.errors import ConfigError
from fabric.ftar.lanes import FlatPlaces, LaneDirectory
from fabric.protocol.rules.layout_text import read_layout

ALONE = ProcessIdentity(1, ())


def test_a_communicator_of_nccl_is_refused():
    parameters = [("w", torch.nn.Parameter(torch.empty(2)))]
    settings, bare = SimpleNamespace(unequal=True, data_plane="nccl"), torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="nccl, which does not go with FABRIC_UNEQUAL: use auto or tcp"):
        _lanes(settings, ALONE, parameters, ForwardBuffers(bare, choose_buffers(bare, "average")))


class _Ranks:
    """Rank 0 of a replica whose other ranks have said ``others``."""

    def __init__(self, *others: dict) -> None:
        self.others = others

    def ask(self, value: dict, answer) -> dict:
        return answer([value, *self.others])[0]


PAIR = [("shared", torch.nn.Parameter(torch.empty(2))), ("own", torch.nn.Parameter(torch.empty(3)))]
CARRIED = [("buffer:mean", torch.nn.Parameter(torch.empty(1)))]


def exact_of(exchange: str, *others: dict) -> set[str]:
    process = SimpleNamespace(group=_Ranks(*others) if others else None)
    return set(_exact(SimpleNamespace(exchange=exchange), process, PAIR, CARRIED))


def parts_of(*parameters: tuple[str, torch.nn.Parameter]) -> list[str]:
    told: list[dict] = []
    group = SimpleNamespace(ask=lambda value, _: told.append(value) or {"copies": []})
    _exact(SimpleNamespace(exchange="int8"), SimpleNamespace(group=group), list(parameters), [])
    return told[0]["parts"]


def test_what_travels_with_gradients_and_what_other_ranks_hold_too_stays_exact():
    assert exact_of("float32") == set()
    assert exact_of("int8") == {"buffer:mean"}
    assert exact_of("float32", {"exchange": "float32", "parts": []}) == set()
    assert exact_of("int8", {"exchange": "int8", "parts": parts_of(PAIR[0])}) == {"buffer:mean", "shared"}
    other = ("own", torch.nn.Parameter(torch.empty(4)))
    assert exact_of("int8", {"exchange": "int8", "parts": parts_of(other)}) == {"buffer:mean"}


def test_fewer_bytes_are_refused_where_ranks_differ_or_hold_the_same_parameters():
    with pytest.raises(
        ConfigError, match="FABRIC_EXCHANGE is int8 at rank 1 and float32 at rank 0: set it eq"
    ):
        exact_of("float32", {"exchange": "int8", "parts": []})
    with pytest.raises(
        ConfigError, match="FABRIC_EXCHANGE is bfloat16, and other ranks of this replica hold all"
    ):
        exact_of("bfloat16", {"exchange": "bfloat16", "parts": parts_of(*PAIR)})


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


def test_a_rank_without_the_buffers_knows_the_places_of_those_of_other_ranks():
    """A pipeline stage reads gradients of other stages, and lays out its own."""
    settings = SimpleNamespace(unequal=True, data_plane="auto", replica="r0")
    told: list[dict] = []
    layouts: list[LaneDirectory] = []
    stages = [torch.nn.Sequential(torch.nn.BatchNorm1d(3)), torch.nn.Linear(3, 2)]
    for gather in (lambda value: told.append(value) or [value], lambda _: told):
        layouts.clear()
        for rank, stage in enumerate(stages):
            averaged = ForwardBuffers(stage, choose_buffers(stage, "average"))
            process = SimpleNamespace(group=SimpleNamespace(gather=gather), rank=rank)
            layouts.append(_lanes(settings, process, list(stage.named_parameters()), averaged))
    first, second = layouts
    assert (
        first.late
        == second.late
        == {f"buffer:0.{x}" for x in ("running_mean", "running_var", "num_batches_tracked")}
        and first.text == second.text
    )
    assert first.model_name == second.model_name
    own, other = (FlatPlaces(first.layout.ranks[0], x.late) for x in layouts)
    assert own.presence_begins == other.presence_begins


def test_the_lowest_rank_with_an_entry_counts_it():
    entries = _ModuleEntries([{"model": ["0.weight", "norm"]}, {"model": ["1.weight", "norm"], "ema": ["n"]}])
    assert entries.everywhere == {
        "model": frozenset({"0.weight", "1.weight", "norm"}),
        "ema": frozenset({"n"}),
    }
    assert entries.lowest(0) == {"model": {"0.weight": True, "norm": True}}
    assert entries.lowest(1) == {"model": {"1.weight": True, "norm": False}, "ema": {"n": True}}
