"""One ring per lane: the data plane of a rank in a job whose replicas have unequal layouts.

A rank is in several rings at once, but reduces one lane after the other, in the order of their numbers. All
ranks keep this order, so no two ranks wait for each other. The rings are of one kind, on the host or on a
device.
"""

import socket
import threading
from collections.abc import Callable

import torch

from fabric.errors import IllegalTransition
from fabric.ftar.lanes.epoch_lanes import LaneSection
from fabric.ftar.plane import DataPlane, Ring
from fabric.ftar.reduce_ops import SUM, Reduction


class LanePlane:
    """DataPlane whose exchanges name their lane: ``install_lane`` and ``reduce_lane``.

    ``registers``: the rings need to know the memory to which results are copied, as on a device.
    """

    def __init__(self, make_ring: Callable[[], DataPlane], registers: bool = False) -> None:
        self._make_ring = make_ring
        self._lock = threading.Lock()
        self._rings: dict[int, DataPlane] = {}
        self._bounds: dict[str, float] = {}
        self._aborted: dict[int, tuple[str, str]] = {}  # epoch -> reason, for lanes linked later
        self._retired_before = 0
        self._waiting_s: dict[str, float] = {}
        self._sending_s: dict[str, float] = {}
        self._memory: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}  # (lane, type, group) -> memory
        self._registers = registers
        self.shares_memory = self._ring(0).shares_memory
        self.kind = self._ring(0).kind

    def _ring(self, lane: int) -> DataPlane:
        with self._lock:
            ring = self._rings.get(lane)
            if ring is None:
                ring = self._rings[lane] = self._make_ring()
                ring.set_bounds(**self._bounds)
                ring.retire(self._retired_before)
                for epoch, cause in self._aborted.items():
                    ring.abort(epoch, *cause)
            return ring

    def _all(self) -> list[DataPlane]:
        with self._lock:
            return list(self._rings.values())

    @property
    def waiting_for(self) -> str:
        """Name of the peer that the exchange waits for at this moment, or empty."""
        return next((ring.waiting_for for ring in self._all() if ring.waiting_for), "")

    @property
    def waiting_s(self) -> dict[str, float]:
        """Seconds waited for each peer in the newest exchange."""
        return dict(self._waiting_s)

    @property
    def sending_s(self) -> dict[str, float]:
        """Seconds for which bytes to each peer were under way: see DataPlane."""
        return dict(self._sending_s)

    def set_bounds(self, exchange_s: float | None = None, entry_s: float | None = None) -> None:
        """Change the bounds of all lanes: see DataPlane."""
        given = {"exchange_s": exchange_s, "entry_s": entry_s}
        self._bounds.update({name: value for name, value in given.items() if value is not None})
        for ring in self._all():
            ring.set_bounds(exchange_s, entry_s)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return ordinary memory, because pieces are copied to their lanes anyway."""
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")

    def register(self, descriptor: int, memory: torch.Tensor) -> None:
        """Register ``memory`` where results are copied to it. Neighbours read lanes, not flat gradients."""
        if self._registers:
            self._ring(0).register(descriptor, memory)

    def unregister(self, memory: torch.Tensor) -> None:
        """See ``register``."""
        if self._registers:
            self._ring(0).unregister(memory)

    def install(
        self, ring: Ring, next_socket: socket.socket | None, previous_socket: socket.socket | None
    ) -> None:
        """Raise IllegalTransition: here every link belongs to a lane, see ``install_lane``."""
        raise IllegalTransition(f"epoch {ring.epoch} has lanes: name the lane of every link")

    def install_lane(
        self,
        lane: int,
        ring: Ring,
        next_socket: socket.socket | None,
        previous_socket: socket.socket | None,
    ) -> None:
        """Take the links of one lane: see ``DataPlane.install``."""
        self._ring(lane).install(ring, next_socket, previous_socket)

    def memory(self, section: LaneSection) -> torch.Tensor:
        """Return memory for a section's pieces, which the lane's neighbours on this host can read."""
        key = section.lane, section.dtype, section.group
        ring, size = self._ring(section.lane), section.size
        memory = self._memory.get(key)
        if memory is None or memory.numel() < size:
            if memory is not None:
                ring.unregister(memory.view(torch.uint8))
            nbytes = size * section.dtype.itemsize
            memory = self._memory[key] = ring.allocate(nbytes).view(section.dtype)
        return memory[:size]

    def reduce_lane(self, lane: int, epoch: int, step: int, part: torch.Tensor) -> None:
        """Sum ``part`` over the lane's ranks, in place: see ``DataPlane.all_reduce``."""
        ring = self._ring(lane)
        ring.all_reduce(epoch, step, part, retain_gradients=False)
        self._waiting_s, self._sending_s = ring.waiting_s, ring.sending_s

    def all_reduce(
        self,
        epoch: int,
        step: int,
        source: torch.Tensor,
        result: torch.Tensor | None = None,
        reduction: Reduction = SUM,
        retain_gradients: bool = True,
        result_is_stable: bool = False,
    ) -> None:
        """Raise IllegalTransition: here every exchange belongs to a lane, see ``reduce_lane``."""
        raise IllegalTransition(f"epoch {epoch} has lanes: reduce one of them")

    def abort(self, epoch: int, why: str, about: str = "") -> None:
        """End the epoch's exchange in every lane: see DataPlane."""
        with self._lock:
            if epoch >= self._retired_before:
                self._aborted.setdefault(epoch, (why, about))
        for ring in self._all():
            ring.abort(epoch, why, about)

    def retire(self, before_epoch: int) -> None:
        """Close the links of older epochs: see DataPlane."""
        with self._lock:
            self._retired_before = max(self._retired_before, before_epoch)
            self._aborted = {e: cause for e, cause in self._aborted.items() if e >= self._retired_before}
        for ring in self._all():
            ring.retire(before_epoch)

    def close(self) -> None:
        """Abort and close everything; idempotent."""
        for ring in self._all():
            ring.close()
