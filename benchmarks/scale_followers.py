"""The mock ranks of one replica, in one process: each voice dials rank 0 as a rank does.

Mock: the ranks, which obey at once, and the links within a host. Real: how a voice divides a command, and
sums up the outcomes of its ranks. ``scale_head.py`` runs it with one line of JSON on stdin. Then ``first``
answers when the last rank got the first step's command, ``kill`` when the link of one voice was cut, ``told``
when the last rank got the command to stop.
"""

import asyncio
import gc
import json
import resource
import socket
import sys
import time

import uvloop

from fabric.model import StepTimes
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.rank_messages import (
    RankEvent,
    RankOutcome,
    commands_by_rank,
    decode_command,
    encode_outcome,
    encode_outcomes,
)
from fabric.protocol.ranks import HostVoice
from fabric.transport.greeting import Greeting
from fabric.transport.tcp import dial

DIALS = 100  # a listener takes 128 handshakes of one address at a time
TOLD_S = 120.0


class MockRanks:
    """All ranks but rank 0."""

    def __init__(self, voices: list[list[int]]) -> None:
        self.ranks = sum(map(len, voices))
        self.links: list[MockVoice] = []
        self.first_at = self.stopped_at = self.cpu_s = 0.0
        self.firsts = self.stopped = 0
        self.changed = asyncio.Event()

    def obey(self, rank: int, data: bytes) -> RankOutcome | None:
        """Perform the command of a rank; return its answer."""
        command = decode_command(data)
        effect = command.effect
        event: RankEvent | None = None
        if isinstance(effect, io.LinkUp):
            event = io.Linked(effect.record.epoch)
        elif isinstance(effect, io.Compute):
            event = io.Computed(effect.step, effect.micro_batches, 1.0, (("loss", 1.0 + rank),))
            if self.firsts < self.ranks:
                self.firsts, self.first_at = self.firsts + 1, time.monotonic()
        elif isinstance(effect, io.StartExchange):
            event = io.Exchanged(effect.fence.epoch, effect.step, digest(rank))
        elif isinstance(effect, io.Apply):
            event = io.Ready(effect.step + 1, digest(rank), StepTimes(1.0 + rank, 0.1))
        elif isinstance(effect, io.Install):
            event = io.Installed(effect.step, digest(rank))
        elif isinstance(effect, io.TellDigest):
            event = io.Digested(effect.step, digest(rank))
        elif isinstance(effect, io.Stop):
            self.stopped, self.stopped_at = self.stopped + 1, time.monotonic()
            self.changed.set()
        return RankOutcome(event, command.number) if event is not None else None


def digest(rank: int) -> str:
    return f"{rank:032x}"


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


class MockVoice(asyncio.Protocol):
    """The link of one host to rank 0."""

    def __init__(self, mock: MockRanks, ranks: list[int]) -> None:
        self.mock, self.ranks, self.buffer = mock, ranks, b""
        self.voice = HostVoice(ranks, mock.ranks + 1) if len(ranks) > 1 else None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        ready = [self.say(rank, RankOutcome(io.Ready(0, digest(rank)))) for rank in self.ranks]
        transport.write(b"".join(ready))  # type: ignore[attr-defined]

    def say(self, rank: int, outcome: RankOutcome) -> bytes:
        """Return the frames that rank 0 gets."""
        if self.voice is None:
            return framed(encode_outcome(outcome))
        return b"".join(framed(encode_outcomes(said)) for said in self.voice.take(rank, outcome))

    def answer(self, data: bytes) -> bytes:
        """Return the frames that answer a command to this host."""
        parts = commands_by_rank(data, len(self.ranks)) if self.voice is not None else [data]
        said = [(rank, self.mock.obey(rank, part)) for rank, part in zip(self.ranks, parts, strict=True)]
        return b"".join(self.say(rank, outcome) for rank, outcome in said if outcome is not None)

    def data_received(self, data: bytes) -> None:
        data = self.buffer + data if self.buffer else data
        at, answers = 0, []
        while len(data) >= at + 4 and len(data) >= (end := at + 4 + int.from_bytes(data[at : at + 4], "big")):
            answers.append(self.answer(data[at + 4 : end]))
            at = end
        self.buffer = data[at:]
        assert self.transport is not None
        if out := b"".join(answers):
            self.transport.write(out)


async def main(port: int, voices: list[list[int]], incarnation: int, token: str) -> None:
    mock, gate, loop = MockRanks(voices), asyncio.Semaphore(DIALS), asyncio.get_running_loop()

    async def join(ranks: list[int]) -> None:
        async with gate:
            greeting = Greeting("scale", "", "r00", incarnation, "rank", rank=ranks[0], to_rank=0)
            sock: socket.socket = await dial(f"127.0.0.1:{port}", greeting, token.encode(), 30.0)
        mock.links.append((await loop.create_connection(lambda: MockVoice(mock, ranks), sock=sock))[1])

    await asyncio.gather(*map(join, voices))
    begun = time.process_time()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async for line in lines:
        word = line.decode().strip()
        if word == "kill":
            at = time.monotonic()
            victim = mock.links[len(voices) // 2]
            transport = victim.transport
            assert transport is not None
            transport.abort()
            print(json.dumps({"at": at}), flush=True)
        elif word == "first":
            print(json.dumps({"at": mock.first_at, "cpu_s": time.process_time() - begun}), flush=True)
        elif word == "told":
            async with asyncio.timeout(TOLD_S):
                while mock.stopped < mock.ranks - len(victim.ranks):
                    mock.changed.clear()
                    await mock.changed.wait()
            print(json.dumps({"at": mock.stopped_at, "count": mock.stopped}), flush=True)


if __name__ == "__main__":
    gc.disable()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    first = json.loads(sys.stdin.readline())
    uvloop.run(main(**first))
