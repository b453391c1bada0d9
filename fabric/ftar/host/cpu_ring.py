"""The data plane for tensors in host memory: a ring of links that ends at once when it cannot go on.

Neighbours on one host, whose link is a unix socket, read each other's memory. Other neighbours exchange bytes
over TCP (see ``ring_links``).

One thread calls ``all_reduce``; the control thread installs links, aborts and retires. They share a table of
epochs under one lock, and the links of an epoch have locks of their own. An epoch that failed stays failed:
every later call for it raises the first cause, until the epoch is retired.
"""

import socket
from collections.abc import Callable
from operator import attrgetter

import torch

from fabric.errors import ConfigError
from fabric.ftar.chunk_headers import ExchangeSpec
from fabric.ftar.epochs import Bounds, EpochPlane
from fabric.ftar.host.exchange_buffers import StagingMemory, make_operands
from fabric.ftar.host.ring_exchange import ExchangeResources, HostExchange
from fabric.ftar.host.ring_links import RingLinks
from fabric.ftar.host.shm_segments import OwnSegments, PeerSegments
from fabric.ftar.host.shm_transport import MAX_REFERENCES, SUPPORTED
from fabric.ftar.plane import Ring
from fabric.ftar.reduce_ops import SUM, Reduction, check_tensors
from fabric.ftar.ring_schedule import ALIGNMENT, DTYPE_CODES, schedule, segment_bounds

# A piece costs about 0.1 ms besides its bytes, so smaller pieces are slower. Larger pieces gain nothing
# (benchmarks/notes/all-reduce.md).
CHUNK_BYTES = 8 * 1024 * 1024
# The widest type has eight bytes, so every cut falls between elements.
_CHUNK_UNIT_BYTES = ALIGNMENT * 8


class CpuRing(EpochPlane[RingLinks]):
    """DataPlane over links of shared memory and TCP: see ``plane``.

    ``exchange_s`` bounds the time without progress once all members have entered the exchange. ``entry_s``
    bounds the wait for late members, and must exceed the time limit of user code. ``chunk_bytes`` must be
    equal on all members. ``checksum`` covers every payload on TCP and not only the headers. ``shared_memory``
    asks for links of shared memory where possible. ``on_piece(step)`` is called after every arrived piece,
    for tests that act in mid-exchange.
    """

    def __init__(
        self,
        chunk_bytes: int = CHUNK_BYTES,
        exchange_s: float = 30.0,
        entry_s: float = 7200.0,
        checksum: bool = True,
        shared_memory: bool = True,
        on_piece: Callable[[int], None] = lambda _step: None,
    ) -> None:
        if chunk_bytes < _CHUNK_UNIT_BYTES or chunk_bytes > 2**30:
            raise ConfigError(
                f"chunks of {chunk_bytes} bytes are not possible: "
                f"choose between {_CHUNK_UNIT_BYTES} bytes and 1 GiB"
            )
        super().__init__(Bounds(entry_s, exchange_s))
        self._shared_memory = shared_memory and SUPPORTED
        self._chunk_bytes = chunk_bytes // _CHUNK_UNIT_BYTES * _CHUNK_UNIT_BYTES
        # Partial results of 16-bit elements travel as float32, twice as large.
        self._resources = ExchangeResources(
            torch.empty(2 * self._chunk_bytes, dtype=torch.uint8), checksum, on_piece
        )
        self._own = OwnSegments()
        self._others = PeerSegments()
        self._workspace = StagingMemory(self._own)

    kind = "host"

    @property
    def shares_memory(self) -> bool:
        """Whether links on one host should be of shared memory: see DataPlane."""
        return self._shared_memory

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate memory that neighbours read in place: see DataPlane. Raises ConfigError if none is
        left."""
        return self._own.allocate(nbytes).memory[:nbytes]

    def register(self, descriptor: int, memory: torch.Tensor) -> None:
        """Let neighbours read ``memory``, the start of ``descriptor``, in place: see DataPlane."""
        self._own.register(descriptor, memory)

    def unregister(self, memory: torch.Tensor) -> None:
        """Stop sharing ``memory`` that was allocated or registered; ignore other memory."""
        self._own.unregister(memory)

    def install(
        self,
        ring: Ring,
        next_socket: socket.socket | None,
        previous_socket: socket.socket | None,
    ) -> None:
        """Take the links of an epoch: see DataPlane.

        Raises IllegalTransition for an epoch that is installed already, or without its sockets.
        """
        self._epochs.add(RingLinks(ring, next_socket, previous_socket, self._own, self._others))

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
        """Reduce over the members of ``epoch``: see DataPlane, and ``ring_schedule`` for the order.

        Both are contiguous 1-D CPU tensors of one type in ``ring_schedule.DTYPE_CODES``, any length;
        anything else raises ConfigError before a byte is sent. Raises RoundAborted.
        """
        result = source if result is None else result
        check_tensors(source, result, reduction, retain_gradients, attrgetter("is_cpu"), "in host memory")
        with self._entered(epoch) as links:
            spec = ExchangeSpec(
                epoch,
                step,
                self._exchanges.number(epoch, step),
                links.ring.world,
                DTYPE_CODES[source.dtype],
                source.numel(),
                reduction.code,
                result_is_stable,
            )
            source, result = source.detach(), result.detach()
            if links.ring.world == 1:
                reduction.alone(source, result)
            elif source.numel():
                self._exchange(links, spec, source, result, reduction)

    def retire(self, before_epoch: int) -> None:
        """Close the links of older epochs: see DataPlane."""
        super().retire(before_epoch)
        self._others.retire(before_epoch)

    def close(self) -> None:
        """Abort and close everything; idempotent."""
        super().close()
        self._own.close()
        self._others.close()

    def _exchange(
        self,
        links: RingLinks,
        spec: ExchangeSpec,
        source: torch.Tensor,
        result: torch.Tensor,
        reduction: Reduction,
    ) -> None:
        ring = links.ring
        chunk_elements = self._chunk_bytes // source.element_size()
        plan = schedule(source.numel(), ring.world, ring.position, chunk_elements)
        by_reference = links.outbox is not None and links.inbox is not None
        readable = range(*segment_bounds(source.numel(), ring.world)[ring.position])
        if by_reference and ring.world > 2:
            readable = range(source.numel())
        partial = not by_reference or ring.world > MAX_REFERENCES + 1
        visible = None if links.outbox is None else lambda memory: self._own.find(memory) is not None
        operands = make_operands(
            source, result, reduction, readable, ring.world, partial, self._workspace, visible
        )
        HostExchange(links, operands, spec, plan, self._resources).run(self._bounds, self._waiting)
