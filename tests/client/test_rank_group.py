"""What the ranks of a replica tell each other, and which gradients they refuse, over a real world of gloo."""

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fabric.client.process.rank_group import RankGradients, RankGroup
from fabric.errors import ConfigError

SIZE = 3


def answers(rows):
    return [{"sum": sum(x["value"] for x in rows), "own": "x" * x["value"]} for x in rows]


def refuse(rows):
    raise ConfigError(f"{len(rows)} ranks do not agree")


def model(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))


def trained_by(way: str, number: int) -> torch.nn.Module:
    trained = model(seed=number if "stages" in way else 1)  # the stages of a pipeline have other parameters
    if "ddp" in way:
        trained = DistributedDataParallel(trained)
    elif way.startswith("fsdp2"):
        shape, names = ((SIZE, 1), ("replicate", "shard")) if "hsdp" in way else ((SIZE,), ("shard",))
        fully_shard(trained, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    elif way.startswith("fsdp1"):
        trained = FullyShardedDataParallel(trained, device_id=torch.device("cpu"))
    return trained


def refused(way: str, number: int) -> str:
    """Train two steps of one micro-batch at this rank; return the refusal."""
    trained = trained_by(way, number)
    gradients = RankGradients(trained, RankGroup(number, SIZE), way != "wanted")
    if "exchange" not in way:  # such a loop deals out its samples itself
        gradients.begin(0 if way == "stages" else number, 1 if way == "stages" else SIZE)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    if way == "fsdp2 waits":
        trained.set_requires_gradient_sync(False)
    elif way == "fsdp2 hsdp waits":
        trained.set_requires_all_reduce(False)
    elif way == "ddp waits by attribute":
        trained.require_backward_grad_sync = False
    try:
        for step in range(2):
            loss = trained(torch.full((3, 4), 1.0 + number + step)).square().mean()
            if way in ("ddp waits", "fsdp1 waits"):
                with trained.no_sync():
                    gradients.look()
                    loss.backward()
            else:
                gradients.look()
                loss.backward()
            gradients.check()
            gradients.compare()
            for p in list(trained.parameters())[: 2 if way == "experts" else None]:
                if way in ("by hand", "experts"):  # the others are of an expert of this rank alone
                    dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
    except ConfigError as error:
        return str(error)
    return ""


def training_rank(number: int, store: Path, results, ways: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=SIZE)
    results.put((number, {way: refused(way, number) for way in ways}))
    dist.barrier()
    dist.destroy_process_group()


def rank(number: int, store: Path, results) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=SIZE)
    group, told = RankGroup(number, SIZE), {}
    told["gathered"] = group.gather({"name": "ä" * number})
    told["answered"] = group.ask({"value": number * 50}, answers)
    try:
        group.ask({"value": number}, refuse)
    except ConfigError as error:
        told["refused"] = str(error)
    for seeds in ([5, 5, 5], [7, 8, 7]):
        torch.manual_seed(seeds[number])
        told[str(seeds)] = RankGroup.find().draws
    results.put((number, told))
    dist.destroy_process_group()


def told_by_ranks(target, store: Path, *arguments) -> dict:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=target, args=(n, store, results, *arguments)) for n in range(SIZE)]
    for process in ranks:
        process.start()
    told = dict(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(60)
    return told


def test_rank_0_answers_each_rank_and_its_refusal_is_that_of_all(tmp_path):
    told = told_by_ranks(rank, tmp_path / "store")
    for number in range(SIZE):
        assert told[number]["gathered"] == [{"name": ""}, {"name": "ä"}, {"name": "ää"}]
        assert told[number]["answered"] == {"sum": 150, "own": "x" * number * 50}
        assert told[number]["refused"] == "3 ranks do not agree"
        assert told[number]["[5, 5, 5]"] == 0
        assert told[number]["[7, 8, 7]"] == (0, 1, 0)[number]


def test_gradients_that_stay_at_one_rank_and_models_that_part_are_refused(tmp_path):
    waiting = ["fsdp2 waits", "fsdp2 hsdp waits", "fsdp1 waits", "ddp waits", "ddp waits by attribute"]
    kept = ["fsdp2", "fsdp2 hsdp", "fsdp1", "ddp", "by hand", "experts", "stages", "wanted"]
    kept += ["exchange, ddp", "exchange, stages"]
    alone = ["alone", "exchange, alone"]
    told = told_by_ranks(training_rank, tmp_path / "store", [*waiting, *kept, *alone])
    for number in range(SIZE):
        for way in waiting:
            assert "a backward pass has left its gradient at one rank" in told[number][way], way
        assert {way: told[number][way] for way in kept} == dict.fromkeys(kept, "")
        for way in alone:
            assert f"rank {number} trains a model of its own" in told[number][way], way


@pytest.mark.parametrize("group", [None, RankGroup(0, 2)])
def test_a_model_without_a_wrapper_has_nothing_that_waits(group):
    gradients = RankGradients(model(), group)
    gradients.look()
    gradients.check()
