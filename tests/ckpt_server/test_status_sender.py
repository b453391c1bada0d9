"""The status sender sends messages to real WebSockets when the trainer stops, ends and comes back."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from server_support import ROOT, TOKEN, TrainerProcess, end, wait_for

from fabric.protocol.messages import wire
from fabric.protocol.messages.network import (
    HeartbeatAck,
    ServerStatus,
    StatusTerms,
    StatusUnchanged,
    TrainerStatus,
)
from fabric.runtime.http.http_service import bearer_required, errors_as_json, serve

_DEADLINE_S = 30.0


class Lighthouse:
    """Receives statuses as a lighthouse does; ``leader``, when set, is another lighthouse to redirect to."""

    def __init__(self) -> None:
        self.statuses: list[TrainerStatus] = []
        self.messages: list[TrainerStatus | ServerStatus] = []
        self.requests: list[str] = []
        self.leader = ""
        self.url = ""
        self._sockets: set[web.WebSocketResponse] = set()
        self._news = asyncio.Event()

    async def status(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request.path_qs)
        self._wake()
        if self.leader:
            raise web.HTTPTemporaryRedirect(self.leader + request.path_qs)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self._sockets.add(socket)
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                break
            beat = wire.decode(message.data)
            assert isinstance(beat, TrainerStatus | ServerStatus)
            self.messages.append(beat)
            self.statuses.extend([beat] if isinstance(beat, TrainerStatus) else beat.statuses)
            self._wake()
            await socket.send_str(wire.encode(HeartbeatAck(len(self.messages))).decode())
        self._sockets.discard(socket)
        return socket

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def until(self, condition: Callable[[TrainerStatus], bool]) -> TrainerStatus:
        """Return the next status that meets ``condition``."""
        return await self._next(self.statuses, condition)

    async def until_message(self, condition: Callable[[TrainerStatus | ServerStatus], bool]) -> None:
        """Wait for the next message that meets ``condition``: the statuses of all ranks."""
        await self._next(self.messages, condition)

    async def _next(self, heard: list[Any], condition: Callable[[Any], bool]) -> Any:
        at = len(heard)
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                for beat in heard[at:]:
                    if condition(beat):
                        return beat
                at = len(heard)
                await self._news.wait()

    async def hang_up(self) -> None:
        for socket in tuple(self._sockets):
            await socket.close()


@asynccontextmanager
async def lighthouse(token: str | None = None) -> AsyncIterator[Lighthouse]:
    one = Lighthouse()
    app = web.Application(middlewares=[errors_as_json, bearer_required(token, frozenset())])
    app.router.add_get("/v1/jobs/{job}/trainer-status", one.status)
    runner, port = await serve(app, "127.0.0.1", 0, shutdown_s=0.2)
    one.url = f"http://127.0.0.1:{port}"
    try:
        yield one
    finally:
        await one.hang_up()
        await runner.cleanup()


@asynccontextmanager
async def trainer(run_dir: Path, **others: object) -> AsyncIterator[TrainerProcess]:
    process = await asyncio.to_thread(TrainerProcess, run_dir, **others)
    try:
        yield process
    finally:
        await asyncio.to_thread(process.end)


async def test_the_status_follows_a_trainer_that_stops_goes_on_dies_and_is_replaced(run_dir):
    async with lighthouse() as one:
        async with trainer(run_dir, incarnation=11, lighthouse=[one.url]) as first:
            beat = await one.until(lambda p: p.trainer == "running")
            assert (beat.replica, beat.incarnation, beat.ckpt) == ("r0", 11, first.hello["url"])
            assert one.requests == ["/v1/jobs/job/trainer-status?replica=r0"]
            await asyncio.to_thread(first.do, "publish", slot=0, nbytes=1000, step=40)
            with_snapshot = await one.until(lambda p: bool(p.snapshots))
            assert [(s.generation, s.step, len(s.digest)) for s in with_snapshot.snapshots] == [(1, 40, 32)]
            first.signal(signal.SIGSTOP)
            await one.until(lambda p: p.trainer == "stopped")
            first.signal(signal.SIGCONT)
            await one.until(lambda p: p.trainer == "running")
            first.signal(signal.SIGSTOP)
            await one.until(lambda p: p.trainer == "stopped")
            first.signal(signal.SIGKILL)  # the trainer is not reaped: a zombie counts as gone too
            gone = await one.until(lambda p: p.trainer == "gone")
            assert (gone.incarnation, gone.snapshots) == (11, with_snapshot.snapshots)
        async with trainer(run_dir, incarnation=12, lighthouse=[one.url]):
            back = await one.until(lambda p: p.trainer == "running")
            assert (back.incarnation, back.snapshots) == (12, with_snapshot.snapshots)
        numbers = [p.number for p in one.statuses]
        assert numbers == sorted(set(numbers))


async def test_before_any_trainer_has_attached_the_status_says_absent(run_dir):
    async with lighthouse() as one:
        arguments = ["-m", "fabric.ckpt_server", "--job=a/b", "--replica=r 0", f"--run-dir={run_dir}"]
        server = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, f"--lighthouse={one.url}", cwd=ROOT, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            beat = await one.until(lambda p: True)
            assert (beat.trainer, beat.incarnation, beat.replica) == ("absent", 0, "r 0")
            assert one.requests[0] == "/v1/jobs/a%2Fb/trainer-status?replica=r%200"
        finally:
            server.terminate()
            assert await server.wait() == 0


async def test_the_sender_follows_the_redirect_to_the_leader_and_shows_the_token_there(run_dir, tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    async with lighthouse(TOKEN) as follower, lighthouse(TOKEN) as leader:
        follower.leader = leader.url
        found = {"token_file": token, "lighthouse": [follower.url]}
        async with trainer(run_dir, **found):
            await leader.until(lambda p: p.trainer == "running")
            assert follower.requests and not follower.statuses


async def test_lost_connections_are_made_again_and_dead_addresses_skipped(run_dir):
    async with lighthouse() as gone:
        dead = gone.url
    async with (
        lighthouse() as one,
        lighthouse() as other,
        trainer(run_dir, lighthouse=[dead, one.url, other.url]),
    ):
        await one.until(lambda p: True)
        assert not other.statuses
        await one.hang_up()
        await other.until(lambda p: True)
        await other.hang_up()
        beat = await one.until(lambda p: True)
        assert beat.number > max(p.number for p in other.statuses[:1])


async def test_a_wrong_token_is_logged_once_and_the_server_serves_on(run_dir, tmp_path):
    token = tmp_path / "token"
    token.write_text("another")
    token.chmod(0o600)
    async with lighthouse(TOKEN) as one, trainer(run_dir, token_file=token, lighthouse=[one.url]) as process:
        log = run_dir / "ckpt-server.log"
        await asyncio.to_thread(wait_for, lambda: "is interrupted" in log.read_text(), "a line")
        await asyncio.to_thread(process.do, "publish", slot=0, nbytes=1000, step=1)
        assert not one.statuses
        assert log.read_text().count("is interrupted") == 1


async def test_what_has_not_changed_is_said_in_few_bytes_where_the_lighthouse_understands_it(run_dir):
    heard: asyncio.Queue[TrainerStatus | StatusUnchanged] = asyncio.Queue()
    terms = wire.encode(StatusTerms(0.25)).decode()

    async def status(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                heard.put_nowait(wire.decode(message.data))
                await socket.send_str(terms)
        return socket

    async def until(condition: Callable[[TrainerStatus | StatusUnchanged], bool]) -> None:
        async with asyncio.timeout(_DEADLINE_S):
            while not condition(await heard.get()):
                pass

    app = web.Application()
    app.router.add_get("/v1/jobs/{job}/trainer-status", status)
    runner, port = await serve(app, "127.0.0.1", 0, shutdown_s=0.2)
    try:
        async with trainer(run_dir, lighthouse=[f"http://127.0.0.1:{port}"]) as process:
            await until(lambda x: isinstance(x, TrainerStatus) and x.trainer == "running")
            await until(lambda x: isinstance(x, StatusUnchanged))
            await asyncio.to_thread(process.do, "publish", slot=0, nbytes=1000, step=7)
            await until(lambda x: isinstance(x, TrainerStatus) and [s.step for s in x.snapshots] == [7])
            await until(lambda x: isinstance(x, StatusUnchanged))  # although the snapshot grows older
            process.signal(signal.SIGSTOP)
            await until(lambda x: isinstance(x, TrainerStatus) and x.trainer == "stopped")
            process.signal(signal.SIGCONT)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("reply", ["x" * 100_000, "\x00nonsense"])
async def test_unexpected_replies_do_not_stop_the_status_sender(run_dir, reply):
    beats = asyncio.Queue()

    async def status(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                beats.put_nowait(message.data)
                await socket.send_str(reply)
        return socket

    app = web.Application()
    app.router.add_get("/v1/jobs/{job}/trainer-status", status)
    runner, port = await serve(app, "127.0.0.1", 0, shutdown_s=0.2)
    try:
        async with trainer(run_dir, lighthouse=[f"http://127.0.0.1:{port}"]) as process:
            async with asyncio.timeout(_DEADLINE_S):
                for _ in range(4):
                    await beats.get()
            pid = process.hello["pid"]
            await asyncio.to_thread(end, pid)
    finally:
        await runner.cleanup()
