"""The server cuts off readers that stop in the middle of an answer, and keeps nothing for them."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web
from server_support import DEADLINE_S, held_ranks, manifest_of

from fabric.ckpt_server.format.safetensors_file import build_preamble
from fabric.ckpt_server.server import routes
from fabric.ckpt_server.server.metrics import CkptMetrics
from fabric.ckpt_server.server.routes import _near, make_app
from fabric.ckpt_server.server.slots import SNAPSHOT, SharedSlot, snapshot_content
from fabric.runtime.http.http_service import serve

NAMES = [f"model/layers.{n}.weight" for n in range(2000)]


def a_file() -> bytes:
    """Many tensors, for a long manifest, and one large one."""
    preamble = build_preamble(
        [("a", "U8", (8 << 20,), 8 << 20), *((name, "U8", (1,), 1) for name in NAMES)], "{}"
    )
    return preamble + os.urandom((8 << 20) + len(NAMES))


@dataclass
class Served:
    port: int
    slot: SharedSlot
    runner: web.AppRunner

    @property
    def connections(self) -> int:
        assert self.runner.server is not None
        return len(self.runner.server.connections)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    ranks, file = held_ranks(tmp_path), a_file()
    memory = ranks.held[0].slots
    slot = memory.slot(SNAPSHOT, 0)
    region = await memory.allocate(slot, len(file))
    os.pwrite(region.fd, file, 0)
    memory.publish(slot, snapshot_content(manifest_of(file, 7), region.view, "job", "http://x"))
    app = make_app(ranks, CkptMetrics(ranks.held), None)

    async def little_room(request: web.Request, _: web.StreamResponse) -> None:
        assert request.transport is not None
        # Make the buffer small: the kernel would buffer megabytes for a reader that reads nothing.
        room = int(request.headers.get("X-Room", "4096"))
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)

    app.on_response_prepare.append(little_room)
    runner, port = await serve(app, "127.0.0.1", 0, cancel_abandoned=True)
    yield Served(port, slot, runner)
    await runner.cleanup()
    memory.close()


async def cut_off(served: "Served") -> None:
    async with asyncio.timeout(DEADLINE_S):
        while served.slot.readers or served.connections:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


class Reader:
    """A client that requests ``path`` and reads only this many bytes of the answer."""

    def __init__(self, port: int) -> None:
        self.line = socket.socket()
        self.line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        self.line.connect(("127.0.0.1", port))
        self.line.setblocking(False)
        self.got = 0

    async def ask(self, path: str, head: str = "") -> None:
        await asyncio.get_running_loop().sock_sendall(
            self.line, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n".encode()
        )

    async def read(self, nbytes: int) -> None:
        while self.got < nbytes:
            data = await asyncio.get_running_loop().sock_recv(self.line, min(4096, nbytes - self.got))
            assert data
            self.got += len(data)


DATA = "/v1/snapshots/7/data"
BY_THREAD = "X-Room: 262144\r\n"  # the kernel takes the first bytes at once, so a thread sends the others
ASKED = {
    "a state": (DATA, ""),
    "a state, by a thread": (DATA, BY_THREAD),
    "a state, compressed": (DATA, "Accept-Encoding: zstd\r\n"),
    "a tensor": ("/v1/snapshots/7/tensors/a", ""),
    "a slice": ("/v1/snapshots/7/tensors/a?slice=1:4000000", ""),
    "a manifest": ("/v1/snapshots/7/manifest", ""),
}


@pytest.mark.parametrize("what", ASKED)
async def test_a_reader_that_stalls_is_cut_off_and_the_slot_released(served, what, monkeypatch):
    monkeypatch.setattr("fabric.ckpt_server.server.routes.STALL_S", 0.2)
    monkeypatch.setattr("fabric.runtime.http.http_service.STALL_S", 0.2)
    reader = Reader(served.port)
    await reader.ask(*ASKED[what])
    await reader.read(100)
    await cut_off(served)
    reader.line.close()


async def test_readers_that_take_nothing_leave_the_sending_threads_to_others(served):
    stalled = [Reader(served.port) for _ in range(2 * routes._SENDERS._max_workers + 1)]
    for reader in stalled:
        await reader.ask(DATA, BY_THREAD)
        await reader.read(100)
    last = Reader(served.port)
    async with asyncio.timeout(DEADLINE_S):
        await last.ask(DATA, BY_THREAD)
        await last.read(8 << 20)
    assert len(served.slot.readers) >= len(stalled)
    for reader in (*stalled, last):
        reader.line.close()
    await cut_off(served)


async def test_a_withdrawal_ends_a_transfer_that_a_thread_sends(served):
    reader = Reader(served.port)
    await reader.ask(DATA, BY_THREAD)
    await reader.read(100)
    assert await served.slot.withdraw() == 1
    assert not served.slot.readers
    async with asyncio.timeout(DEADLINE_S):
        while data := await asyncio.get_running_loop().sock_recv(reader.line, 1 << 20):
            reader.got += len(data)
    assert reader.got < 8 << 20
    await cut_off(served)


def test_similar_names_of_tensors_are_suggested_out_of_a_hundred_thousand():
    known = [f"model/layers.{n}.attention.weight" for n in range(100_000)]
    assert "model/layers.77.attention.weight" in _near("model/layers.77.attention.weigth", known)
    assert _near("nothing like it", known) == []


async def test_only_a_few_readers_have_a_packer_of_their_own(served, monkeypatch):
    streams = threading.BoundedSemaphore(2)
    monkeypatch.setattr(routes, "_STREAMS", streams)
    readers, heads = [Reader(served.port) for _ in range(4)], []
    for reader in readers:
        await reader.ask(DATA, "Accept-Encoding: zstd\r\n")
        head = b""
        while b"\r\n\r\n" not in head:
            head += await asyncio.get_running_loop().sock_recv(reader.line, 1)
        heads.append(b"content-encoding: zstd" in head.lower())
    assert heads == [True, True, False, False]
    for reader in readers:
        reader.line.close()
    await cut_off(served)
    assert [streams.acquire(blocking=False) for _ in range(3)] == [True, True, False]
