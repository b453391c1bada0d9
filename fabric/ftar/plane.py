"""The interface of a data plane, through which the control of a round moves the round's bytes.

A plane holds the links of one or more epochs, which its owner dials outside of the step. It reduces one flat
buffer at a time over the ring of one epoch. It decides nothing: a round ends either with the reduction in the
result or with RoundAborted. After an abort the epoch's links are not used again.
"""

import socket
from collections.abc import Sequence
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
        """The member to which this member sends; in a ring of one, this member."""
        return self.names[(self.position + 1) % self.world]

    @property
    def previous(self) -> str:
        """The member from which this member receives; in a ring of one, this member."""
        return self.names[self.position - 1]


# A longer note is not carried.
MOST_NOTE_BYTES = 2048


class RingNotes:
    """The notes that the members of a round give to each other along the ring, one of each member.

    A member's note goes in front of the first piece of the result that this member sends after ``put``, and
    goes on with that piece. Only links over TCP carry notes. Any thread puts, the thread that reduces does
    the rest.
    """

    def __init__(self) -> None:
        self._own: tuple[int, int, bytes] = (-1, -1, b"")
        self._round = (-1, -1)
        self._carried: dict[int, bytes] = {}

    def put(self, epoch: int, step: int, note: bytes) -> None:
        """Let the exchanges of this round carry ``note``."""
        if len(note) <= MOST_NOTE_BYTES:
            self._own = epoch, step, note

    def take(self, epoch: int, step: int, position: int) -> bytes:
        """Return the own note of this round, once, for the piece that leaves now. Empty: there is none."""
        *of_round, note = self._own
        if not note or of_round != [epoch, step]:
            return b""
        self._own = (-1, -1, b"")
        self.arrived(epoch, step, position, note)
        return note

    def arrived(self, epoch: int, step: int, position: int, note: bytes) -> None:
        """Keep the note of the member at ``position``."""
        if self._round != (epoch, step):
            self._round, self._carried = (epoch, step), {}
        self._carried[position] = note

    def carried(self, epoch: int, step: int) -> dict[int, bytes]:
        """Return the notes by position that this round's exchanges have carried, with the own one."""
        return self._carried if self._round == (epoch, step) else {}


class DataPlane(Protocol):
    """Sums over the members of an epoch. One thread reduces; any thread installs, aborts, retires."""

    notes: RingNotes

    @property
    def kind(self) -> str:
        """The kind of plane, equal on all members of a job: ``host``, ``device`` or ``nccl``."""

    @property
    def shares_memory(self) -> bool:
        """Whether links between members on one host should come as unix sockets."""

    @property
    def connections(self) -> int:
        """How many connections a link over TCP to the next member should have."""

    @property
    def waiting_for(self) -> str:
        """Name of the peer for which the exchange waits now, or empty."""

    @property
    def waiting_s(self) -> dict[str, float]:
        """Seconds waited for each peer in the newest exchange."""

    @property
    def sending_s(self) -> dict[str, float]:
        """Seconds for which bytes to each peer were under way, from the exchange before to the newest.

        Only links over TCP have such a time.
        """

    def set_bounds(self, exchange_s: float | None = None, entry_s: float | None = None) -> None:
        """Change the bounds of later exchanges, from any thread. Raises ConfigError.

        ``exchange_s`` bounds the time without progress once all members have entered an exchange. ``entry_s``
        bounds the wait for late members.
        """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate ``nbytes`` (1-D uint8) that this plane reduces without a copy, until ``unregister``.

        Other memory can be reduced too, with a copy. Raises ConfigError where no memory is left.
        """

    def register(self, descriptor: int, memory: torch.Tensor) -> None:
        """Let the plane reduce ``memory`` (1-D uint8) without a copy, as if allocated here.

        ``memory`` maps the start of the memfd ``descriptor``, which is sealed against shrinking. A plane that
        cannot use shared memory does nothing.
        """

    def unregister(self, memory: torch.Tensor) -> None:
        """Release allocated or registered ``memory``, between exchanges. Other memory is ignored."""

    def install(
        self,
        ring: Ring,
        next_socket: socket.socket | None,
        previous_socket: socket.socket | None,
        further_next: Sequence[socket.socket] = (),
        further_previous: Sequence[socket.socket] = (),
    ) -> None:
        """Take the links of ``ring.epoch``, connected and authenticated; the plane owns them now.

        ``further_next`` and ``further_previous`` are the links' connections after the first ones, in order.

        A unix socket means that the member at its other end is on this host and may share memory. Several
        epochs may be installed at once. If the epoch is aborted or retired already, its sockets are closed. A
        ring of one needs no sockets.
        """

    def all_reduce(
        self,
        epoch: int,
        step: int,
        source: torch.Tensor | Sequence[torch.Tensor],
        result: torch.Tensor | None = None,
        reduction: Reduction = SUM,
        result_is_stable: bool = False,
    ) -> None:
        """Reduce ``source`` (1-D, contiguous) over the members into ``result``, the same bits on all of them.

        ``source`` may be ``result`` (None means that), which overwrites it; else it keeps its content, for a
        retry. As a sequence it has the tensors in which the elements lie, one after the other. Links over TCP
        read them there.

        Blocks. After the return no member reads ``source`` or ``result``. But with ``result_is_stable`` other
        members may still read ``result``: the caller must not write there until the next exchange has
        returned, or the epoch was aborted or retired. All members must pass equal values of it, and call the
        exchanges of a step in the same order.

        Raises RoundAborted (``about`` names the peer, where one is known), and ``result`` is undefined then.
        Raises ConfigError, before a byte is sent, for tensors that cannot be reduced.
        """

    def abort(self, epoch: int, why: str, about: str = "") -> None:
        """End the epoch's exchange for good, from any thread; the first reason is kept.

        An epoch that is not installed yet is aborted when it is installed.
        """

    def retire(self, before_epoch: int) -> None:
        """Close the links of epochs older than ``before_epoch``; abort an exchange that still uses them."""

    def close(self) -> None:
        """Abort and close everything; idempotent."""
