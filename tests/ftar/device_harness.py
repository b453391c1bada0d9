"""Device rings for tests: one device and plane per member, in one process."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from ftar.simulated_device import SimulatedDevice
from ring_harness import WAIT_S, Pairs, names, socket_ring, sockets_of

from fabric.ftar.device.device_ring import DeviceRing
from fabric.ftar.plane import Ring
from fabric.ftar.reduce_ops import SUM, Reduction

FORMS = {
    "shared memory": {"shares": True},
    "tcp": {"shares": False},
    "2 connections": {"shares": False, "connections": 2},
    "4 connections": {"shares": False, "connections": 4},
}
SMALL = {"chunk_bytes": 256, "slots": 3, "group": 2}


class DeviceMembers:
    """``world`` planes on devices of their own; ``options`` are DeviceRing's."""

    def __init__(self, world: int, who: Sequence[int] | None = None, **options) -> None:
        self.world = world
        self.connections = options.get("connections", 1)
        self.who = list(range(world) if who is None else who)
        self.devices = {i: SimulatedDevice() for i in self.who}
        self.planes = {i: DeviceRing(self.devices[i], **{**SMALL, **options}) for i in self.who}
        self._threads = ThreadPoolExecutor(max_workers=len(self.who))

    def __enter__(self) -> "DeviceMembers":
        return self

    def __exit__(self, *_error: object) -> None:
        for plane in self.planes.values():
            plane.close()
        self._threads.shutdown()
        for device in self.devices.values():
            device.close()

    def install(self, epoch: int, pairs: Pairs | None = None) -> None:
        pairs = pairs or socket_ring(self.world, "shm", self.connections)
        for i in self.who:
            links = pairs[i] if self.world > 1 else (None, None)
            self.planes[i].install(Ring(epoch, i, names(self.world)), *links)
        if self.world == 1:
            for sock in sockets_of(pairs[0]):
                sock.close()

    def submit(self, i: int, epoch: int, step: int, source: torch.Tensor, *rest) -> Future:
        return self._threads.submit(self.planes[i].all_reduce, epoch, step, source, *rest)

    def reduce(
        self, epoch: int, step: int, inputs: Sequence[torch.Tensor], reduction: Reduction = SUM
    ) -> dict[int, torch.Tensor]:
        """Reduce and return the results; check that the inputs are unchanged."""
        before = [x.clone() for x in inputs]
        results = {i: torch.zeros_like(inputs[i]) for i in self.who}
        futures = [self.submit(i, epoch, step, inputs[i], results[i], reduction) for i in self.who]
        for future in futures:
            future.result(WAIT_S)
        for device in self.devices.values():
            device.compute().record().wait()
        for one, two in zip(before, inputs, strict=True):
            assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))
        return results
