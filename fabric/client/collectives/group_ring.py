"""One ring of a group: sums, and bytes that every member gets, in the ring's own arithmetic.

Bytes travel as sums of integers to which all other members add zeros, so they arrive unchanged.
"""

import itertools

import torch

from fabric.client.control.collective_links import CollectiveGroup, LinkedRing
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.ftar.reduce_ops import SUM, Reduction

_WORD_BYTES = 4


class GroupRing:
    """The links of one attempt. One thread exchanges; any thread aborts."""

    def __init__(self, group: CollectiveGroup, links: LinkedRing, shares_memory: bool) -> None:
        self.group = group
        self.attempt = links.attempt
        self._plane = CpuRing(shared_memory=shares_memory)
        self._plane.install(group.ring, links.next, links.previous)
        self._numbers = itertools.count()  # all members count their exchanges alike

    def limit(self, seconds: float) -> None:
        """Let every later wait without progress end after this long."""
        self._plane.set_bounds(exchange_s=seconds, entry_s=seconds)

    def all_reduce(self, source: torch.Tensor, reduction: Reduction = SUM) -> torch.Tensor:
        """Return the reduction of ``source`` (1-D, on the CPU). Raises RoundAborted."""
        result = torch.empty_like(source)
        epoch = self.group.ring.epoch
        self._plane.all_reduce(epoch, next(self._numbers), source, result, reduction)
        return result

    def gather(self, own: bytes) -> list[bytes]:
        """Return the bytes of every member, in ring order; all give equally many. Raises RoundAborted."""
        ring = self.group.ring
        width = -(-len(own) // _WORD_BYTES) * _WORD_BYTES
        memory = torch.zeros(ring.world * width, dtype=torch.uint8, device="cpu")
        start = ring.position * width
        if own:
            memory[start : start + len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        gathered = self._sum(memory).numpy().tobytes()
        return [gathered[i * width : i * width + len(own)] for i in range(ring.world)]

    def broadcast(self, own: bytes | None, nbytes: int) -> bytes:
        """Return the ``nbytes`` bytes of the one member that gives them as ``own``. Raises RoundAborted."""
        memory = torch.zeros(-(-nbytes // _WORD_BYTES) * _WORD_BYTES, dtype=torch.uint8, device="cpu")
        if own:
            memory[:nbytes] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        return self._sum(memory).numpy()[:nbytes].tobytes()

    def _sum(self, memory: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(memory.view(torch.int32)).view(torch.uint8)

    def abort(self, why: str) -> None:
        """End the exchange that uses these links, and all later ones."""
        self._plane.abort(self.group.ring.epoch, why)

    def close(self) -> None:
        """Close the links; idempotent."""
        self._plane.close()
