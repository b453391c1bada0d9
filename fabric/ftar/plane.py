"""The interface of a data plane, between the decisions about a round and its bytes.

A plane holds the links of one or more epochs, which its owner dials outside of the step. It reduces one flat
buffer at a time over the ring of one epoch. It decides nothing: a round ends either with the reduction in the
result or with RoundAborted. After an abort the epoch's links are not used again.
"""

import socket
from dataclasses import dataclass
from typing import Protocol

import torch

from fabric.errors import IllegalTransition
from fabric.ftar.reduce_ops import SUM, Reduction


@dataclass(frozen=True, slots=True)
class Ring:
    """The members of an epoch in ring order: each sends to the next name, the last to the first."""

    epoch: int
    position: int  # this member's index in ``names``
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
        """The member to send to; this one in a ring of one."""
        return self.names[(self.position + 1) % self.world]

    @property
    def previous(self) -> str:
        """The member to receive from; this one in a ring of one."""
        return self.names[self.position - 1]


class DataPlane(Protocol):
    """Sums over the members of an epoch. One thread reduces; any thread installs, aborts, retires."""

    @property
    def kind(self) -> str:
        """The kind that all members of a job must have in common: ``host``, ``device`` or ``nccl``."""

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
        """Change the bounds of later exchanges, from any thread. Raises ConfigError.

        ``exchange_s`` bounds the silence of an exchange once all members are in it, ``entry_s`` how late
        they may enter.
        """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate ``nbytes`` (1-D uint8) that this plane reduces without a copy, until ``unregister``.

        Other memory can be reduced too. Raises ConfigError where none is left.
        """

    def register(self, descriptor: int, memory: torch.Tensor) -> None:
        """Let the plane reduce ``memory`` (1-D uint8) without a copy, as if allocated here.

        It is mapped from the start of the memfd ``descriptor``, which is sealed against shrinking. A plane
        that has no use for it does nothing.
        """

    def unregister(self, memory: torch.Tensor) -> None:
        """Give up ``memory`` that was allocated or registered, between exchanges; other memory is ignored."""

    def install(
        self,
        ring: Ring,
        next_socket: socket.socket | None,
        previous_socket: socket.socket | None,
    ) -> None:
        """Take the links of ``ring.epoch``, connected and authenticated; the plane owns them now.

        A unix socket says that the member at its other end is on this host and may share memory. Several
        epochs may be installed at once. Sockets of an aborted or retired epoch are closed. A ring of one
        needs none.
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

        ``source`` survives in any case, for a retry. Only with ``retain_gradients=False`` may ``result`` be
        ``source`` itself (None means that), and ``source`` is lost then.

        Blocks. After the return no member reads ``source`` or ``result``. With ``result_is_stable`` others
        may still read ``result``; the caller must not write there until the next exchange has returned, or
        the epoch was aborted or retired. All members must pass the same. All must call the exchanges of one
        step in the same order.

        Raises RoundAborted (``about`` names the peer, where one is known), and ``result`` is undefined then.
        Raises ConfigError, before a byte is sent, for tensors that cannot be reduced.
        """

    def abort(self, epoch: int, why: str, about: str = "") -> None:
        """End the epoch's exchange for good, from any thread; the first reason is kept.

        The abort of an epoch that is not installed yet is remembered.
        """

    def retire(self, before_epoch: int) -> None:
        """Close the links of epochs older than ``before_epoch``; abort an exchange that still uses them."""

    def close(self) -> None:
        """Abort and close everything; idempotent."""
