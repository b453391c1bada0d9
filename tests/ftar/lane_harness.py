"""Ranks of replicas in one process, linked lane by lane."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from ring_harness import socket_ring

from fabric.ftar.host.cpu_ring import CpuRing
from fabric.ftar.lanes import FlatPlaces, LanePlane, RankLanes
from fabric.ftar.plane import Ring
from fabric.ftar.reduce_ops import Reduction
from fabric.protocol.rules.lanes import ReplicaLayout, TensorRegion, lanes_of


@dataclass
class Process:
    """One rank: its lanes, its plane, and its part of its replica's gradient."""

    replica: str
    rank: int
    layout: ReplicaLayout
    lanes: RankLanes
    plane: LanePlane
    late: Collection[str] = ()
    flat: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def places(self) -> FlatPlaces:
        return FlatPlaces(self.layout.ranks[self.rank], self.late)

    def fill(self, gradient: dict[str, torch.Tensor]) -> None:
        places = self.places
        self.flat = torch.zeros(places.nbytes, dtype=torch.uint8)
        for held in places.regions():
            whole = TensorRegion.whole(held.shape)
            part = gradient[held.name][held.region.within(whole)]
            places.view(self.flat, held.name, held.region).copy_(part)

    def reduce(self, epoch: int = 1, step: int = 0, exchange: str = "float32") -> None:
        sections = self.lanes.sections
        parts = [self.plane.memory(x) for x in sections]
        for section, part in zip(sections, parts, strict=True):
            self.lanes.gather(section, self.flat, part)
        for section, part in zip(sections, parts, strict=True):
            how = Reduction(exchange=exchange, coarse=section.coarse)
            self.plane.reduce_lane(section.lane, epoch, step, part, how)
            self.lanes.scatter(section, part, self.flat)

    def check(self, expected: dict[str, torch.Tensor]) -> None:
        places = self.places
        for held in places.regions():
            part = expected[held.name][held.region.within(TensorRegion.whole(held.shape))]
            assert torch.equal(places.view(self.flat, held.name, held.region), part), (self, held.name)


def start(
    layouts: dict[str, ReplicaLayout],
    links: str | Sequence[str] = "shm",
    epoch: int = 1,
    late: Collection[str] = (),
) -> list[Process]:
    """Every rank of these replicas, linked lane by lane; ``links``: of all lanes, or of each."""
    lanes, names = lanes_of(layouts), tuple(layouts)
    processes = [
        Process(
            replica,
            rank,
            layout,
            RankLanes(lanes, place, rank, layout.ranks[rank], late),
            LanePlane(CpuRing),
            late,
        )
        for place, (replica, layout) in enumerate(layouts.items())
        for rank in range(len(layout.ranks))
    ]
    for number, lane in enumerate(lanes):
        pairs = socket_ring(len(names), links if isinstance(links, str) else links[number])
        for place, replica in enumerate(names):
            holder = next(p for p in processes if (p.replica, p.rank) == (replica, lane.holders[place]))
            holder.plane.install_lane(number, Ring(epoch, place, names), *pairs[place])
    return processes
