"""The exchange threads of replicas of unequal layouts, in one process: on the host, or each on a device."""

import queue
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from ftar.lane_layouts import MODEL, member
from ftar.ring_harness import WAIT_S, socket_ring

from fabric.client.gradients.bucket_stream import BucketReadiness
from fabric.client.gradients.exchange_thread import ExchangeThread
from fabric.client.gradients.gradient_backend import choose_backend, device_backend
from fabric.client.gradients.gradient_slots import GradientSlot
from fabric.ftar.buckets import FlatGradients
from fabric.ftar.device.cuda import CudaDevice
from fabric.ftar.lanes import LaneDirectory, dtype_of
from fabric.ftar.plane import Ring
from fabric.model import Base, Fence, Record
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.rank_messages import summed_digest
from fabric.protocol.rules.lanes import ReplicaLayout, TensorRegion
from fabric.protocol.rules.layout_text import layout_text
from fabric.runtime.config import settings
from fabric.runtime.failpoints import Failpoints

Gradient = Mapping[str, torch.Tensor]


def crash(error: BaseException) -> None:
    raise error


class LaneRank:
    """One rank: its parts of the model's parameters in ``memory``, and its exchange thread.

    ``device``: the device whose ring it uses, None for the host's ring.
    """

    def __init__(
        self,
        replica: str,
        rank: int,
        layout: ReplicaLayout,
        links: str,
        device: CudaDevice | None,
        memory: str,
        late: Collection[str] = (),
    ) -> None:
        self.replica, self.rank, self.layout, self.device = replica, rank, layout, device
        self.lanes = LaneDirectory(replica, rank, layout, layout_text(layout), frozenset(late))
        self.parameters = {
            held.name: torch.nn.Parameter(torch.zeros(held.region.sizes, dtype=dtype_of(held), device=memory))
            for held in layout.ranks[rank]
        }
        self.gradients = FlatGradients(self.parameters.items(), late=late)
        chosen = settings(
            {},
            job="j",
            replica=replica,
            lighthouse=("http://127.0.0.1:1",),
            data_plane="tcp" if links == "tcp" else "auto",
        )
        more = self.gradients, lambda step: None, self.lanes
        if device is None:
            self.plane, self.backend = choose_backend(chosen, *more)
        else:
            self.plane, self.backend = device_backend(device, chosen, *more)
        self.slot = GradientSlot(0, torch.zeros(self.gradients.nbytes, dtype=torch.uint8))
        self.plane.register(-1, self.slot.buffer)
        slots = SimpleNamespace(for_round=lambda epoch, step: self.slot)
        self.exchange = ExchangeThread(
            self.plane, self.gradients, slots, Failpoints(""), crash, self.backend, check_finite=True
        )
        self.exchange.lanes = self.lanes
        self.events: queue.SimpleQueue[io.Event] = queue.SimpleQueue()

    def fill(self, gradient: Gradient, only: Collection[str] = tuple(MODEL)) -> None:
        for held in self.layout.ranks[self.rank]:
            if held.name not in gradient:
                continue
            part = gradient[held.name][held.region.within(TensorRegion.whole(held.shape))]
            parameter = self.parameters[held.name]
            parameter.grad = part.to(parameter.device).clone()
        for name in set(only) - gradient.keys():
            self.parameters[name].grad = None
        self.backend.mark_ready()

    def start(
        self, epoch: int, step: int, weight: float = 1.0, stream: BucketReadiness | None = None
    ) -> None:
        self.exchange.start(io.StartExchange(Fence("s", 1, epoch), step, weight), stream, self.events.put)

    def scattered(self, weight: float) -> dict[str, torch.Tensor | None]:
        """The averaged gradient at this rank, in host memory."""
        self.backend.scatter(self.gradients, self.slot.buffer, weight)
        if self.device is not None:
            self.device.compute().record().wait()
        return {name: p.grad if p.grad is None else p.grad.cpu() for name, p in self.parameters.items()}

    def close(self) -> None:
        self.exchange.close()
        self.slot.settle()
        self.plane.unregister(self.slot.buffer)
        self.plane.close()


@dataclass
class LaneJob:
    """All ranks of replicas with these layouts. ``make_device`` makes the device of one rank."""

    layouts: Mapping[str, ReplicaLayout]
    links: str = "tcp"
    make_device: Callable[[], CudaDevice] | None = None
    memory: str = "cpu"
    late: Collection[str] = ()

    def __post_init__(self) -> None:
        device = self.make_device
        self.ranks = [
            LaneRank(name, k, layout, self.links, device and device(), self.memory, self.late)
            for name, layout in self.layouts.items()
            for k in range(len(layout.ranks))
        ]

    def __enter__(self) -> "LaneJob":
        return self

    def __exit__(self, *_error: object) -> None:
        for rank in self.ranks:
            rank.close()
        for rank in self.ranks:
            if rank.device is not None:
                rank.device.close()

    def install(self, epoch: int) -> None:
        roster = tuple(member(name, layout) for name, layout in self.layouts.items())
        record = Record("s", 1, 1, epoch, epoch, "", roster, Base(1, 0))
        for rank in self.ranks:
            rank.lanes.enter(record)
        lanes = self.ranks[0].lanes.get(epoch).rank_lanes.lanes
        names = tuple(self.layouts)
        for number, lane in enumerate(lanes):
            pairs = socket_ring(len(names), self.links)
            for place, name in enumerate(names):
                (holder,) = (r for r in self.ranks if (r.replica, r.rank) == (name, lane.holders[place]))
                holder.plane.install_lane(number, Ring(epoch, place, names), *pairs[place])

    def reduce(self, epoch: int, step: int, gradients: Mapping[str, Gradient]) -> set[str]:
        """Exchange one gradient per replica; return the digests of the round."""
        for rank in self.ranks:
            rank.fill(gradients[rank.replica])
        for rank in self.ranks:
            rank.start(epoch, step)
        by_replica: dict[str, list[str]] = {}
        for rank in self.ranks:
            event = rank.events.get(timeout=WAIT_S)
            assert isinstance(event, io.Exchanged), event
            by_replica.setdefault(rank.replica, []).append(event.gradient_digest)
        return {summed_digest(digests) for digests in by_replica.values()}

    def check(self, gradients: Mapping[str, Gradient]) -> None:
        """Check each rank's slot, the slot's digest, and the average in each ``.grad``."""
        held_by = {name: [g[name] for g in gradients.values() if name in g] for name in MODEL}
        expected = {name: sum(parts) if parts else None for name, parts in held_by.items()}
        for rank in self.ranks:
            rank.slot.settle()
            assert rank.slot.bytes_digest == rank.backend.digest_of(rank.slot.buffer.numpy().data)
            averages = rank.scattered(2.0)
            for held in rank.layout.ranks[rank.rank]:
                total, average = expected[held.name], averages[held.name]
                if total is None or average is None:
                    assert total is average, (rank.replica, rank.rank, held.name)
                    continue
                part = total[held.region.within(TensorRegion.whole(held.shape))]
                assert torch.equal(average, part / 2), (rank.replica, rank.rank, held.name)
