"""Averaged buffers of unequal layouts: means within a replica, then lanes between replicas."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from ftar.gathering import gather
from ftar.lane_harness import Process, start
from ring_harness import WAIT_S

from fabric.client.gradients.forward_buffers import ForwardBuffers, RankMeans, choose_buffers
from fabric.ftar.buckets import FlatGradients
from fabric.ftar.lanes import held_parameters
from fabric.protocol.rules.lanes import HeldParameter, ReplicaLayout, TensorRegion

ROWS = 4


class Ranks:
    """The sum over the ranks of a replica, which run as threads of this process."""

    def __init__(self, size: int) -> None:
        self._arrived = threading.Barrier(size)
        self._values: list[torch.Tensor] = []

    def add(self, values: torch.Tensor) -> None:
        self._values.append(values.clone())
        self._arrived.wait(WAIT_S)
        total = torch.stack(self._values).sum(0)
        if self._arrived.wait(WAIT_S) == 0:
            self._values = []
        self._arrived.wait(WAIT_S)
        values.copy_(total)


@dataclass
class Rank:
    """A rank with ``rows`` of a weight and with the whole of a normalisation layer's buffers."""

    rows: tuple[int, int]
    scale: float
    model: torch.nn.Module = field(default_factory=lambda: torch.nn.BatchNorm1d(3, affine=False))

    def __post_init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(self.rows[1], 2))
        self.averaged = ForwardBuffers(self.model, choose_buffers(self.model, "average"))
        self.averaged.begin()
        self.late = [name for name, _ in self.averaged.stand_ins]
        self.gradients = FlatGradients([("weight", self.weight), *self.averaged.stand_ins], late=self.late)
        self.gradients.scale = self.scale

    def row(self) -> tuple[HeldParameter, ...]:
        region = TensorRegion((self.rows[0], 0), (self.rows[1], 2))
        return HeldParameter("weight", "float32", (ROWS, 2), region), *held_parameters(
            self.averaged.stand_ins
        )

    def step(self, process: Process, batch: torch.Tensor, weight: float, total_weight: float) -> None:
        """``weight``: the replica's weight, as the mean over its ranks."""
        self.model(batch)
        self.weight.grad = torch.full_like(self.weight, weight)
        self.averaged.contribute(float(len(batch)), self.scale)
        process.flat = torch.zeros(self.gradients.nbytes, dtype=torch.uint8)
        gather(self.gradients, process.flat)
        process.reduce()
        self.gradients.scatter(process.flat, total_weight)
        self.averaged.commit(total_weight)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}


def whole_replica() -> list[Rank]:
    return [Rank((0, ROWS), 1.0)]


def cut_replica() -> list[Rank]:
    """Two ranks with one part of each micro-batch each, whose mean gradient counts twice."""
    return [Rank((0, 1), 2.0), Rank((1, ROWS - 1), 2.0)]


def average(replicas: Mapping[str, list[Rank]], batches: Mapping[str, list[torch.Tensor]]) -> None:
    """One step: each rank computes its batch, and all commit."""
    layouts = {name: ReplicaLayout(tuple(rank.row() for rank in ranks)) for name, ranks in replicas.items()}
    for name, ranks in replicas.items():
        group = Ranks(len(ranks))
        for rank in ranks if len(ranks) > 1 else ():
            rank.averaged.rank_means = RankMeans.of(group, layouts[name])
    processes = start(layouts, late=next(iter(replicas.values()))[0].late)
    samples = {name: sum(map(len, parts)) for name, parts in batches.items()}
    means = {name: samples[name] / len(parts) for name, parts in batches.items()}
    total = float(sum(samples.values()))
    with ThreadPoolExecutor(len(processes)) as pool:
        works = []
        for process in processes:
            name, rank = process.replica, process.rank
            ordered = replicas[name][rank].step, process, batches[name][rank], means[name], total
            works.append(pool.submit(*ordered))
        for work in works:
            work.result(WAIT_S)
    for process in processes:
        process.plane.close()


def statistics_after(batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """The buffers of a layer that has seen this batch alone."""
    (rank,) = whole_replica()
    rank.model(batch)
    return rank.state()


@pytest.mark.parametrize("whole_first", [True, False])
def test_all_ranks_get_the_average_over_all_samples(whole_first):
    generator = torch.Generator().manual_seed(3)
    batches = {
        "r0": [torch.randn(6, 3, generator=generator)],
        "r1": [torch.randn(4, 3, generator=generator), torch.randn(2, 3, generator=generator)],
    }
    replicas = {"r0": whole_replica(), "r1": cut_replica()}
    if not whole_first:
        replicas = dict(reversed(replicas.items()))
    average(replicas, batches)
    first, *others = [rank.state() for ranks in replicas.values() for rank in ranks]
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)
    seen = [(statistics_after(batch), len(batch)) for parts in batches.values() for batch in parts]
    for name in ("running_mean", "running_var"):
        expected = sum(statistics[name] * weight for statistics, weight in seen) / 12
        assert torch.allclose(first[name], expected, atol=1e-6), name
    # Two replicas have computed a micro-batch each. A replica counts its micro-batch once, not once per rank.
    assert first["num_batches_tracked"] == 2
    assert all((rank.weight.grad == 1.0).all() for ranks in replicas.values() for rank in ranks)


def test_equal_layouts_get_the_average_too():
    batches = {"r0": [torch.full((2, 3), 1.0), torch.full((2, 3), 3.0)], "r1": [torch.full((2, 3), 8.0)] * 2}
    replicas = {"r0": cut_replica(), "r1": cut_replica()}
    average(replicas, batches)
    for rank in (rank for ranks in replicas.values() for rank in ranks):
        assert torch.allclose(
            rank.model.running_mean, torch.full((3,), 0.5)
        )  # a tenth of the mean of 1, 3, 8, 8
        assert rank.model.num_batches_tracked == 2


def test_a_pipeline_stage_without_the_buffer_does_not_count():
    group, model = Ranks(2), torch.nn.BatchNorm1d(2)
    averaged = ForwardBuffers(model, choose_buffers(model, "average"))
    averaged.begin()
    stage = torch.nn.Linear(1, 1)
    bare = ForwardBuffers(stage, choose_buffers(stage, "average"))
    layout = ReplicaLayout((held_parameters(averaged.stand_ins), ()))
    averaged.rank_means = bare.rank_means = RankMeans.of(group, layout)
    model(torch.randn(4, 2))
    with ThreadPoolExecutor(2) as pool:
        for work in [pool.submit(x.contribute, 4.0) for x in (averaged, bare)]:
            work.result(WAIT_S)
    gradients = {name: stand_in.grad for name, stand_in in averaged.stand_ins}
    assert torch.equal(gradients["buffer:running_mean"], model.running_mean * 4.0)
    assert gradients["buffer:num_batches_tracked"] == 1


def test_without_such_buffers_ranks_take_no_means():
    parameters = held_parameters([("weight", torch.zeros(2))])
    assert RankMeans.of(Ranks(1), ReplicaLayout((parameters,))) is None
