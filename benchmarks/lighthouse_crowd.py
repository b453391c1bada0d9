"""Many members of one job in one process: real sessions with a lighthouse over loopback.

Each session is a connection of its own that speaks the members' protocol in its shipping bytes: it says who
it is, beats once a second, follows epochs (told whole or as changes), reports and runs, and comes back by
the client's rules when its session ends. Only the training is left out. The sessions of a process share the
decoding of equal messages.

Run by ``benchmarks/lighthouse.py`` with one line of JSON on stdin; then commands come as lines there
(``kill NAME``, ``mark``, ``state``, ``end``), and every answer is one line of JSON on stdout.
"""

import asyncio
import base64
import contextlib
import gc
import json
import os
import random
import re
import resource
import struct
import sys
import time
from array import array
from collections import Counter

import uvloop

from fabric.model import PROTOCOL_VERSION, DataPlan, Record
from fabric.protocol.messages import network as m
from fabric.protocol.messages import roster_delta, wire

SLICES = 100  # the heartbeats of a second are spread over this many instants
OPEN_S = 120.0  # all sessions must be open within this time
DIALS = 512  # number of sessions opened at a time at the start; after a fail-over all open at once
CONNECT_S = 2.7  # this time and the pauses equal those of fabric/client/control/lighthouse_link.py
PAUSE_S = (0.05, 0.5)


class SessionCrowd:
    """All sessions of this process. Times are of the machine's monotonic clock, which processes share."""

    def __init__(self, urls: list[str], token: str, job: str, names: list[str], total: int) -> None:
        self.urls = urls
        key = base64.b64encode(os.urandom(16)).decode()
        self.head = (
            f"GET /v1/jobs/{job}/session?replicas={total // 2}:{total} HTTP/1.1\r\nHost: lighthouse\r\n"
            f"Authorization: Bearer {token}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
        ).encode()
        self.total = total
        self.names = names
        self.sessions = {name: self.member(name, number) for number, name in enumerate(names)}
        self.late: Counter[int] = Counter()  # delay in tenths of a millisecond -> number of heartbeats
        # delay of this process itself, in the same unit -> number of heartbeats
        self.own: Counter[int] = Counter()
        self.record: Record | None = None  # the newest record that any session of this process got
        self.told: dict[int, array[float]] = {}  # epoch -> the time when each session got it
        self.kept: list[asyncio.Task[None]] = []
        self.lost: list[str] = []
        self.refused: list[str] = []
        self.last = b""
        self.decoded: object = None

    def member(self, name: str, number: int) -> "MemberConnection":
        """Make the member of this name, which is not connected yet."""
        return MemberConnection(self, name, number)

    def decode(self, frame: bytes) -> m.Message:
        """Messages that are the same for all are decoded once in a row."""
        if frame != self.last:
            self.last, self.decoded = frame, wire.decode(frame)
        return self.decoded  # type: ignore[return-value]

    async def open(self) -> None:
        """Open every session once, and keep them from then on."""
        loop, gate = asyncio.get_running_loop(), asyncio.Semaphore(DIALS)
        for session in self.sessions.values():
            self.kept.append(loop.create_task(self.keep(session, gate)))
        try:
            async with asyncio.timeout(OPEN_S):
                await asyncio.gather(*(s.was_open for s in self.sessions.values()))
        except TimeoutError:
            count = sum(s.open for s in self.sessions.values())
            raise SystemExit(
                f"lighthouse_crowd.py: {count} of {len(self.sessions)} sessions opened within {OPEN_S:g} s"
            ) from None

    async def keep(self, session: "MemberConnection", gate: asyncio.Semaphore) -> None:
        """Keep a session open as the client does: try one address after the other without end."""
        urls = list(self.urls)
        while not session.is_killed:
            wait_s = random.uniform(*PAUSE_S)
            try:
                async with contextlib.AsyncExitStack() as stack:
                    if not session.was_open.done():
                        await stack.enter_async_context(gate)
                    async with asyncio.timeout(CONNECT_S if session.was_open.done() else 60.0):
                        await session.connect(urls[0])
                await session.ended
            except SentAway as answer:
                if answer.seconds:
                    wait_s = answer.seconds * random.uniform(0.5, 1.0)
                    await asyncio.sleep(wait_s)
                    continue
            except (OSError, TimeoutError):
                session.cut()
            urls.append(urls.pop(0))
            await asyncio.sleep(wait_s)

    async def beat(self) -> None:
        """Send every session's heartbeat once a second, evenly spread, by the clock."""
        slices = [list(self.sessions.values())[i::SLICES] for i in range(SLICES)]
        begun, turn = time.monotonic(), 0
        while True:
            turn += 1
            due = begun + turn / SLICES
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            beating = slices[turn % SLICES]
            self.own[int(10_000 * (time.monotonic() - due))] += len(beating)
            for session in beating:
                session.beat()

    def state(self) -> dict[str, object]:
        epochs = [s.epoch for s in self.sessions.values() if s.open]
        running = sum(s.running == s.epoch > 0 and s.open for s in self.sessions.values())
        return {
            "open": len(epochs),
            "lowest": min(epochs, default=0),
            "oldest": min((s.opened for s in self.sessions.values() if s.open), default=0.0),
            "running": running,
            "lost": self.lost[:5],
            "refused": self.refused[:5],
        }

    def marks(self) -> dict[str, object]:
        """Return the measurements since the last time."""
        late, self.late = self.late, Counter()
        own, self.own = self.own, Counter()
        told, self.told = self.told, {}
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "late": late,
            "own": own,
            "told": {epoch: list(times) for epoch, times in told.items()},
            "cpu_s": usage.ru_utime + usage.ru_stime,
        }


class SentAway(Exception):
    """The lighthouse does not take the session now: it comes back after so many seconds (0: elsewhere)."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class MemberConnection(asyncio.Protocol):
    """One member, and its connection."""

    def __init__(self, crowd: SessionCrowd, name: str, number: int) -> None:
        self.crowd, self.name, self.number = crowd, name, number
        self.incarnation = 1_763_717_000_000 + number
        self.transport: asyncio.Transport | None = None
        self.was_open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.buffer = b""
        self.open = self.is_killed = False
        self.opened = 0.0
        self.report: m.Report | None = None
        self.record: Record | None = None
        self.epoch = self.running = self.step = self.beats = 0
        self.sent = 0.0

    async def connect(self, url: str) -> None:
        """Connect until the lighthouse has accepted the connection. Raises OSError, or SentAway."""
        loop = asyncio.get_running_loop()
        self.upgraded, self.ended = loop.create_future(), loop.create_future()
        self.buffer = b""
        host, port = url.removeprefix("http://").split(":")
        # Each has its own address, as real replicas do: a lighthouse limits the connections of one address.
        own = f"127.1.{self.number >> 8 & 255}.{self.number & 255}"
        await loop.create_connection(lambda: self, host, int(port), local_addr=(own, 0))
        await self.upgraded

    def cut(self) -> None:
        """Cut the connection without waiting for unfinished work."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        transport.write(self.crowd.head)  # type: ignore[attr-defined]

    def connection_lost(self, error: Exception | None) -> None:
        if self.open and self.transport is not None:
            self.crowd.lost.append(f"{self.name}: {error}")
        self.open, self.transport = False, None
        for waiter in (self.upgraded, self.ended):
            if not waiter.done():
                waiter.set_exception(ConnectionError(f"{self.name}: {error}"))
                waiter.exception()  # tell a caller that still waits, if any

    def data_received(self, data: bytes) -> None:
        data = self.buffer + data if self.buffer else data
        if not self.upgraded.done():
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self.buffer = data
                return
            if not data.startswith(b"HTTP/1.1 101"):
                after = re.search(rb"Retry-After: (\d+)", data) if b" 429 " in data[:16] else None
                self.upgraded.set_exception(SentAway(float(after[1]) if after else 0.0))
                self.upgraded.exception()  # tell the caller, unless it has given up
                self.cut()
                return
            self.upgraded.set_result(None)
            self.open, self.opened = True, time.monotonic()
            if not self.was_open.done():
                self.was_open.set_result(None)
            self.introduce()
            data = data[end + 4 :]
        at = 0
        while (frame := frame_at(data, at)) is not None:
            at, code, body = frame
            if code in (1, 2):
                self.hear(body)
            elif code == 8:
                self.crowd.refused.append(f"{self.name}: {body[2:].decode(errors='replace')}")
        self.buffer = data[at:]

    def say(self, message: m.MemberMessage) -> None:
        self.write(wire.encode(message))

    def write(self, body: bytes) -> None:
        assert self.transport is not None
        self.transport.write(frame_of(body))

    def introduce(self) -> None:
        """Say the first message of the session."""
        self.say(self.opening())

    def opening(self) -> m.OpenSession:
        n = self.number
        place = f"10.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}"
        digest = "0123456789abcdef" * 2
        return m.OpenSession(
            replica=self.name,
            incarnation=self.incarnation,
            generation=self.record.generation if self.record is not None else 0,
            step=self.step,
            digest=digest,
            epoch=self.epoch,
            link=f"{place}:41234",
            ckpt=f"http://{place}:51234",
            micro_batches=self.crowd.total,
            layout=digest,
            roster=self.record.roster_digest if self.record is not None else "",
        )

    def beat(self) -> None:
        if not self.open or self.transport is None or self.transport.is_closing():
            return
        self.beats += 1
        generation = self.record.generation if self.record is not None else 0
        self.step += self.running > 0
        self.sent = time.monotonic()
        beat = (
            f'{{"kind":"Heartbeat","version":{PROTOCOL_VERSION},"number":{self.beats},"epoch":{self.epoch},"generation":{generation},'
            f'"step":{self.step},"digest":"","phase":"run","waiting_for":[],"busy":"","times":null,"busy_s":0.0}}'
        )
        self.write(beat.encode())

    def hear(self, body: bytes) -> None:
        if body.startswith(b'{"kind":"HeartbeatAck"'):
            # other fields may follow the number
            number = body[body.index(b'"number":') + 9 :].partition(b",")[0]
            # number of heartbeats sent since then, one per second
            behind = self.beats - int(number.rstrip(b"}"))
            self.crowd.late[int(10_000 * (time.monotonic() - self.sent + behind))] += 1
            return
        message = self.crowd.decode(body)
        if isinstance(message, m.Epoch):
            self.enter(message.record)
        elif isinstance(message, m.RosterDelta):
            newest = self.crowd.record
            if newest is not None and newest.fence == message.record.fence:
                # another session of this process has applied this roster delta already
                record: Record | None = newest
            else:
                record = roster_delta.applied(message, self.record)
            if record is None or self.record is None:
                self.say(m.RequestRoster(message.record.fence))
            else:
                self.enter(record)
        elif isinstance(message, m.Resume):
            if self.running != self.epoch:  # after a fail-over another leader asks again
                self.step, self.running = message.step, self.epoch
            self.say(m.Running(message.fence, self.step))
        elif isinstance(message, m.Rejected):
            self.crowd.refused.append(f"{self.name}: {message.reason}")

    def enter(self, record: Record) -> None:
        """Enter a new epoch: note its time of arrival, and report if it is forced. For a repeated epoch of
        another leader, repeat the answers.
        """
        if record.epoch > self.epoch:
            self.crowd.told.setdefault(record.epoch, array("d")).append(time.monotonic())
            before, self.record, self.crowd.record, self.epoch = self.record, record, record, record.epoch
            self.report = self.report_of(record, before) if record.is_forced else None
        if self.report is not None:
            self.say(self.report)

    def report_of(self, record: Record, before: Record | None) -> m.Report:
        ran = before is not None and self.running == before.epoch
        return m.Report(
            fence=record.fence,
            state_generation=record.generation if ran else 0,
            step=self.step,
            digest="",
            round_epoch=self.running,
            round_step=self.step,
            round_lacked=(),
            prepared=False,
            gradient_digest="",
            have=(self.number,) if ran else (),
            plan=DataPlan(1),
        )


def frame_of(body: bytes, kind: int = 0x81) -> bytes:
    """A client's frame: the WebSocket standard requires a mask, and this one is zero."""
    size = len(body)
    if size < 126:
        head = struct.pack(">BBI", kind, 0x80 | size, 0)
    elif size < 65536:
        head = struct.pack(">BBHI", kind, 0xFE, size, 0)
    else:
        head = struct.pack(">BBQI", kind, 0xFF, size, 0)
    return head + body


def frame_at(data: bytes, at: int) -> tuple[int, int, bytes] | None:
    """The next frame from ``at`` on: where it ends, its code, its bytes. A server's frames are not masked."""
    if len(data) < at + 2:
        return None
    size, begin = data[at + 1] & 127, at + 2
    if size == 126:
        if len(data) < at + 4:
            return None
        size, begin = int.from_bytes(data[at + 2 : at + 4], "big"), at + 4
    elif size == 127:
        if len(data) < at + 10:
            return None
        size, begin = int.from_bytes(data[at + 2 : at + 10], "big"), at + 10
    if len(data) < begin + size:
        return None
    return begin + size, data[at] & 15, data[begin : begin + size]


async def main(urls: list[str], token: str, job: str, names: list[str], total: int) -> None:
    crowd = SessionCrowd(urls, token, job, names, total)
    beating = asyncio.get_running_loop().create_task(crowd.beat())
    beating.add_done_callback(lambda task: task.cancelled() or task.result())
    await crowd.open()
    answer(crowd.state())
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async for line in lines:
        word, *rest = line.decode().split()
        if word == "kill":
            session = crowd.sessions[rest[0]]
            assert session.transport is not None
            session.open, session.is_killed = False, True
            at = time.monotonic()
            session.transport.abort()
            answer({"at": at})
        elif word == "mark":
            answer(crowd.marks())
        elif word == "state":
            answer(crowd.state())
        else:
            break
    for task in (beating, *crowd.kept):
        task.cancel()


def answer(body: dict[str, object]) -> None:
    print(json.dumps(body), flush=True)


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.disable()  # a collection over all sessions takes longer than the measured operation
    uvloop.run(main(**json.loads(sys.stdin.readline())))
