"""What a data plane is: the one interface between the decisions about a round and the bytes of it.

A plane holds links for one or more epochs, made by somebody else outside of the step, and reduces one
flat buffer at a time over the ring of one epoch. It decides nothing: it ends a round in exactly one of two
ways, the reduction in the result or RoundAborted, and after the latter the epoch's links are not used again.
"""

import socket
from dataclasses import dataclass
from typing import Protocol

import torch

from fabric.errors import IllegalTransition
from fabric.ftar.reduce_ops import SUM, Reduction


@dataclass(frozen=True, slots=True)
class Ring:
    """My place and everybody, in ring order: each sends to the next name, the last to the first."""

    epoch: int
    position: int
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.position < len(self.names) or len(set(self.names)) != len(self.names):
            raise IllegalTransition(
                f"position {self.position} in {self.names!r} is not a place in a ring of epoch "
                f"{self.epoch}: names must be distinct and the position one of theirs"
            )

    @property
    def world(self) -> int:
        return len(self.names)

    @property
    def next(self) -> str:
        """Whom I send to; myself in a ring of one."""
        return self.names[(self.position + 1) % self.world]

    @property
    def previous(self) -> str:
        """Whom I receive from; myself in a ring of one."""
        return self.names[self.position - 1]


class DataPlane(Protocol):
    """Sums over the members of an epoch. One thread reduces; any thread installs, aborts, retires."""

    @property
    def kind(self) -> str:
        """What all members of a job must have in common: ``host``, ``device`` or ``nccl``."""

    @property
    def shares_memory(self) -> bool:
        """Whether links between members on one host should come as unix sockets."""

    @property
    def waiting_for(self) -> str:
        """Name of the peer that the exchange waits for at this moment, or empty."""

    @property
    def waiting_s(self) -> dict[str, float]:
        """Seconds waited for each peer in the newest exchange."""

    def set_bounds(self, exchange_s: float | None = None, entry_s: float | None = None) -> None:
        """Change how long an exchange may be silent once all are in it, and how long members may be late for
        it; from any thread, for exchanges that begin later. Raises ConfigError."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` bytes (1-D uint8) of memory of the kind that this plane reduces without a copy, until
        ``unregister``. Other memory can be reduced too. Raises ConfigError where there is none left."""

    def register(self, descriptor: int, memory: torch.Tensor) -> None:
        """Make ``memory`` (1-D uint8), which is mapped from the start of the memfd ``descriptor`` (sealed
        against shrinking), as good as allocated here; a plane that has no use for it does nothing."""

    def unregister(self, memory: torch.Tensor) -> None:
        """Give up ``memory`` that was allocated or shown, between exchanges; other memory is ignored."""

    def install(
        self,
        ring: Ring,
        next_socket: socket.socket | None,
        previous_socket: socket.socket | None,
    ) -> None:
        """Take the links of ``ring.epoch``, connected and authenticated; the plane owns them now.

        A unix socket says that the member at its other end is on this host and may share memory. Several
        epochs may be installed at once. Sockets of an epoch that was already aborted or
        retired are closed. A ring of one needs none.
        """

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
        """Reduce ``source`` (1-D, contiguous) over the members into ``result``, the same bits on all of them.

        ``source`` survives, whatever happens: it is what a retry needs. Only with ``retain_gradients=False``
        may ``result`` be ``source`` itself (which is what None means), and ``source`` is lost then.

        Blocks. When it returns nobody else reads either, or, with ``result_is_stable``, others may still read
        ``result``: then nobody may write there before the next exchange has returned or the epoch was aborted
        or retired. All members must say the same. Raises RoundAborted (``about`` names the peer, where
        one is known); what is in ``result`` is undefined then. Exchanges of one step must be called in the
        same order everywhere. Raises ConfigError for tensors that cannot be reduced; nothing was sent then.
        """

    def abort(self, epoch: int, why: str, about: str = "") -> None:
        """End the epoch's exchange, now and for ever, from any thread; the first reason is kept.

        An epoch that is not installed yet is remembered.
        """

    def retire(self, before_epoch: int) -> None:
        """Close the links of epochs older than ``before_epoch``, aborting what still uses them."""

    def close(self) -> None:
        """Abort and close everything; idempotent."""
