"""A TCP proxy on loopback that loses the requests or answers that the test chooses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

CHUNK_BYTES = 1 << 16


class TcpProxy:
    """Forwards to a port. ``mode``, read when a chunk arrives, is one of

    ``pass``   forward both ways;
    ``drop``   forward the request, wait for the first bytes of the answer, and close without them;
    ``mute``   forward the request, and never the answer;
    ``hold``   keep the request until ``release`` is set, then forward it, and never the answer.
    """

    def __init__(self, upstream_port: int) -> None:
        self.mode = "pass"
        self.release = asyncio.Event()
        self.answered = asyncio.Event()
        self.connections = 0
        self.port = 0
        self._upstream_port = upstream_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Reset every open connection."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def serve(self, near_reader: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(near_writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        except OSError:
            near_writer.transport.abort()
            return
        self._writers.add(far_writer)
        ways = (
            asyncio.create_task(self._request(near_reader, far_writer)),
            asyncio.create_task(self._answer(far_reader, near_writer)),
        )
        self._tasks.update(ways)
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if self.mode == "hold":
                await asyncio.wait(ways)
        finally:
            for way in ways:
                way.cancel()
            self._tasks.difference_update(ways)
            for writer in (near_writer, far_writer):
                self._writers.discard(writer)
                writer.transport.abort()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                if self.mode == "hold":
                    await self.release.wait()
                writer.write(chunk)
                await writer.drain()
            if self.mode == "hold":
                # The client has closed its connection; the proxy must still read the whole request.
                await asyncio.wait_for(self.answered.wait(), 10)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                self.answered.set()
                if self.mode == "drop":
                    return
                if self.mode == "pass":
                    writer.write(chunk)
                    await writer.drain()


@asynccontextmanager
async def tcp_proxy(upstream_port: int) -> AsyncIterator[TcpProxy]:
    proxy = TcpProxy(upstream_port)
    serving: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(proxy.serve(reader, writer))
        serving.add(task)
        task.add_done_callback(serving.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for task in tuple(serving):
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await server.wait_closed()
