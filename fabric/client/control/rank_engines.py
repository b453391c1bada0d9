"""The engines of a replica of several ranks: rank 0 decides, the other ranks obey.

``HeadEngine`` runs the member core behind ``protocol.ranks.Ranks``, sends every rank its orders, and performs
the orders for rank 0. ``FollowerEngine`` has no core: it performs orders as they come and sends their
outcomes back. On a host without rank 0 the first rank is the voice: it passes on the orders for the host's
ranks, and sums up their outcomes. A rank that loses the link over which its orders come ends its process with
code 75, and a voice tells rank 0 of a lost rank. The control thread ends the process at once, because the
main thread may be stuck in a collective with the lost rank.
"""

import asyncio
import contextlib
import os
import queue
import socket
from collections.abc import Callable
from typing import Any, get_args

from fabric.client.control.engine import Engine, EngineParts
from fabric.client.process.rank_group import RankGroup
from fabric.errors import FabricError, Unreachable
from fabric.exit_codes import RESTART
from fabric.model import Record
from fabric.protocol.member.core import MemberCore
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.rank_messages import (
    FromHost,
    HostCommands,
    RankCommand,
    RankEvent,
    RankLost,
    RankOutcome,
    commands_by_rank,
    decode_command,
    decode_outcomes,
    encode_outcome,
    encode_outcomes,
)
from fabric.protocol.ranks import EndReplica, FollowerRank, HostVoice, Ranks, ToOthers, ToSelf
from fabric.runtime import logs
from fabric.runtime.driver import Core
from fabric.transport.greeting import Greeting
from fabric.transport.link import Link
from fabric.transport.tcp import dial

_START_S = 60.0
_DIAL_S = 3.0
_RETRY_S = 0.05


class RankLinks:
    """The links that other ranks of process ``incarnation`` dial to ``rank``: rank 0, or a host's voice.

    Orders go one way, outcomes the other. Like links between members these links are authenticated and
    ordered. The end of a link means that its rank's process has ended.
    """

    def __init__(self, rank: int, incarnation: int) -> None:
        self._rank = rank
        self._incarnation = incarnation
        self._links: dict[int, Link] = {}
        # The ranks for which each link speaks, its own first. Set it before ``wait``.
        self.voices: tuple[tuple[int, ...], ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._linked = asyncio.Event()

    def hear(self, on_said: Callable[[FromHost], None]) -> None:
        """Set the receiver of outcomes and lost links, once all ranks are linked.

        Until then nothing is read: a rank sends as soon as it is linked, and its messages wait in the socket.
        """

        async def listen(ranks: tuple[int, ...]) -> None:
            await self._links[ranks[0]].run(
                lambda data: on_said(decode_outcomes(data, ranks)),
                lambda why: on_said(FromHost(ranks[:1], (RankLost(ranks[0], why),))),
            )

        for ranks in self.voices:
            task = asyncio.get_running_loop().create_task(listen(ranks))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def accept(self, greeting: Greeting, sock: socket.socket) -> None:
        """Take the link of a rank that has dialled."""
        if greeting.incarnation != self._incarnation or greeting.rank in self._links:
            sock.close()  # the socket is from an earlier process
            return
        self._links[greeting.rank] = Link(sock, f"rank {greeting.rank}")
        if len(self._links) >= len(self.voices):
            self._linked.set()

    async def wait(self) -> None:
        """Wait until the first rank of each of ``voices`` is linked. Raises Unreachable."""
        try:
            async with asyncio.timeout(_START_S):
                while any(ranks[0] not in self._links for ranks in self.voices):
                    self._linked.clear()
                    await self._linked.wait()
        except TimeoutError:
            missing = [str(ranks[0]) for ranks in self.voices if ranks[0] not in self._links]
            raise Unreachable(
                f"rank {', '.join(missing)} of this replica did not link to rank {self._rank} within "
                f"{_START_S:g} s"
            ) from None

    def tell(self, order: ToOthers) -> None:
        """Queue orders for every rank."""
        messages = [HostCommands(command) for command in order.commands]
        for ranks in self.voices:
            own = tuple(order.own[rank] for rank in ranks) if order.own else ()
            self._links[ranks[0]].send(*(message.of(own) for message in messages))

    def pass_on(self, parts: list[bytes]) -> None:
        """Queue a message for each rank."""
        for ranks, part in zip(self.voices, parts, strict=True):
            self._links[ranks[0]].send(part)

    async def close(self) -> None:
        """Say goodbye; the peers read all messages first."""
        await asyncio.gather(*(link.close(linger_s=1.0) for link in self._links.values()))
        for task in self._tasks:
            task.cancel()


_OUTCOMES = get_args(RankEvent)
# For this long an error in the main thread waits for news of another rank's loss, which would explain it.
_EXPLAINED_S = 2.0
# How long rank 0 waits for the loss of another rank before it takes a rank's error for the cause.
_SETTLED_S = 0.5
# How long a main thread may take to obey a stop before it counts as stuck in a collective.
_STUCK_S = 5.0


class RankEngine(Engine):
    """An engine whose process may end because of another rank."""

    def __init__(self, parts: EngineParts, group: RankGroup) -> None:
        super().__init__(parts)
        self._group = group
        self._stops: queue.SimpleQueue[io.Stop] = queue.SimpleQueue()

    def await_explanation(self) -> None:
        """Wait for an explanation of an error that has reached the top of the main thread.

        When another rank has died or failed, collectives fail here too. This process then ends with the
        sentence that names the other rank.
        """
        if self._loop is not None:
            with contextlib.suppress(queue.Empty):
                self._end_now(self._stops.get(timeout=_EXPLAINED_S))

    def post(self, event: Any, number: int = 0) -> None:
        """As Engine.post, through the control thread, which has the links between ranks."""
        if self._loop is not None:
            # The event loop closes only after the job is complete; later events have no effect.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._feed, event, number)

    def may_be_asked(self) -> bool:
        """As Engine.may_be_asked. The ranks would learn of another replica at different times."""
        return True

    def _perform(self, effect: Any) -> None:
        if isinstance(effect, io.Stop):
            assert self._loop is not None
            self._stops.put(effect)
            self._loop.call_later(_STUCK_S, self._end_when_stuck, effect)
        super()._perform(effect)

    def _end_when_stuck(self, stop: io.Stop) -> None:
        """End the process: the main thread is stuck in a collective with a rank that is gone."""
        if self._stopping is not None and not self._stopping.is_set():
            self._end_now(stop)

    def _end_now(self, stop: io.Stop) -> None:
        logs.tell(f"{self._parts.peers.replica}: rank {self._group.rank}: {stop.reason}")
        self._parts.journal.write("stop", code=stop.code, reason=stop.reason)
        os._exit(stop.code)


class HeadEngine(RankEngine):
    """Rank 0. Before ``begin`` set ``groups``, the part of a micro-batch that each rank computes, ``stages``
    and ``links.voices``."""

    def __init__(self, parts: EngineParts, group: RankGroup, incarnation: int) -> None:
        super().__init__(parts, group)
        self.groups: tuple[int, ...] = ()
        self.stages: tuple[int, ...] = ()
        self.links = RankLinks(0, incarnation)
        self._core: Ranks | None = None
        parts.peers.on_rank = self.links.accept

    async def _begin(self, member: MemberCore, core: Core[Any, Any] | None = None) -> None:
        await self.links.wait()
        self._core = Ranks(member, self.groups, unequal=self._parts.exchange.lanes is not None)
        self._core.stages = self.stages
        await super()._begin(member, self._core)
        self.links.hear(self._feed)

    async def _end(self) -> None:
        await self.links.close()
        await super()._end()

    def _feed(self, event: Any, number: int = 0) -> None:
        if isinstance(event, _OUTCOMES):
            event = FromHost((0,), (event,), number)
        if isinstance(event, FromHost) and isinstance(event.events[0], io.Noticed):
            self._parts.durable.noticed = True  # a platform may signal one rank alone
        if isinstance(event, FromHost) and isinstance(event.events[0], io.LoopRaised):
            # Another rank's death may have caused this error, and the end of its link may not be read yet.
            assert self._loop is not None
            self._loop.call_later(_SETTLED_S, super()._feed, event)
            return
        super()._feed(event)

    def _refused(self, reason: str) -> None:
        self._feed(EndReplica(1, reason))

    def _perform(self, effect: Any) -> None:
        if isinstance(effect, ToOthers):
            self.links.tell(effect)
        elif not isinstance(effect, ToSelf):
            super()._perform(effect)
        elif isinstance(effect.command.effect, io.Stop) and self._core is not None and self._core.lost:
            # Rank 0 has sent the orders to stop to the other ranks, and stops last.
            self._end_now(effect.command.effect)
        else:
            self._number = effect.command.number
            super()._perform(effect.command.effect)


class FollowerEngine(RankEngine):
    """The engine of a rank other than 0. Call ``join`` instead of ``begin``."""

    def __init__(self, parts: EngineParts, group: RankGroup, incarnation: int) -> None:
        super().__init__(parts, group)
        self._follower = FollowerRank(group.rank)
        self._link: Link | None = None  # to rank 0, or to this host's voice
        self._voice: HostVoice | None = None  # where this rank speaks for others
        self._links = RankLinks(group.rank, incarnation)
        parts.peers.on_rank = self._links.accept
        self._step = 0

    @property
    def is_running(self) -> bool:
        return self._link is not None

    @property
    def generation(self) -> int:
        return self._follower.generation

    @property
    def current(self) -> Record | None:
        return self._follower.current

    @property
    def newest(self) -> Record | None:
        return self._follower.newest

    @property
    def step(self) -> int:
        return self._step

    def join(self, address: str, greeting: Greeting, token: bytes, ranks: tuple[int, ...]) -> None:
        """Link to the rank at ``address``, which the greeting names, and obey it; speak for ``ranks``.

        Raises FabricError where that rank cannot be reached, or where one of ``ranks`` does not link.
        """
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._join(address, greeting, token, ranks), self._loop).result()

    async def _join(self, address: str, greeting: Greeting, token: bytes, ranks: tuple[int, ...]) -> None:
        self._links.voices = tuple((rank,) for rank in ranks[1:])
        await self._links.wait()
        self._voice = HostVoice(ranks, self._group.size) if len(ranks) > 1 else None
        self._follower.speaker = greeting.to_rank
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _START_S
        while self._link is None:
            try:
                sock = await dial(address, greeting, token, _DIAL_S)
                self._link = Link(sock, f"rank {greeting.to_rank}")
            except FabricError:
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)
        self._session = loop.create_task(self._link.run(self._on_order, self._on_lost))
        self._links.hear(self._on_said)

    async def _end(self) -> None:
        self._follower.over = True
        own = [self._link.close(linger_s=1.0)] if self._link is not None else []
        await asyncio.gather(self._links.close(), *own)
        await super()._end()

    def _feed(self, event: Any, number: int = 0) -> None:
        self._follower.tell(event)
        self._send(self._group.rank, RankOutcome(event, number))

    def _on_said(self, message: FromHost) -> None:
        """Take what a rank of this host says, or the end of its link."""
        if not self._follower.over:
            self._send(message.ranks[0], RankOutcome(message.events[0], message.number))

    def _send(self, rank: int, outcome: RankOutcome) -> None:
        """Queue an outcome of this rank, or of a rank for which it speaks."""
        if self._link is None:
            return
        if self._voice is None:
            self._link.send(encode_outcome(outcome))
        elif sums := self._voice.take(rank, outcome):
            self._link.send(*map(encode_outcomes, sums))

    def _on_order(self, data: bytes) -> None:
        if self._links.voices:
            data, *others = commands_by_rank(data, 1 + len(self._links.voices))
            self._links.pass_on(others)
        order = decode_command(data)
        effect = self._follower.obey(order)
        if effect is None:
            return
        if isinstance(effect, io.Apply):
            self._step = effect.step + 1
        elif isinstance(effect, io.Install):
            self._step = effect.step
        elif isinstance(effect, io.Stop) and effect.code == RESTART and not effect.layout:
            # Another rank may be lost, and this rank's main thread may be stuck in a collective with it.
            self._end_now(effect)
        self._number = order.number
        try:
            self._perform(effect)
        except Exception as error:  # noqa: BLE001  (a defect here ends this rank, whatever it is)
            self.crash(error)

    def _on_lost(self, why: str) -> None:
        stop = self._follower.lost(why)
        if stop is not None:
            self._links.tell(ToOthers((RankCommand(0, self.generation, stop),)))
            self._end_now(stop)
