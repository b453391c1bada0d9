"""The mock hosts of a job of 98,304 GPUs in one process: real connections with a real lighthouse.

Each replica has one session, that of its rank 0, which names the addresses of all its ranks
(``lighthouse_crowd.py`` has the rest of it). Each host has ``servers`` connections with trainer statuses, one
for all its ranks by default, and perhaps a launcher that waits for orders. A dead replica does not come back.

``benchmarks/scale.py`` runs it with one line of JSON on stdin; then commands come as lines there
(``kill NUMBER``, ``mark``, ``state``, ``launch REPLICAS``), and every answer is one line of JSON on stdout.
"""

import asyncio
import base64
import gc
import json
import os
import re
import resource
import sys
import time
from array import array

import uvloop
from lighthouse_crowd import MemberConnection, SessionCrowd, answer, frame_at, frame_of
from msgspec.structs import replace

from fabric.model import RankAddress
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire

SLICES = 100  # the statuses of a period are spread over this many instants
PERIOD_S = 0.25  # this and the next number equal those of fabric/ckpt_server/server/trainer_status.py
LONGEST_PERIOD_S = 1.0  # also before the lighthouse has said how often
OPEN_S = 180.0
DIALS = 256
AGAIN_S = 1.0
GPUS = 8  # ranks of a host
_EPOCH = re.compile(rb'"epoch":(\d+)')
_EVERY = re.compile(rb'"every_s":([0-9.e-]+)')


def address_of(replica: int, host: int) -> str:
    """Return the loopback address that stands for this host: a lighthouse limits each address."""
    return f"127.{1 + replica}.{host >> 8 & 255}.{1 + (host & 255) % 254}"


def addresses(replica: int, hosts: int, ranks: int, servers: int) -> tuple[RankAddress, ...]:
    """Return the addresses of all ranks of one replica: each its own port, and its host's server."""
    found = []
    for rank in range(hosts * ranks):
        host, local = divmod(rank, ranks)
        place = address_of(replica, host)
        server = f"http://{place}:{8700 + local * servers // ranks}"
        found.append(RankAddress(f"{place}:{32768 + (rank * 7919 + replica) % 28000}", f"{server}#{rank}"))
    return tuple(found)


class HeadSession(MemberConnection):
    """The session of one replica's rank 0."""

    crowd: "HostCrowd"

    def opening(self) -> m.OpenSession:
        first, *others = self.crowd.addresses[self.number]
        ckpt = first.ckpt.partition("#")[0]
        return replace(super().opening(), link=first.link, ckpt=ckpt, ranks=tuple(others))


class HostCrowd(SessionCrowd):
    """The sessions of all replicas, and the connections of all hosts."""

    def __init__(self, url: str, token: str, job: str, shape: dict[str, int]) -> None:
        self.shape = shape
        names = [f"r{i:02d}" for i in range(shape["replicas"])]
        self.addresses = [
            addresses(i, shape["hosts"], shape["ranks"], shape["servers"]) for i in range(len(names))
        ]
        super().__init__([url], token, job, names, len(names))
        self.host, self.port = url.removeprefix("http://").split(":")
        self.status_head = self.head.replace(
            f"/session?replicas={self.total // 2}:{self.total}".encode(), b"/trainer-status"
        )
        self.period_s = LONGEST_PERIOD_S
        self.notices: dict[int, array[float]] = {}  # epoch -> the time when each host got its notice
        self.servers = [
            ServerConnection(self, i, host, number)
            for i in range(len(names))
            for host in range(shape["hosts"])
            for number in range(shape["servers"])
        ]
        self.launchers: list[LauncherConnection] = []
        self.gone: set[int] = set()  # the replicas whose processes have ended
        self.statuses = self.orders = 0

    def member(self, name: str, number: int) -> MemberConnection:
        return HeadSession(self, name, number)

    async def open_all(self, made: "list[ServerConnection] | list[LauncherConnection]") -> None:
        """Open these connections, some hundreds at a time."""
        gate = asyncio.Semaphore(DIALS)

        async def connect(one: "ServerConnection | LauncherConnection") -> None:
            async with gate:
                await self.connect(one)

        async with asyncio.timeout(OPEN_S):
            await asyncio.gather(*map(connect, made))

    async def connect(self, one: "ServerConnection | LauncherConnection") -> None:
        """Connect until the lighthouse accepts it, as the real processes do."""
        loop, own = asyncio.get_running_loop(), (address_of(one.replica, one.host), 0)
        while True:
            one.ready = loop.create_future()
            try:
                await loop.create_connection(lambda: one, self.host, int(self.port), local_addr=own)
                await one.ready
                return
            except OSError:
                await asyncio.sleep(AGAIN_S)

    async def connect_again(self) -> None:
        """Bring back the connections that the lighthouse has ended."""
        while True:
            await asyncio.sleep(AGAIN_S)
            away = [x for x in self.servers if x.transport is None and x.was_open and not x.is_killed]
            if away:
                await self.open_all(away)

    async def tell(self) -> None:
        """Send every server's status once in a period, evenly spread, by the clock."""
        slices = [self.servers[i::SLICES] for i in range(SLICES)]
        due, turn = time.monotonic(), 0
        while True:
            turn, due = turn + 1, due + self.period_s / SLICES
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if time.monotonic() - due > self.period_s:
                due = time.monotonic()  # this process cannot send as many: do not send them all at once
            for server in slices[turn % SLICES]:
                server.tell()

    def end_replica(self, number: int) -> float:
        """End all processes of this replica, as its launchers do after a death; cut off one host."""
        self.gone.add(number)
        session = self.sessions[self.names[number]]
        assert session.transport is not None
        session.open, session.is_killed = False, True
        at = time.monotonic()
        session.transport.abort()
        for server in self.servers:
            if server.replica != number or server.transport is None:
                continue
            if server.host == 1:
                server.is_killed = True
                server.transport.abort()
            else:
                server.tell()  # a change is told at once
        return at

    def host_state(self) -> dict[str, object]:
        state = self.state()
        return state | {
            "servers": sum(x.transport is not None for x in self.servers),
            "launchers": sum(x.transport is not None for x in self.launchers),
            "started": sum(x.says["run"] != "" for x in self.launchers),
        }

    def host_marks(self) -> dict[str, object]:
        found = self.marks()
        notices, self.notices = self.notices, {}
        statuses, self.statuses, orders, self.orders = self.statuses, 0, self.orders, 0
        return found | {
            "notices": {epoch: list(times) for epoch, times in notices.items()},
            "statuses": statuses,
            "orders": orders,
            "period_s": self.period_s,
        }


class ServerConnection(asyncio.Protocol):
    """The connection of one checkpoint server: statuses one way, epochs the other."""

    def __init__(self, crowd: HostCrowd, replica: int, host: int, number: int) -> None:
        self.crowd, self.replica, self.host = crowd, replica, host
        shape = crowd.shape
        first = host * shape["ranks"] + number * shape["ranks"] // shape["servers"]
        self.ranks = range(first, first + shape["ranks"] // shape["servers"])
        self.transport: asyncio.Transport | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.buffer, self.number = b"", 0
        self.was_open = self.is_killed = False
        self.said = ""  # the state of the trainers that was told last; empty: nothing is understood yet
        self.takes_unchanged = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        transport.write(self.crowd.status_head)  # type: ignore[attr-defined]

    def connection_lost(self, error: Exception | None) -> None:
        self.transport, self.buffer, self.said, self.takes_unchanged = None, b"", "", False
        if self.was_open and not self.is_killed:
            self.crowd.lost.append(f"host {self.host} of {self.crowd.names[self.replica]}: {error}")
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(f"a host's connection ended at once: {error}"))

    def data_received(self, data: bytes) -> None:
        data = self.buffer + data if self.buffer else data
        if not self.ready.done():
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self.buffer = data
                return
            if not data.startswith(b"HTTP/1.1 101"):
                self.ready.set_exception(ConnectionError(data[:300].decode(errors="replace")))
                self.transport.abort()  # type: ignore[union-attr]
                return
            self.was_open = True
            self.ready.set_result(None)
            self.tell()
            data = data[end + 4 :]
        at, now = 0, time.monotonic()
        while (frame := frame_at(data, at)) is not None:
            at, code, body = frame
            if code == 1:
                if found := _EPOCH.search(body):
                    self.crowd.notices.setdefault(int(found[1]), array("d")).append(now)
                every = _EVERY.search(body)
                asked_s = float(every[1]) if every else 0.0
                self.takes_unchanged |= b'"StatusTerms"' in body
                self.crowd.period_s = max(PERIOD_S, min(asked_s, LONGEST_PERIOD_S))
            elif code == 9 and self.transport is not None:  # a ping
                self.transport.write(frame_of(body, 0x8A))
            elif code == 8:
                self.crowd.refused.append(body[2:].decode(errors="replace"))
        self.buffer = data[at:]

    def tell(self) -> None:
        if self.transport is None or not self.ready.done():
            return
        self.number += 1
        self.crowd.statuses += 1
        trainer = "gone" if self.replica in self.crowd.gone else "running"
        before, self.said = self.said, trainer
        unchanged = self.takes_unchanged and before == trainer
        body = wire.encode(m.StatusUnchanged(self.number) if unchanged else self.statuses(trainer))
        self.transport.write(frame_of(body))

    def statuses(self, trainer: str) -> m.ServerStatus:
        """The statuses of all ranks of this server."""
        replica = self.crowd.names[self.replica]
        incarnation = self.crowd.sessions[replica].incarnation
        addresses = self.crowd.addresses[self.replica]
        return m.ServerStatus(
            tuple(
                m.TrainerStatus(
                    replica, incarnation, trainer, self.number, addresses[k].ckpt if k else "", rank=k
                )
                for k in self.ranks
            )
        )


class LauncherConnection(asyncio.Protocol):
    """One host's launcher: a held request after the other. It obeys by saying that its ranks run."""

    def __init__(self, crowd: HostCrowd, replica: int, host: int, token: str) -> None:
        self.crowd, self.replica, self.host = crowd, replica, host
        nodes, place = crowd.shape["hosts"], address_of(replica, host)
        self.head = (
            f"POST /v1/jobs/{{}}/nodes HTTP/1.1\r\nHost: lighthouse\r\nAuthorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        )
        self.says = {
            "id": base64.b32encode(os.urandom(10)).decode(),
            "host": f"h{replica}-{host}",
            "number": host,
            "nodes": nodes,
            "shape": f"{nodes} nodes of {crowd.shape['ranks']} ranks",
            "address": f"{place}:29500",
            "run": "",
            "attempt": 0,
            "node": -1,
        }
        self.knows: list[str] | None = None
        self.transport: asyncio.Transport | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.ask()
        self.ready.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self.crowd.lost.append(f"launcher {self.says['host']}: {error}")

    def ask(self) -> None:
        assert self.transport is not None
        body = {"replica": self.crowd.names[self.replica], "says": self.says, "knows": self.knows}
        data = json.dumps(body).encode()
        self.transport.write(self.head.format("scale").encode() + f"{len(data)}\r\n\r\n".encode() + data)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head) if found else None
        if length is None or len(body) < int(length[1]):
            return
        self.buffer = b""
        if not head.startswith(b"HTTP/1.1 200"):
            self.crowd.refused.append(f"{head[:60]!r} {body[:200]!r}")
            return
        order = json.loads(body)
        self.crowd.orders += 1
        self.knows = [order["do"], order["run"], order["why"]]
        if order["do"] == "start":
            self.says |= {"run": order["run"], "attempt": order["attempt"], "node": order["node"]}
            self.knows = None
        self.ask()


async def main(url: str, token: str, job: str, shape: dict[str, int]) -> None:
    crowd = HostCrowd(url, token, job, shape)
    loop = asyncio.get_running_loop()
    began = time.monotonic()
    running = [loop.create_task(crowd.tell()), loop.create_task(crowd.beat())]
    for task in running:
        task.add_done_callback(lambda task: task.cancelled() or task.result())
    await crowd.open_all(crowd.servers)  # those that are open send their statuses meanwhile
    hosts_s = time.monotonic() - began
    running.append(loop.create_task(crowd.connect_again()))
    await crowd.open()
    answer(crowd.host_state() | {"hosts_s": hosts_s})
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async for line in lines:
        word, *rest = line.decode().split()
        if word == "kill":
            answer({"at": crowd.end_replica(int(rest[0]))})
        elif word == "mark":
            answer(crowd.host_marks())
        elif word == "state":
            answer(crowd.host_state())
        elif word == "launch":
            hosts = shape["hosts"]
            made = [LauncherConnection(crowd, i, j, token) for i in range(int(rest[0])) for j in range(hosts)]
            crowd.launchers = made
            await crowd.open_all(made)
            answer({"at": time.monotonic()})
        else:
            break
    for task in (*running, *crowd.kept):
        task.cancel()


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.disable()  # a collection over all connections takes longer than the measured operation
    uvloop.run(main(**json.loads(sys.stdin.readline())))
