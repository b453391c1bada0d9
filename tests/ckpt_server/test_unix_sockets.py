"""Connections on a unix socket: each has a task of its own, and a defect ends one connection alone."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from server_support import DEADLINE_S, no_more_descriptors

from fabric.ckpt_server.server.unix_sockets import Response, UnixConnection, serve_each


async def say_back(connection: UnixConnection) -> None:
    """Answer every line; one particular line raises an error, as a defect would."""
    while (line := await connection.receive()) is not None:
        if line == b"break":
            raise RuntimeError("a defect")
        await connection.send(Response({"said": line.decode()}))


@asynccontextmanager
async def served(folder: Path, most: int) -> AsyncIterator[str]:
    """The path of a socket on which ``say_back`` answers."""
    path = str(folder / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        listener.bind(path)
        listener.listen(8)
        serving = asyncio.create_task(serve_each(listener, say_back, most, "somebody"))
        try:
            yield path
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


class Caller:
    """A client that can be made before it connects."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)

    async def connect(self, path: str) -> "Caller":
        await asyncio.get_running_loop().sock_connect(self._socket, path)
        return self

    async def ask(self, line: bytes) -> bytes:
        """Return the answer to ``line``; empty if the other side has closed."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._socket, line + b"\n")
            async with asyncio.timeout(DEADLINE_S):
                return await loop.sock_recv(self._socket, 1000)
        except (BrokenPipeError, ConnectionResetError):
            return b""

    def close(self) -> None:
        self._socket.close()


async def test_connections_over_the_limit_are_closed_and_all_end_with_the_listener(tmp_path):
    async with served(tmp_path, most=2) as path:
        first, second, third, fourth = [await Caller().connect(path) for _ in range(4)]
        assert await first.ask(b"a") == b'{"said":"a"}\n'
        assert await second.ask(b"b") == b'{"said":"b"}\n'
        assert await third.ask(b"c") == await fourth.ask(b"d") == b""
    assert await first.ask(b"a") == await second.ask(b"b") == b""
    for caller in (first, second, third, fourth):
        caller.close()


async def test_a_defect_ends_one_connection_and_is_logged(tmp_path, caplog):
    async with served(tmp_path, most=2) as path:
        first, second = [await Caller().connect(path) for _ in range(2)]
        assert await first.ask(b"break") == b""
        assert await second.ask(b"b") == b'{"said":"b"}\n'
        assert "a defect ended the connection of somebody" in caplog.text
        first.close()
        second.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_connection_without_free_descriptors_is_served_later(tmp_path, caplog, run):
    async def story() -> None:
        async with served(tmp_path, most=2) as path:
            caller = Caller()
            with no_more_descriptors():
                await caller.connect(path)
                async with asyncio.timeout(DEADLINE_S):
                    while "the connection of somebody could not be accepted" not in caplog.text:  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
            assert await caller.ask(b"a") == b'{"said":"a"}\n'
            caller.close()

    run(story())
