"""Rank 0 gets the early messages of its replica's ranks, and notices their ends."""

import asyncio
import socket

from fabric.client.control.rank_engines import RankLinks
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.rank_messages import RankLost, RankOutcome, encode_outcome
from fabric.transport.greeting import Greeting
from fabric.transport.link import frame


def greeting(rank: int) -> Greeting:
    return Greeting(job="j", store_id="", replica="r0", incarnation=7, kind="rank", rank=rank)


async def test_messages_of_a_rank_before_rank_0_listens_are_heard():
    """Under load rank 0 may still prepare its part when the other ranks are ready."""
    links, heard, lost = RankLinks(0, 7), [], []
    pairs = [socket.socketpair() for _ in range(2)]
    ready = io.Ready(0, "digest")
    for rank, (mine, theirs) in enumerate(pairs, 1):
        links.accept(greeting(rank), theirs)
        mine.sendall(frame(encode_outcome(RankOutcome(ready))))
    pairs[1][0].close()  # rank 2 dies at the same early moment
    links.voices = ((1,), (2,))
    await links.wait()
    for _ in range(10):  # let the event loop read the message that arrived: it must not lose this message
        await asyncio.sleep(0)
    told = asyncio.Event()

    def take(said) -> None:
        (event,) = said.events
        (lost if isinstance(event, RankLost) else heard).append((*said.ranks, event))
        if len(heard) == 2 and lost:
            told.set()

    links.hear(take)
    async with asyncio.timeout(10):
        await told.wait()
    assert sorted(heard, key=lambda x: x[0]) == [(1, ready), (2, ready)]
    assert [rank for rank, _ in lost] == [2]
    pairs[0][0].close()
    await links.close()
