"""The mock ranks of one replica, in one process: each dials rank 0 as a rank does, and obeys at once.

Their answers to equal commands are equal, so they are made once. ``scale_head.py`` runs it with one line of
JSON on stdin. Then ``first`` answers when the last rank got the first step's command, ``kill`` when the link
of one rank was cut, ``told`` when the last rank got the command to stop.
"""

import asyncio
import gc
import json
import resource
import socket
import sys
import time

import uvloop

from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.rank_messages import RankEvent, RankOutcome, decode_command, encode_outcome
from fabric.transport.greeting import Greeting
from fabric.transport.tcp import dial

DIGEST = "0123456789abcdef" * 2
DIALS = 100  # a listener takes 128 handshakes of one address at a time
TOLD_S = 120.0


class MockRanks:
    """All ranks but rank 0."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.links: dict[int, MockRank] = {}
        self.made: dict[bytes, bytes] = {}  # the newest commands -> the frames of their answers
        self.first_at = self.stopped_at = 0.0
        self.firsts = self.stopped = 0
        self.changed = asyncio.Event()

    def answer(self, command: bytes) -> bytes:
        """Return the frame that answers this command; empty for none."""
        found = self.made.get(command)
        if found is None:
            if len(self.made) > 1000:
                self.made.clear()
            found = self.made[command] = self._answer(command)
        if command.startswith(b'{"kind":"Stop"'):
            self.stopped, self.stopped_at = self.stopped + 1, time.monotonic()
            self.changed.set()
        elif self.firsts < self.ranks - 1 and command.startswith(b'{"kind":"Compute"'):
            self.firsts, self.first_at = self.firsts + 1, time.monotonic()
        return found

    def _answer(self, data: bytes) -> bytes:
        command = decode_command(data)
        effect = command.effect
        event: RankEvent | None = None
        if isinstance(effect, io.LinkUp):
            event = io.Linked(effect.record.epoch)
        elif isinstance(effect, io.Compute):
            event = io.Computed(effect.step, effect.micro_batches, 1.0)
        elif isinstance(effect, io.StartExchange):
            event = io.Exchanged(effect.fence.epoch, effect.step, DIGEST)
        elif isinstance(effect, io.Apply):
            event = io.Ready(effect.step + 1, DIGEST)
        elif isinstance(effect, io.Install):
            event = io.Installed(effect.step, effect.digest)
        elif isinstance(effect, io.TellDigest):
            event = io.Digested(effect.step, DIGEST)
        return framed(RankOutcome(event, command.number)) if event is not None else b""


def framed(outcome: RankOutcome) -> bytes:
    data = encode_outcome(outcome)
    return len(data).to_bytes(4, "big") + data


class MockRank(asyncio.Protocol):
    """One rank's link to rank 0."""

    def __init__(self, ranks: MockRanks, ready: bytes) -> None:
        self.ranks, self.ready, self.buffer = ranks, ready, b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        transport.write(self.ready)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        data = self.buffer + data if self.buffer else data
        at, answers = 0, []
        while len(data) >= at + 4 and len(data) >= (end := at + 4 + int.from_bytes(data[at : at + 4], "big")):
            answers.append(self.ranks.answer(data[at + 4 : end]))
            at = end
        self.buffer = data[at:]
        assert self.transport is not None
        if out := b"".join(answers):
            self.transport.write(out)


async def main(port: int, ranks: int, incarnation: int, token: str) -> None:
    mock, gate, loop = MockRanks(ranks), asyncio.Semaphore(DIALS), asyncio.get_running_loop()
    ready = framed(RankOutcome(io.Ready(0, DIGEST)))

    async def join(rank: int) -> None:
        async with gate:
            greeting = Greeting("scale", "", "r00", incarnation, "rank", rank=rank)
            sock: socket.socket = await dial(f"127.0.0.1:{port}", greeting, token.encode(), 30.0)
        _, mock.links[rank] = await loop.create_connection(lambda: MockRank(mock, ready), sock=sock)

    await asyncio.gather(*(join(rank) for rank in range(1, ranks)))
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async for line in lines:
        word = line.decode().strip()
        if word == "kill":
            at = time.monotonic()
            transport = mock.links[ranks // 2].transport
            assert transport is not None
            transport.abort()
            print(json.dumps({"at": at}), flush=True)
        elif word == "first":
            print(json.dumps({"at": mock.first_at, "count": mock.firsts}), flush=True)
        elif word == "told":
            async with asyncio.timeout(TOLD_S):
                while mock.stopped < ranks - 2:
                    mock.changed.clear()
                    await mock.changed.wait()
            print(json.dumps({"at": mock.stopped_at, "count": mock.stopped}), flush=True)


if __name__ == "__main__":
    gc.disable()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    first = json.loads(sys.stdin.readline())
    uvloop.run(main(**first))
