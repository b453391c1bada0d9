"""The common part of the lighthouse's tests: real lighthouse processes, and members that speak the wire
protocol."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from forked_processes import ForkedProcess, run_python, start_lighthouse

from fabric.model import DataPlan, Record
from fabric.protocol.messages import network as m
from fabric.protocol.messages import roster_delta, wire

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-for-tests"
DEADLINE_S = 30.0


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Poll until ``condition`` is true and return its value; fail at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.01)
    return value


async def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Poll a coroutine function until it returns true, without blocking the event loop."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := await condition()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        await asyncio.sleep(0.01)
    return value


@dataclass
class LighthouseProcess:
    """One lighthouse; ``with`` starts and ends it. The token, log and ready file of the lighthouse lie in
    ``folder``.
    """

    folder: Path
    store: str
    name: str = "lighthouse"
    arguments: tuple[str, ...] = ()
    process: ForkedProcess | None = field(default=None, repr=False)
    url: str = ""

    def __enter__(self) -> "LighthouseProcess":
        self.launch()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        if self.process is not None:
            self.process.wait(DEADLINE_S)

    @property
    def token_file(self) -> Path:
        path = self.folder / "token"
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(TOKEN + "\n")
        return path

    @property
    def ready_file(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text()

    def launch(self, port: str = "0") -> None:
        self.ready_file.unlink(missing_ok=True)
        arguments = ["--store", self.store]
        arguments += ["--token-file", str(self.token_file), "--ready-file", str(self.ready_file)]
        # Test members send few heartbeats, and the machine may be loaded: silence must not evict them.
        arguments += ["--limit", "silence-s=60", "--bind", f"127.0.0.1:{port}", *self.arguments]
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = start_lighthouse(arguments, log)

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, f"the lighthouse ended:\n{self.log}"
            return self.ready_file.exists()

        wait_for(is_ready, "the ready file")
        self.url = json.loads(self.ready_file.read_text())["url"]

    @property
    def port(self) -> str:
        return str(urlsplit(self.url).port)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send the signal, wait, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


def headers(token: str | None = TOKEN) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token is not None else {}


async def get(
    http: aiohttp.ClientSession, url: str, token: str | None = TOKEN, **more: Any
) -> tuple[int, Any]:
    """Return the status and JSON body of a request; follow no redirect."""
    async with http.get(url, headers=headers(token), allow_redirects=False, **more) as answer:
        return answer.status, await answer.json()


async def post(
    http: aiohttp.ClientSession, url: str, body: Any, token: str | None = TOKEN
) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body)
    sent = {**headers(token), "Content-Type": "application/json"}
    async with http.post(url, data=data, headers=sent, allow_redirects=False) as answer:
        return answer.status, await answer.json()


class WireMember:
    """One replica's session over a real WebSocket; ``newest`` is the newest epoch that it got."""

    def __init__(self, http: aiohttp.ClientSession, url: str, replica: str, **others: Any) -> None:
        self.job = others.pop("job", "job")
        self.replicas = others.pop("replicas", "3")
        self._http = http
        self._url = url
        self.session = m.OpenSession(
            replica=replica,
            incarnation=others.pop("incarnation", 1),
            generation=others.pop("generation", 0),
            step=others.pop("step", 0),
            digest="",
            epoch=0,
            link=f"127.0.0.1:{9000 + len(replica)}",
            ckpt=f"http://{replica}.test:9999",
            micro_batches=others.pop("micro_batches", 6),
            **others,
        )
        self.newest: Record | None = None
        self.socket: aiohttp.ClientWebSocketResponse | None = None

    @property
    def replica(self) -> str:
        return self.session.replica

    async def open(self, url: str = "") -> "WireMember":
        self.socket = await connect(
            self._http, url or self._url, self.job, f"session?replicas={self.replicas}"
        )
        await self.say(self.session)
        return self

    async def say(self, message: m.Message) -> None:
        await self.socket.send_str(wire.encode(message).decode())

    async def next(self, kind: Any) -> Any:
        """Return the next message of this kind; skip others, but remember epochs."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                frame = await self.socket.receive()
                assert frame.type is aiohttp.WSMsgType.TEXT, (
                    f"{self.replica}: {frame} while waiting for {kind}"
                )
                message = wire.decode(frame.data)
                if isinstance(message, m.Epoch):
                    self.newest = message.record
                elif isinstance(message, m.RosterDelta):
                    self.newest = roster_delta.applied(message, self.newest) or self.newest
                if isinstance(message, kind):
                    return message

    async def epoch(self, number: int) -> Record:
        """Wait until this member gets this epoch or a later one."""
        while self.newest is None or self.newest.epoch < number:
            await self.next(m.Epoch | m.RosterDelta)
        return self.newest

    async def report(self) -> None:
        """Report for the newest forced epoch, as a member that has entered no round of it."""
        fence = self.newest.fence
        step = self.newest.base.step
        await self.say(m.Report(fence, fence.generation, step, "", 0, 0, (), False, "", (), DataPlan(4)))

    async def run(self) -> None:
        """Enter the first round of the newest epoch, and send one heartbeat."""
        fence = self.newest.fence
        await self.say(m.Running(fence, self.newest.base.step))
        await self.say(m.Heartbeat(1, fence.epoch, fence.generation, self.newest.base.step, phase="run"))
        await self.next(m.HeartbeatAck)

    async def close_reason(self) -> tuple[int | None, str]:
        """Read until the socket is closed; return the close code and reason."""
        return await closing(self.socket)

    def cut(self) -> None:
        """End the connection as the kernel does for a killed process."""
        self.socket.get_extra_info("socket").setsockopt(*_LINGER_ZERO)
        self.socket._response.connection.transport.abort()

    async def close(self) -> None:
        if self.socket is not None:
            await self.socket.close()


class WireStatus:
    """One checkpoint server's connection."""

    def __init__(self, http: aiohttp.ClientSession, url: str, replica: str, job: str = "job") -> None:
        self._http, self._url, self._job = http, url, job
        self.replica = replica
        self.number = 0
        self.socket: aiohttp.ClientWebSocketResponse | None = None

    async def open(self) -> "WireStatus":
        self.socket = await connect(
            self._http, self._url, self._job, f"trainer-status?replica={self.replica}"
        )
        return self

    async def beat(self, trainer: str = "running", incarnation: int = 1, **more: object) -> None:
        self.number += 1
        url = f"http://{self.replica}.test:9999"
        status = m.TrainerStatus(self.replica, incarnation, trainer, self.number, url, **more)
        await self.socket.send_str(wire.encode(status).decode())

    async def say_unchanged(self) -> None:
        self.number += 1
        await self.socket.send_str(wire.encode(m.StatusUnchanged(self.number)).decode())

    async def keep_beating(self, say: Callable[[], Awaitable[None]] | None = None) -> None:
        """Send statuses until cancelled, as a real checkpoint server does."""
        while True:
            await (say or self.beat)()
            await asyncio.sleep(0.05)


async def connect(
    http: aiohttp.ClientSession, url: str, job: str, path: str, token: str | None = TOKEN
) -> aiohttp.ClientWebSocketResponse:
    return await http.ws_connect(f"{url}/v1/jobs/{job}/{path}", headers=headers(token), max_msg_size=0)


async def closing(socket: aiohttp.ClientWebSocketResponse) -> tuple[int | None, str]:
    """Read until the close frame; return its code and reason."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            frame = await socket.receive()
            if frame.type is aiohttp.WSMsgType.CLOSE:
                return frame.data, frame.extra or ""
            if frame.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR, aiohttp.WSMsgType.CLOSING):
                return socket.close_code, ""


async def start_job(http: aiohttp.ClientSession, url: str, count: int = 3, **others: Any) -> list[WireMember]:
    """Start a job whose members all run in epoch 1."""
    members = [WireMember(http, url, f"r{i}", replicas=str(count), **others) for i in range(count)]
    for member in members:
        await member.open()
    for member in members:
        await member.epoch(1)
        await member.report()
    for member in members:
        await member.next(m.Resume)
        await member.run()
    return members


async def close_all(members: list[WireMember]) -> None:
    for member in members:
        with suppress(ConnectionError):
            await member.close()


# SOL_SOCKET, SO_LINGER: closing sends a reset instead of an orderly end
_LINGER_ZERO = (1, 13, b"\1\0\0\0\0\0\0\0")


FABRIC = [sys.executable, "-m", "fabric.cli.main"]


def fabric(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("FABRIC_")}
    own = {**plain, "COLUMNS": "200", **environment}
    return run_python("-m", "fabric.cli.main", *map(str, arguments), environment=own, cwd=str(ROOT))


def sentence_of(result: subprocess.CompletedProcess) -> str:
    """Return the last line of a refused command, after its log."""
    assert result.returncode == 1, result
    assert "Traceback" not in result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and result.stderr.rstrip().endswith(said[0])
    return said[0]
