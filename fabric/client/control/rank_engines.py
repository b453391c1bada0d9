"""The engines of a replica of several ranks: rank 0 decides, the other ranks obey.

``HeadEngine`` runs the member core behind ``protocol.ranks.Ranks``, sends every rank its orders, and performs
the orders for rank 0. ``FollowerEngine`` has no core: it performs orders as they come and sends their
outcomes back. A rank that loses the link to another rank ends its process with code 75. The control thread
ends it at once, because the main thread may be stuck in a collective with the lost rank.
"""

import asyncio
import contextlib
import os
import queue
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from fabric.client.control.engine import Engine, EngineParts
from fabric.client.process.rank_group import RankGroup
from fabric.errors import FabricError, Unreachable
from fabric.exit_codes import RESTART
from fabric.model import Record
from fabric.protocol.member.core import MemberCore
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.rank_messages import (
    RankCommand,
    RankEvent,
    RankOutcome,
    decode_command,
    decode_outcome,
    encode_command,
    encode_outcome,
)
from fabric.protocol.ranks import EndReplica, FollowerRank, FromRank, RankLost, Ranks, ToRank
from fabric.runtime import logs
from fabric.runtime.driver import Core
from fabric.transport.greeting import Greeting
from fabric.transport.link import Link
from fabric.transport.tcp import dial

# The links between rank 0 and the other ranks of its replica: orders one way, outcomes the other.
#
# Like links between members these links are authenticated and ordered. The end of a link means that its
# rank's process has ended.


_START_S = 60.0
_DIAL_S = 3.0
_RETRY_S = 0.05


class HeadLinks:
    """Rank 0's side: one link to each of the ranks 1 to ``size - 1`` of process ``incarnation``."""

    def __init__(self, size: int, incarnation: int) -> None:
        self._size = size
        self._incarnation = incarnation
        self._links: dict[int, Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_there = asyncio.Event()
        self._encoded: tuple[RankCommand | None, bytes] = None, b""

    def hear(
        self, on_outcome: Callable[[int, RankOutcome], None], on_lost: Callable[[int, str], None]
    ) -> None:
        """Set the receivers of outcomes and lost links, once all ranks are linked.

        Until then nothing is read: a rank sends as soon as it is linked, and its messages wait in the socket.
        """
        for rank, link in self._links.items():
            task = asyncio.get_running_loop().create_task(_listen(rank, link, on_outcome, on_lost))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def accept(self, greeting: Greeting, sock: socket.socket) -> None:
        """Take the link of a rank that has dialled."""
        rank = greeting.rank
        if greeting.incarnation != self._incarnation or not 0 < rank < self._size or rank in self._links:
            sock.close()  # the socket is from an earlier process, or from no rank of this replica
            return
        self._links[rank] = Link(sock, f"rank {rank}")
        if len(self._links) == self._size - 1:
            self._all_there.set()

    async def wait(self) -> None:
        """Wait until every rank is linked. Raises Unreachable."""
        try:
            async with asyncio.timeout(_START_S):
                await self._all_there.wait()
        except TimeoutError:
            missing = [str(r) for r in range(1, self._size) if r not in self._links]
            raise Unreachable(
                f"rank {', '.join(missing)} of this replica did not link to rank 0 within {_START_S:g} s"
            ) from None

    def send(self, rank: int, order: RankCommand) -> None:
        """Queue one order."""
        if order is not self._encoded[0]:  # encode once: many orders are the same for all ranks
            self._encoded = order, encode_command(order)
        self._links[rank].send(self._encoded[1])

    async def close(self) -> None:
        """Say goodbye; the peers read all messages first."""
        await asyncio.gather(*(link.close(linger_s=1.0) for link in self._links.values()))
        for task in self._tasks:
            task.cancel()


async def _listen(
    rank: int, link: Link, on_outcome: Callable[[int, RankOutcome], None], on_lost: Callable[[int, str], None]
) -> None:
    await link.run(lambda data: on_outcome(rank, decode_outcome(data)), lambda why: on_lost(rank, why))


class FollowerLink:
    """The side of a rank other than 0: its link to rank 0."""

    def __init__(self) -> None:
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None

    async def dial(self, address: str, greeting: Greeting, token: bytes) -> None:
        """Link to rank 0. After a minute of failed tries, raises the error of the last try."""
        deadline = asyncio.get_running_loop().time() + _START_S
        while True:
            try:
                sock = await dial(address, greeting, token, _DIAL_S)
                break
            except FabricError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)
        self._link = Link(sock, "rank 0")

    def hear(self, on_order: Callable[[RankCommand], None], on_lost: Callable[[str], None]) -> None:
        """Begin to pass orders to ``on_order``; ``on_lost`` gets the reason when the link ends."""
        assert self._link is not None
        self._task = asyncio.get_running_loop().create_task(
            self._link.run(lambda data: on_order(decode_command(data)), on_lost)
        )

    def send(self, outcome: RankOutcome) -> None:
        """Queue one outcome."""
        if self._link is not None:
            self._link.send(encode_outcome(outcome))

    async def close(self) -> None:
        """Say goodbye."""
        if self._link is not None:
            await self._link.close(linger_s=1.0)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


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
        self._closing = False

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

    def close(self) -> None:
        self._closing = True
        super().close()

    def _perform(self, effect: Any) -> None:
        if isinstance(effect, io.Stop):
            assert self._loop is not None
            self._stops.put(effect)
            self._loop.call_later(_STUCK_S, self._end_when_stuck, effect)
        super()._perform(effect)

    def _end_when_stuck(self, stop: io.Stop) -> None:
        """End the process: the main thread is stuck in a collective with a rank that is gone."""
        if not self._closing:
            self._end_now(stop)

    def _end_now(self, stop: io.Stop) -> None:
        logs.tell(f"{self._parts.peers.replica}: rank {self._group.rank}: {stop.reason}")
        self._parts.journal.write("stop", code=stop.code, reason=stop.reason)
        os._exit(stop.code)


class HeadEngine(RankEngine):
    """Rank 0. Before ``begin`` set ``groups``, the part of a micro-batch that each rank computes, and
    ``stages``."""

    def __init__(self, parts: EngineParts, group: RankGroup, incarnation: int) -> None:
        super().__init__(parts, group)
        self.groups: tuple[int, ...] = ()
        self.stages: tuple[int, ...] = ()
        self._links = HeadLinks(group.size, incarnation)
        self._core: Ranks | None = None
        parts.peers.on_rank = self._links.accept

    async def _begin(self, member: MemberCore) -> None:
        await self._links.wait()
        await super()._begin(member)
        self._links.hear(
            lambda rank, outcome: self._feed(FromRank(rank, outcome)),
            lambda rank, why: self._feed(RankLost(rank, why)),
        )

    def _make_core(self, member: MemberCore) -> Core[Any, Any]:
        self._core = Ranks(member, self.groups, unequal=self._parts.exchange.lanes is not None)
        self._core.stages = self.stages
        return self._core

    async def _end(self) -> None:
        await self._links.close()
        await super()._end()

    def _feed(self, event: Any, number: int = 0) -> None:
        self._note_planes(event)
        if isinstance(event, _OUTCOMES):
            event = FromRank(0, RankOutcome(event, number))
        if isinstance(event, FromRank) and isinstance(event.outcome.event, io.Noticed):
            self._parts.durable.noticed = True  # a platform may signal one rank alone
        if isinstance(event, FromRank) and isinstance(event.outcome.event, io.LoopRaised):
            # Another rank's death may have caused this error, and the end of its link may not be read yet.
            assert self._loop is not None
            self._loop.call_later(_SETTLED_S, super()._feed, event)
            return
        super()._feed(event)

    def _refused(self, reason: str) -> None:
        self._feed(EndReplica(1, reason))

    def _perform(self, effect: Any) -> None:
        if not isinstance(effect, ToRank):
            super()._perform(effect)
        elif effect.rank:
            self._links.send(effect.rank, effect.command)
        elif isinstance(effect.command.effect, io.Stop) and self._core is not None and self._core.lost:
            # Rank 0 has sent the orders to stop to the other ranks, and stops last.
            self._end_now(effect.command.effect)
        else:
            self._number = effect.command.number
            super()._perform(effect.command.effect)


class FollowerEngine(RankEngine):
    """The engine of a rank other than 0. Call ``join`` instead of ``begin``."""

    def __init__(self, parts: EngineParts, group: RankGroup) -> None:
        super().__init__(parts, group)
        self._follower = FollowerRank(group.rank)
        self._link = FollowerLink()
        self._running = False
        self._step = 0

    @property
    def is_running(self) -> bool:
        return self._running

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

    def join(self, address: str, greeting: Greeting, token: bytes) -> None:
        """Link to rank 0 at ``address`` and obey it. Raises FabricError where rank 0 cannot be reached."""
        assert self._loop is not None
        greeting = replace(greeting, kind="rank", rank=self._group.rank)
        asyncio.run_coroutine_threadsafe(self._join(address, greeting, token), self._loop).result()

    async def _join(self, address: str, greeting: Greeting, token: bytes) -> None:
        await self._link.dial(address, greeting, token)
        self._running = True
        self._link.hear(self._on_order, self._on_lost)

    async def _end(self) -> None:
        self._follower.over = True
        await self._link.close()
        await super()._end()

    def _feed(self, event: Any, number: int = 0) -> None:
        self._note_planes(event)
        self._link.send(RankOutcome(event, number))

    def _on_order(self, order: RankCommand) -> None:
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
            self._end_now(stop)
