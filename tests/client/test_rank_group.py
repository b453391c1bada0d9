"""What the ranks of a replica tell each other at the start, over a real world of gloo."""

import multiprocessing
from pathlib import Path

import torch.distributed as dist

from fabric.client.process.rank_group import RankGroup
from fabric.errors import ConfigError

SIZE = 3


def answers(rows):
    return [{"sum": sum(x["value"] for x in rows), "own": "x" * x["value"]} for x in rows]


def refuse(rows):
    raise ConfigError(f"{len(rows)} ranks do not agree")


def rank(number: int, store: Path, results) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=SIZE)
    group, told = RankGroup(number, SIZE), {}
    told["gathered"] = group.gather({"name": "ä" * number})
    told["answered"] = group.ask({"value": number * 50}, answers)
    try:
        group.ask({"value": number}, refuse)
    except ConfigError as error:
        told["refused"] = str(error)
    results.put((number, told))
    dist.destroy_process_group()


def test_rank_0_answers_each_rank_and_its_refusal_is_that_of_all(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=rank, args=(n, tmp_path / "store", results)) for n in range(SIZE)]
    for process in ranks:
        process.start()
    told = dict(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(60)
    for number in range(SIZE):
        assert told[number]["gathered"] == [{"name": ""}, {"name": "ä"}, {"name": "ää"}]
        assert told[number]["answered"] == {"sum": 150, "own": "x" * number * 50}
        assert told[number]["refused"] == "3 ranks do not agree"
