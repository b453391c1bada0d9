"""What a data plane is: the one interface between the decisions about a round and the bytes of it.

A plane holds links for one or more epochs, made by somebody else outside of the step, and reduces one
flat buffer at a time over the ring of one epoch. It decides nothing: it ends a round in exactly one of two
ways, the sum in the buffer or RoundAborted, and after the latter the epoch's links are never used again.
"""

import socket
from dataclasses import dataclass
from typing import Protocol

import torch

from fabric.errors import IllegalTransition


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
    def waiting_for(self) -> str:
        """Name of the peer that the exchange waits for at this moment, or empty."""

    @property
    def waiting_s(self) -> dict[str, float]:
        """Seconds waited for each peer in the newest exchange."""

    def install(
        self,
        ring: Ring,
        next_socket: socket.socket | None,
        previous_socket: socket.socket | None,
    ) -> None:
        """Take the links of ``ring.epoch``, connected and authenticated; the plane owns them now.

        Several epochs may be installed at once. Sockets of an epoch that was already aborted or
        retired are closed. A ring of one needs none.
        """

    def all_reduce(self, epoch: int, step: int, buffer: torch.Tensor) -> None:
        """Sum ``buffer`` (1-D, contiguous) in place over the members, the same bits on all of them.

        Blocks. Raises RoundAborted (``about`` names the peer, where one is known); what is in the
        buffer is undefined then. Exchanges of one step must be called in the same order everywhere.
        """

    def abort(self, epoch: int, why: str, about: str = "") -> None:
        """End the epoch's exchange, now and for ever, from any thread; the first reason is kept.

        An epoch that is not installed yet is remembered.
        """

    def retire(self, before_epoch: int) -> None:
        """Close the links of epochs older than ``before_epoch``, aborting what still uses them."""

    def close(self) -> None:
        """Abort and close everything; idempotent."""
