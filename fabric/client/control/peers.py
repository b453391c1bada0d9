"""Links to the other members: one ordered control link per process, ring sockets per epoch.

Control links outlive epochs, and their key is the peer's process. Of two members, the member whose id sorts
first dials. Ring sockets belong to one epoch: outside the step each member dials the next member in roster
order. An epoch is linked when its control links and ring sockets are connected. A member retries missing
links until a newer epoch comes. After ``link_s`` it reports them to the leader as failed.
"""

import asyncio
import contextlib
import hashlib
import math
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from fabric.client.control import link_echo
from fabric.errors import FabricError, ProtocolError, Unconnected, Unreachable
from fabric.ftar.lanes import LaneDirectory, LanePlane
from fabric.ftar.plane import DataPlane, Ring
from fabric.model import Member, Record
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import wire
from fabric.protocol.messages.network import LARGE_BYTES, CommitVote, Contribution, Finished, PeerMessage
from fabric.runtime.http import parse_ports
from fabric.runtime.http.token_file import TokenFile
from fabric.transport.greeting import Greeting
from fabric.transport.link import Link
from fabric.transport.tcp import CONNECT_S, Listener, ListenerIdentity, dial

_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)
_DIAL_S = 3.0
# The most links that peers have dialled before this process knows the links' epoch.
MOST_EARLY = 256
# Links to several peers often fail at about the same time: the member reports them together after this wait.
_TOGETHER_S = 0.1


class ProcessKey(NamedTuple):
    """One process of a member."""

    replica: str
    incarnation: int


class _RingArrival(NamedTuple):
    """The key of a ring link's connection that a peer has dialled and that its epoch has not taken yet."""

    epoch: int
    dialler: ProcessKey
    lane: int
    connection: int = 0


@dataclass(slots=True)
class _RingLink:
    """The two links of one ring while they are being made. An epoch with lanes has a ring for each lane."""

    lane: int
    next_member: Member
    previous: ProcessKey
    next_address: str
    next_rank: int = -1  # -1: the rank of this process
    next_sockets: list[socket.socket] = field(default_factory=list)
    previous_sockets: list[socket.socket] = field(default_factory=list)


class _RingConnection(NamedTuple):
    """A connection that a peer has dialled, and how many its link has."""

    sock: socket.socket
    connections: int


@dataclass(slots=True)
class _Linking:
    """The links of one epoch while they are being made."""

    record: Record
    rings: list[_RingLink] = field(default_factory=list)  # none in an epoch of one member
    task: "asyncio.Task[None] | None" = None
    done: bool = False
    unreachable: dict[str, str] = field(default_factory=dict)  # replica -> why there is no link to it
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Peers:
    """Owns the listener and every link of this process; lives on the control thread's loop.

    ``feed`` takes the member core's events.
    """

    def __init__(
        self,
        identity: ListenerIdentity,
        incarnation: int,
        token: TokenFile,
        plane: DataPlane,
        link_s: float,
        lanes: LaneDirectory | None = None,
    ) -> None:
        self._me = ProcessKey(identity.replica, incarnation)
        self.replica, self.incarnation = self._me  # the process that owns these links
        self._identity = identity
        self._token = token
        self._plane = plane
        self._link_s = link_s
        self._lanes = lanes  # the directory of lanes where replicas may have unequal layouts
        self._feed: Callable[[io.Event], None] = lambda _: None
        self._listener = Listener(identity, self._accepted, self._on_connection)
        self._links: dict[ProcessKey, Link] = {}
        self._ring_arrivals: dict[_RingArrival, _RingConnection] = {}
        self._epochs: dict[int, _Linking] = {}
        # Dial each peer once for all epochs that need the link: a second dial would replace the first link.
        self._dials: dict[ProcessKey, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._encoded: tuple[PeerMessage | None, bytes] = None, b""

    # Called with the links of this replica's other ranks. Set in a replica of several ranks.
    on_rank: Callable[[Greeting, socket.socket], None] = staticmethod(lambda _, sock: sock.close())
    # Called with the ring links of collectives between replicas.
    on_collective: Callable[[Greeting, socket.socket], None] = staticmethod(lambda _, sock: sock.close())
    # Called with an epoch that is linked, and the transport of this member's two ring links: shm or tcp.
    on_linked: Callable[[int, dict[str, str]], None] = staticmethod(lambda _epoch, _planes: None)
    # Called with the record of every epoch that is announced, or in force.
    on_record: Callable[[Record], None] = staticmethod(lambda _: None)

    def _accepted(self) -> Sequence[bytes]:
        return [token.encode() for token in self._token.accepted()] or [b""]

    @property
    def shares_memory(self) -> bool:
        """Whether links between members on one host come as unix sockets."""
        return self._plane.shares_memory

    @property
    def linked(self) -> list[str]:
        """Peers to which a control link is connected."""
        return sorted(replica for replica, _ in self._links)

    async def start(self, bind: str, ports: str, feed: Callable[[io.Event], None]) -> int:
        """Listen; returns the port."""
        self._feed = feed
        await self._listener.start(bind, parse_ports(ports), local=self._plane.shares_memory)
        return self._listener.address[1]

    async def close(self) -> None:
        """Say goodbye to all peers, then end every task."""
        links = list(self._links.values())
        await asyncio.gather(*(link.close(linger_s=1.0) for link in links), return_exceptions=True)
        bringing_up = [e.task for e in self._epochs.values() if e.task is not None]
        for task in (*self._tasks, *self._dials.values(), *bringing_up):
            task.cancel()
        await self._listener.close()
        for arrived in self._ring_arrivals.values():
            arrived.sock.close()

    def send(self, replica: str, incarnation: int, message: PeerMessage) -> None:
        """Queue a message; without a link it is dropped, and the core hears LinkLost."""
        link = self._links.get(ProcessKey(replica, incarnation))
        if link is not None:
            if message is not self._encoded[0]:  # encode once: most messages go to all peers
                self._encoded = message, wire.encode(message)
            link.send(self._encoded[1])

    # --- making an epoch's links ------------------------------------------------------------------

    def link_up(self, record: Record) -> None:
        """Make the missing links of ``record``; feeds Linked or LinkFailed."""
        self._identity.store_id = record.store_id
        self.on_record(record)
        if self._me.replica not in record.names:
            # This member was drained, so it is not in the epoch and has no links to make.
            asyncio.get_running_loop().call_soon(self._linked, record.epoch)
            return
        linking = self._epochs.get(record.epoch)
        if linking is None:
            linking = self._epochs[record.epoch] = _Linking(record, self._rings_of(record))
        if linking.task is None or linking.task.done():
            linking.task = asyncio.get_running_loop().create_task(self._bring_up(linking))

    def switch(self, record: Record) -> None:
        """Close the ring sockets of epochs older than ``record``, which is in force now."""
        self.on_record(record)
        for epoch in [e for e in self._epochs if e < record.epoch]:
            linking = self._epochs.pop(epoch)
            if linking.task is not None:
                linking.task.cancel()
            if not linking.done:
                for sock in (sock for ring in linking.rings for sock in ring.next_sockets):
                    sock.close()
        for key in [k for k in self._ring_arrivals if k.epoch < record.epoch]:
            self._ring_arrivals.pop(key).sock.close()
        self._plane.retire(record.epoch)
        if self._lanes is not None:
            self._lanes.retire(record.epoch)

    async def _bring_up(self, linking: _Linking) -> None:
        record = linking.record
        if not record.lists(*self._me):
            # This process leaves when the epoch begins: it makes no links, but peers wait for its answer.
            self._linked(record.epoch)
            return
        loop = asyncio.get_running_loop()
        # Only the rank 0 of a replica has control links.
        after_me = [x for x in record.roster if x.replica > self._me.replica and not self._identity.rank]
        to_dial = [x for x in after_me if (x.replica, x.incarnation) not in self._links]
        dials = [loop.create_task(self._dial_control(linking, x)) for x in to_dial]
        dials += [loop.create_task(self._dial_next(linking, ring)) for ring in linking.rings]
        try:
            async with asyncio.timeout(self._link_s):
                await asyncio.gather(*dials)
                while self._missing(linking):
                    linking.changed.clear()
                    await linking.changed.wait()
        except (TimeoutError, FabricError) as error:
            if isinstance(error, Unconnected):
                await asyncio.sleep(_TOGETHER_S)
            for task in dials:
                task.cancel()
            self._fail(linking, str(error))
            return
        self._install(linking)
        self._linked(record.epoch)

    def _linked(self, epoch: int) -> None:
        linking, planes = self._epochs.get(epoch), {}
        for ring in linking.rings[:1] if linking is not None else ():
            sides = {"next": ring.next_sockets, "previous": ring.previous_sockets}
            planes = {
                side: "shm" if x[0].family == socket.AF_UNIX else "tcp" for side, x in sides.items() if x
            }
        self.on_linked(epoch, planes)
        self._feed(io.Linked(epoch))

    def _fail(self, linking: _Linking, why: str) -> None:
        away = linking.unreachable
        missing = [*away, *(name for name in self._missing(linking) if name not in away)]
        why = next(iter(away.values()), "") or why
        why = why or f"no link to {', '.join(missing)} within {self._link_s:g} s"
        linking.task, linking.unreachable = None, {}
        about = missing[0] if missing else ""
        self._feed(io.LinkFailed(linking.record.epoch, about, why, tuple(away)))

    def _install(self, linking: _Linking) -> None:
        if linking.done:
            return
        linking.done = True
        record = linking.record
        position = record.names.index(self._me.replica)
        ring = Ring(record.epoch, position, record.names)
        for link in linking.rings:
            keys = self._arrived(_RingArrival(record.epoch, link.previous, link.lane))
            link.previous_sockets = [self._ring_arrivals.pop(x).sock for x in keys]
            self._install_ring(link, ring)
        if len(record.roster) == 1:
            numbers = [x.lane for x in self._lanes.enter(record).rings] if self._lanes is not None else [0]
            for lane in numbers:
                self._install_ring(_RingLink(lane, record.roster[0], self._me, ""), ring)

    def _install_ring(self, link: _RingLink, ring: Ring) -> None:
        first = next(iter(link.next_sockets), None), next(iter(link.previous_sockets), None)
        sockets = *first, link.next_sockets[1:], link.previous_sockets[1:]
        if isinstance(self._plane, LanePlane):
            self._plane.install_lane(link.lane, ring, *sockets)
        else:
            self._plane.install(ring, *sockets)

    def _arrived(self, first: _RingArrival) -> list[_RingArrival]:
        """Return the keys of all connections of a link that a peer has dialled, none before all are there."""
        arrived = self._ring_arrivals.get(first)
        if arrived is None:
            return []
        # A unix socket is alone: the dialler could not know that it would get one.
        count = 1 if arrived.sock.family == socket.AF_UNIX else arrived.connections
        keys = [first._replace(connection=number) for number in range(count)]
        return keys if all(key in self._ring_arrivals for key in keys) else []

    def _rings_of(self, record: Record) -> list[_RingLink]:
        """Return the rings of this rank in ``record``, still without sockets."""
        if len(record.roster) < 2 or not record.lists(*self._me):
            return []
        if self._lanes is None:
            member = record.roster[(record.names.index(self._me.replica) + 1) % len(record.roster)]
            return [_RingLink(0, member, self._previous(record), member.link)]
        return [
            _RingLink(
                x.lane,
                x.next_member,
                self._previous(record),
                x.next_member.addresses[x.next_rank].link,
                x.next_rank,
            )
            for x in self._lanes.enter(record).rings
        ]

    def _missing(self, linking: _Linking) -> list[str]:
        record = linking.record
        others = [
            ProcessKey(x.replica, x.incarnation) for x in record.roster if x.replica != self._me.replica
        ]
        missing = [] if self._identity.rank else [key.replica for key in others if key not in self._links]
        for ring in linking.rings if not linking.done else ():
            arrival = _RingArrival(record.epoch, ring.previous, ring.lane)
            if not self._arrived(arrival) and ring.previous.replica not in missing:
                missing.append(ring.previous.replica)
            if not ring.next_sockets and ring.next_member.replica not in missing:
                missing.append(ring.next_member.replica)
        return missing

    def _previous(self, record: Record) -> ProcessKey:
        member = record.roster[record.names.index(self._me.replica) - 1]
        return ProcessKey(member.replica, member.incarnation)

    async def _dial_control(self, linking: _Linking, member: Member) -> None:
        key = ProcessKey(member.replica, member.incarnation)
        task = self._dials.get(key)
        if task is None:
            task = self._dials[key] = asyncio.create_task(self._link_control(linking.record, member))

            def dialled(done: asyncio.Task[None]) -> None:
                self._dials.pop(key, None)
                if not done.cancelled():
                    done.exception()  # else asyncio logs an exception for which no epoch waits

            task.add_done_callback(dialled)
        # Shielded: when a newer epoch cancels this wait, the newer epoch may still need the link.
        with self._noted(linking, member):
            await asyncio.shield(task)

    @contextlib.contextmanager
    def _noted(self, linking: _Linking, member: Member) -> Iterator[None]:
        try:
            yield
        except Unconnected as error:
            linking.unreachable[member.replica] = str(error)
            raise

    async def _link_control(self, record: Record, member: Member) -> None:
        key = ProcessKey(member.replica, member.incarnation)
        sock = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._link_s):
                greeting = self._greeting(record.store_id, member, "control", record.epoch)
                sock = await self._dial(member.link, greeting, lambda: key in self._links)
        if sock is not None:
            self._adopt(key, sock)

    async def _dial_next(self, linking: _Linking, ring: _RingLink) -> None:
        record, member = linking.record, ring.next_member
        greeting = self._greeting(record.store_id, member, "data", record.epoch)
        count = self._plane.connections
        greeting = replace(greeting, lane=ring.lane, to_rank=ring.next_rank, connections=count)
        dialled = ring.next_sockets
        with self._noted(linking, member):
            # A unix socket is alone.
            while len(dialled) < count and not (dialled and dialled[0].family == socket.AF_UNIX):
                greeting = replace(greeting, connection=len(dialled))
                sock = await self._dial(ring.next_address, greeting, lambda: False)
                assert sock is not None
                dialled.append(sock)

    async def _dial(
        self, address: str, greeting: Greeting, is_up: Callable[[], bool]
    ) -> socket.socket | None:
        """Dial until connected or until ``is_up``; the caller's timeout bounds it. Raises Unconnected after
        CONNECT_S without a connection."""
        tries, since = 0, time.monotonic()
        while not is_up():
            try:
                token = self._token.shown().encode()
                local = self._plane.shares_memory and not greeting.connection
                return await dial(address, greeting, token, _DIAL_S, local)
            except FabricError as error:
                if not isinstance(error, Unconnected):
                    # The peer answered no: it may not know the epoch yet, or a new process may replace it.
                    since = math.inf
                elif time.monotonic() - since >= CONNECT_S:
                    raise
            await asyncio.sleep(_RETRY_S[min(tries, len(_RETRY_S) - 1)])
            tries += 1
        return None

    async def dial_collective(
        self, record: Record, member: Member, number: int, attempt: int
    ) -> socket.socket:
        """Dial a ring link of collectives to ``member``; ``number`` names the group. Raises Unconnected."""
        greeting = self._greeting(record.store_id, member, "collective", attempt)
        sock = await self._dial(member.link, replace(greeting, lane=number), lambda: False)
        assert sock is not None
        return sock

    async def dial_echo(self, replica: str) -> socket.socket:
        """Return a connection to a member of the newest epoch that the other end echoes.

        It takes the way of the ring's links. Raises FabricError after CONNECT_S, or where no such member is.
        """
        records = [self._epochs[epoch].record for epoch in sorted(self._epochs, reverse=True)]
        member = next((x for record in records if (x := record.member(replica)) is not None), None)
        if member is None:
            raise Unconnected(f"{replica} has left the job: nothing can be sent to it")
        greeting = self._greeting(self._identity.store_id, member, "echo")
        token = self._token.shown().encode()
        return await dial(member.link, greeting, token, link_echo.CONNECT_S, self._plane.shares_memory)

    def _greeting(self, store_id: str, member: Member, kind: str, epoch: int = 0) -> Greeting:
        return Greeting(
            job=self._identity.job,
            store_id=store_id,
            replica=self._me.replica,
            incarnation=self._me.incarnation,
            kind=kind,
            epoch=epoch,
            to=member.replica,
            rank=self._identity.rank,
        )

    # --- from outside the roster ------------------------------------------------------------------

    def probe(self, members: tuple[Member, ...]) -> None:
        """Find out which members this process can reach; feeds Probed."""

        async def work() -> None:
            others = [x for x in members if x.replica != self._me.replica]
            sizes = await asyncio.gather(*(self._lost_bytes(x) for x in others))
            lost = {x.replica: size for x, size in zip(others, sizes, strict=True) if size is not None}
            self._feed(io.Probed(tuple(lost), min(lost.values(), default=0)))

        self._spawn(work())

    async def _lost_bytes(self, member: Member) -> int | None:
        """Return the size of messages that get lost on the way to ``member`` or back; 0: of any size.

        None: all pass. A refusal counts: it shows that the network works both ways.
        """
        greeting = self._greeting(self._identity.store_id, member, "probe")
        try:
            token = self._token.shown().encode()
            with await dial(member.link, greeting, token, _DIAL_S, self._plane.shares_memory) as sock:
                return None if await link_echo.carries_large_messages(sock) else LARGE_BYTES
        except Unconnected:
            return 0
        except FabricError:
            return None

    # --- links that peers have dialled ------------------------------------------------------------

    def _on_connection(self, greeting: Greeting, sock: socket.socket) -> None:
        key = ProcessKey(greeting.replica, greeting.incarnation)
        match greeting.kind:
            case "rank":
                self.on_rank(greeting, sock)
            case "collective":
                self.on_collective(greeting, sock)
            case "control":
                self._adopt(key, sock)
            case "probe":
                self._spawn(link_echo.answer_probe(sock))
            case "echo":
                self._spawn(link_echo.answer_echo(sock))
            case _:
                arrival = _RingArrival(greeting.epoch, key, greeting.lane, greeting.connection)
                self._keep(arrival, _RingConnection(sock, greeting.connections))

    def _keep(self, arrival: _RingArrival, connection: _RingConnection) -> None:
        if (stale := self._ring_arrivals.pop(arrival, None)) is not None:
            stale.sock.close()
        self._ring_arrivals[arrival] = connection
        needed = {_RingArrival(n, r.previous, r.lane) for n, x in self._epochs.items() for r in x.rings}
        early = [x for x in self._ring_arrivals if x._replace(connection=0) not in needed]
        for key in early[:-MOST_EARLY]:
            self._ring_arrivals.pop(key).sock.close()
        self._changed()

    def _adopt(self, key: ProcessKey, sock: socket.socket) -> None:
        link = Link(sock, key.replica)
        old = self._links.get(key)
        self._links[key] = link
        if old is not None:
            reason = "replaced by a newer link to the same process"
            old.abort(reason)
            # Messages on the old link may be lost, so a round that used it cannot go on.
            self._feed(io.LinkLost(*key, reason))
        self._spawn(self._run(key, link))
        rosters = [x.record for x in self._epochs.values()]
        if len(self._links) > MOST_EARLY + max((len(x.roster) for x in rosters), default=0):
            early = [x for x in self._links if not any(record.lists(*x) for record in rosters)]
            for other in early[:-MOST_EARLY]:
                self._links[other].abort("too many processes that no known epoch lists have linked")
        self._changed()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, key: ProcessKey, link: Link) -> None:
        def on_message(data: bytes) -> None:
            message = wire.decode(data)
            if not isinstance(message, Contribution | CommitVote | Finished):
                raise ProtocolError(f"{key.replica} sent a {type(message).__name__}, which is not for peers")
            self._feed(io.FromPeer(*key, message))

        def on_closed(reason: str) -> None:
            if self._links.get(key) is link:
                del self._links[key]
                self._feed(io.LinkLost(*key, reason, link.silent))

        await link.run(on_message, on_closed)

    def _changed(self) -> None:
        for linking in self._epochs.values():
            linking.changed.set()


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
    shares_memory: bool  # whether links between members on one host come as unix sockets


class _Dialler(NamedTuple):
    """A process that has dialled, and the number of the group for which it has."""

    process: ProcessKey
    number: int


class _LinkArrival(NamedTuple):
    attempt: int
    sock: socket.socket


class CollectiveLinks:
    """The ring links of collectives between replicas, made when the first collective needs them.

    They are separate from the links of an epoch, so a collective that fails never harms a round. A group is a
    set of processes, and its number fences it. When a ring of the group has failed, its members make the next
    attempt: each one dials its next member again, and all agree on the highest attempt that they have seen.
    The links of one group are made at a time, on the control thread's loop.
    """

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
                    return LinkedRing(attempt, following, arrival.sock, self._peers.shares_memory)
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
