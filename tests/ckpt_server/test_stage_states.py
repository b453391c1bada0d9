"""States of pipeline stages: one digest in every split, and each rank takes its entries from any split."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from fabric.ckpt_server.durable.dcp import write_metadata, write_rank_shard
from fabric.ckpt_server.durable.storage import Storage
from fabric.ckpt_server.reshard import Layout, LayoutChanged, Misfit, RankFile, reshard
from fabric.ckpt_server.state.content_digest import ContentDigests
from fabric.ckpt_server.state.training_state import StateDescriber, host_bytes, restore, verify
from fabric.errors import ProtocolError, StateError
from fabric.model import SnapshotRef
from fabric.protocol.messages.rank_messages import summed_digest

STEP = 4
SPLITS = [(4,), (2, 2), (3, 1), (1, 2, 1)]


def layers(seed: int) -> list[tuple[str, torch.nn.Module]]:
    torch.manual_seed(seed)
    whole = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4), torch.nn.LayerNorm(4)
    )
    return list(whole.named_children())


def stages(
    split: tuple[int, ...], seed: int = 1, trained: bool = True, lr: float = 0.1
) -> list[dict[str, Any]]:
    """The shared state of each rank; gradients do not depend on the split."""
    ranks, children = [], iter(layers(seed))
    for count in split:
        model = torch.nn.Sequential(OrderedDict(next(children) for _ in range(count)))
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=lr)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, len(name) + parameter.numel())
        if trained:
            optimizer.step()
        ranks.append({"model": model, "optimizer": optimizer})
    return ranks


def file_of(objects: dict[str, Any], step: int = STEP) -> memoryview:
    view = StateDescriber(objects, by_name=True).capture(step)
    return memoryview(bytearray(view.header + b"".join(bytes(host_bytes(t)) for _, t in view.tensors)))


def entries_of(ranks: list[dict[str, Any]]) -> list[set[str]]:
    return [set(objects["model"].state_dict()) for objects in ranks]


def digest_of(ranks: list[dict[str, Any]]) -> str:
    digests = []
    for rank, objects in enumerate(ranks):
        lower = set().union(*entries_of(ranks[:rank]))
        own = {entry: entry not in lower for entry in objects["model"].state_dict()}
        content = ContentDigests(rank, {}, {"model": own}, frozenset({"optimizer"}))
        digests.append(content.of_file(file_of(objects)))
    return summed_digest(digests)


class Held(RankFile):
    """A file in memory."""

    def __init__(self, rank: int, ranks: int, file: memoryview) -> None:
        super().__init__(rank)
        self.file = file
        self.manifest = {"ranks": [""] * ranks, "block_bytes": 4 << 20, "nbytes": len(file), "blocks": [""]}

    def _read(self, blocks: object) -> None:
        """All blocks are there."""

    def let_go(self) -> None:
        """The test keeps the file."""


def take_over(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
    """Every rank of ``new`` loads its part of the state of ``old``."""
    everywhere = frozenset(set().union(*entries_of(new)))
    for rank, objects in enumerate(new):
        memory: list[torch.Tensor] = []

        def allocate(nbytes: int, memory: list[torch.Tensor] = memory) -> memoryview:
            memory.append(torch.zeros(nbytes + 64, dtype=torch.uint8))
            shift = -memory[0].data_ptr() % 64
            return memory[0][shift : shift + nbytes].numpy().data

        parts = [Held(k, len(old), file_of(x)) for k, x in enumerate(old)]
        layout = Layout(objects, {"model": everywhere})
        manifest = reshard(parts, SnapshotRef(1, STEP, ""), layout, allocate, rank=rank)
        shift = -memory[0].data_ptr() % 64
        restore(memory[0][shift : shift + manifest["nbytes"]].numpy().data, objects)
        verify(objects, STEP, manifest["digest"], by_name=True)


def test_parts_of_different_layouts_are_not_joined():
    parts = [Held(k, 2, file_of(x)) for k, x in enumerate(stages((2, 2)))]
    parts[0].manifest["ranks"] = ["", "replaced"]
    layout = Layout(stages((4,))[0], {})
    with pytest.raises(LayoutChanged, match=f"step {STEP} are of different layouts"):
        reshard(
            parts, SnapshotRef(1, STEP, ""), layout, lambda _: pytest.fail("memory was allocated"), rank=0
        )


@pytest.mark.parametrize("split", SPLITS[1:], ids=str)
def test_a_state_has_one_digest_in_every_split(split):
    assert digest_of(stages(split)) == digest_of(stages((4,)))


@pytest.mark.parametrize("change", ["an element", "an option", "a parameter's group", "a step"])
def test_the_digest_shows_every_difference(change):
    before, ranks = digest_of(stages((2, 2))), stages((2, 2), lr=0.2 if change == "an option" else 0.1)
    if change == "an element":
        ranks[1]["model"].state_dict()["2.weight"][0, 0] += 1
    elif change == "a parameter's group":
        first, second = ranks[1]["optimizer"].param_groups
        second["params"].insert(0, first["params"].pop())
    elif change == "a step":
        ranks[0]["optimizer"].state[next(ranks[0]["model"].parameters())]["step"] += 1
    assert digest_of(ranks) != before


def test_ranks_with_other_options_have_no_digest():
    ranks = stages((2, 2))
    ranks[1]["optimizer"].param_groups[0]["lr"] = 0.3
    with pytest.raises(ProtocolError, match="describe their state differently"):
        digest_of(ranks)


@pytest.mark.parametrize("old", SPLITS, ids=str)
@pytest.mark.parametrize("new", SPLITS, ids=str)
def test_each_stage_takes_its_entries_from_any_split(old, new):
    source, target = stages(old), stages(new, seed=2, trained=False)
    before = digest_of(source)
    assert digest_of(target) != before
    take_over(source, target)
    assert digest_of(target) == before


def test_a_file_fits_only_the_rank_that_would_have_written_it():
    halves, other = stages((2, 2)), stages((3, 1))
    everywhere = {"model": frozenset(set().union(*entries_of(halves)))}
    headers = [Held(0, 2, file_of(x)).header() for x in halves]
    assert Layout(halves[0], everywhere).fits(headers[0]) and Layout(halves[1], everywhere).fits(headers[1])
    assert not Layout(other[0], everywhere).fits(headers[0])
    assert not Layout(other[1], everywhere).fits(headers[1])


def test_the_state_of_another_model_is_refused_by_its_entry():
    short, whole = stages((1, 2)), stages((2, 2))
    with pytest.raises(Misfit, match=r"model has the entry '3.bias' here and not in the snapshot"):
        take_over(short, whole)
    with pytest.raises(Misfit, match=r"model has '3.bias' in the snapshot and not here"):
        take_over(whole, short)


def test_a_state_by_names_goes_into_an_optimizer_by_order():
    (source,), (target,) = stages((4,)), stages((4,), seed=2, trained=False)
    restore(file_of(source), target)
    assert digest_of([target]) == digest_of([source])
    with pytest.raises(StateError):
        restore(file_of(stages((2, 2))[0]), target)


def test_torch_reads_a_durable_checkpoint_by_the_names_of_the_parameters(tmp_path):
    storage, (source,), (target,) = Storage(str(tmp_path)), stages((4,)), stages((4,), seed=2)
    write_metadata(storage, [write_rank_shard(storage, file_of(source), {"step": STEP}, 0, lambda: None)])
    model, optimizer = target["model"], target["optimizer"]
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=str(tmp_path))
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert digest_of([target]) == digest_of([source])
