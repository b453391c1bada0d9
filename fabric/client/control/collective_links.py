"""The ring links of collectives between replicas, made when the first collective needs them.

They are separate from the links of an epoch, so a collective that fails never harms a round. A group is a
set of processes, and its number fences it. When a ring of the group has failed, its members make the next
attempt: each one dials its next member again, and all agree on the highest attempt that they have seen.
"""

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fabric.client.control.peers import Peers, ProcessKey
from fabric.errors import FabricError, Unreachable
from fabric.ftar.plane import Ring
from fabric.model import Member, Record
from fabric.transport.greeting import Greeting

# Links that no ring has taken yet. Each process has one previous member in a group.
_MAX_ARRIVALS = 64


@dataclass(frozen=True)
class CollectiveGroup:
    """The members that take part in a collective, in ring order."""

    record: Record  # the newest record that this process knows; the group may be smaller than its roster
    members: tuple[Member, ...]
    replica: str  # this process's replica, one of the members

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The replicas' names, in ring order."""
        return tuple(x.replica for x in self.members)

    @cached_property
    def ring(self) -> Ring:
        """The ring; a generation has one epoch number on these links."""
        return Ring(self.record.cold, self.names.index(self.replica), self.names)

    @cached_property
    def number(self) -> int:
        """A positive number of 63 bits, equal where the generation and the processes are equal."""
        processes = [(x.replica, x.incarnation) for x in self.members]
        words = repr((self.record.store_id, self.record.cold, processes)).encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest()) >> 1

    @property
    def next(self) -> Member:
        """The member to which this process sends."""
        return self.members[(self.ring.position + 1) % len(self.members)]

    @property
    def previous(self) -> ProcessKey:
        """The process from which this process receives."""
        member = self.members[self.ring.position - 1]
        return ProcessKey(member.replica, member.incarnation)


class LinkedRing(NamedTuple):
    """The two links of this process in one attempt."""

    attempt: int
    next: socket.socket
    previous: socket.socket


class _Dialler(NamedTuple):
    """A process that has dialled, and the number of the group for which it has."""

    process: ProcessKey
    number: int


class _LinkArrival(NamedTuple):
    attempt: int
    sock: socket.socket


class CollectiveLinks:
    """Makes the links of one group at a time; lives on the control thread's loop."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        # Links of several groups may arrive in any order, while the members change.
        self._arrivals: dict[_Dialler, _LinkArrival] = {}
        self._changed = asyncio.Event()
        self._on_arrival: Callable[[], None] = lambda: None
        peers.on_collective = self._arrived

    def watch(self, on_record: Callable[[Record], None], on_arrival: Callable[[], None]) -> None:
        """Set what the control thread calls for each epoch that is announced or in force, and each link."""
        self._peers.on_record, self._on_arrival = on_record, on_arrival

    @property
    def shares_memory(self) -> bool:
        """Whether links between members on one host come as unix sockets."""
        return self._peers.shares_memory

    def arrived(self, group: CollectiveGroup) -> int:
        """Return the attempt at which the previous member of ``group`` has dialled, else -1; any thread."""
        arrival = self._arrivals.get(_Dialler(group.previous, group.number))
        return arrival.attempt if arrival is not None else -1

    async def link(self, group: CollectiveGroup, attempt: int) -> LinkedRing:
        """Dial the next member and wait for the previous one, until both use one attempt.

        ``attempt``: the lowest one that this process may use. Waits until it is cancelled.
        """
        dial: asyncio.Task[socket.socket] | None = None
        dialled = -1
        try:
            while True:
                attempt = max(attempt, self.arrived(group))
                if dialled != attempt:
                    _drop(dial)
                    dial, dialled = asyncio.create_task(self._dial(group, attempt)), attempt
                    dial.add_done_callback(lambda _: self._changed.set())
                self._changed.clear()
                assert dial is not None
                if dial.done() and self.arrived(group) == attempt:
                    following = dial.result()
                    arrival = self._arrivals.pop(_Dialler(group.previous, group.number))
                    return LinkedRing(attempt, following, arrival.sock)
                await self._changed.wait()
        except BaseException:
            _drop(dial)
            raise

    async def _dial(self, group: CollectiveGroup, attempt: int) -> socket.socket:
        while True:
            try:
                return await self._peers.dial_collective(group.record, group.next, group.number, attempt)
            except Unreachable:
                continue  # the peer may be dead: then an epoch without it ends this wait

    def _arrived(self, greeting: Greeting, sock: socket.socket) -> None:
        dialler = _Dialler(ProcessKey(greeting.replica, greeting.incarnation), greeting.lane)
        before = self._arrivals.get(dialler)
        if before is not None and before.attempt > greeting.epoch:
            sock.close()  # the dialler has begun a newer attempt already
            return
        if before is not None:
            self._arrivals.pop(dialler).sock.close()
        self._arrivals[dialler] = _LinkArrival(greeting.epoch, sock)
        if len(self._arrivals) > _MAX_ARRIVALS:
            self._arrivals.pop(next(iter(self._arrivals))).sock.close()  # of members that went long ago
        self._changed.set()
        self._on_arrival()

    def close(self) -> None:
        """Close the links that no ring has taken."""
        for arrival in self._arrivals.values():
            arrival.sock.close()
        self._arrivals.clear()


def _drop(dial: "asyncio.Task[socket.socket] | None") -> None:
    """End a dial, and close its link if it has one already."""
    if dial is None or dial.cancel() or dial.cancelled():
        return
    with contextlib.suppress(FabricError):
        dial.result().close()
