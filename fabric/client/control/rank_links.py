"""The links between rank 0 and the other ranks of its replica: orders one way, outcomes the other.

Like links between members these links are authenticated and ordered. The end of a link means that its rank's
process has ended.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from fabric.errors import FabricError, Unreachable
from fabric.protocol.messages.rank_messages import (
    RankCommand,
    RankOutcome,
    decode_command,
    decode_outcome,
    encode_command,
    encode_outcome,
)
from fabric.transport.greeting import Greeting
from fabric.transport.link import Link
from fabric.transport.tcp import dial

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
        self._links[rank].send(encode_command(order))

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
