"""The exchange thread: kept gradient into a slot, around the ring, digest; one round at a time."""

import time
from collections.abc import Callable

import torch
import xxhash

from fabric.client.slots import GradientSlots
from fabric.client.worker import Worker
from fabric.errors import RoundAborted
from fabric.ftar.buckets import FlatGradients
from fabric.ftar.plane import DataPlane
from fabric.protocol import member_io as io
from fabric.runtime.points import Points


class Exchange:
    """Performs StartExchange; posts Exchanged or ExchangeFailed."""

    def __init__(
        self,
        plane: DataPlane,
        gradients: FlatGradients,
        slots: GradientSlots,
        points: Points,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._plane = plane
        self._gradients = gradients
        self._slots = slots
        self._points = points
        self._worker = Worker("fabric-exchange", on_crash)
        self.seconds = 0.0
        self.waiting_s: dict[str, float] = {}

    def start(self, order: io.StartExchange, post: Callable[[io.Event], None]) -> None:
        """Queue one round."""
        self._worker.submit(lambda: self._run(order, post))

    def _run(self, order: io.StartExchange, post: Callable[[io.Event], None]) -> None:
        epoch, step = order.fence.epoch, order.step
        started = time.monotonic()
        self._points.reach("before-ring", step)
        try:
            buffer = self._slots.for_round(step).buffer
            if order.weight > 0:
                self._gradients.gather(buffer)
            else:
                buffer.zero_()
            self._reduce(epoch, step, buffer)
        except RoundAborted as error:
            post(io.ExchangeFailed(epoch, step, error.about, str(error)))
            return
        finally:
            self.seconds += time.monotonic() - started
        digest = xxhash.xxh3_128_hexdigest(buffer.numpy().data)
        post(io.Exchanged(epoch, step, digest))

    def _reduce(self, epoch: int, step: int, buffer: torch.Tensor) -> None:
        for lane in self._gradients.lanes(buffer):
            self._plane.all_reduce(epoch, step, lane)
            for peer, seconds in self._plane.waiting_s.items():
                self.waiting_s[peer] = self.waiting_s.get(peer, 0.0) + seconds

    def close(self) -> None:
        self._worker.close(within_s=1.0)
