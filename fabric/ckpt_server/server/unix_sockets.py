"""Unix sockets for requests of other processes of this host: a line in, a line and a descriptor out."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fabric.ckpt_server.server.slots import SNAPSHOT, SlotTable
from fabric.ckpt_server.wire.channel_protocol import (
    LOCAL_ASK_S,
    MAX_FIRST_LINE_BYTES,
    LineBuffer,
    decode_line,
    encode_line,
    local_socket_name,
)
from fabric.errors import FabricError, Gone, Refused
from fabric.model import Int64
from fabric.protocol.messages.wire import decode_as
from fabric.runtime.http.http_service import check_bearer
from fabric.runtime.http.token_file import TokenFile
from fabric.runtime.private_folder import peer_of

log = logging.getLogger(__name__)

_SEND_S = 30.0
_RECEIVE_BYTES = 256 * 1024
# The pause after the process ran out of file descriptors, because no event reports a free descriptor.
_LOOK_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Response:
    """A line ``body``, with the descriptor ``fd`` (-1: none)."""

    body: Mapping[str, object]
    fd: int = -1


class UnixConnection:
    """One accepted socket; lines in, responses out."""

    def __init__(self, accepted: socket.socket) -> None:
        self._socket = accepted
        self._lines = LineBuffer(MAX_FIRST_LINE_BYTES)

    def limit(self, limit_bytes: int) -> None:
        """Bound later lines by ``limit_bytes``."""
        self._lines.limit_bytes = limit_bytes

    def peer(self) -> tuple[int, int]:
        """Return the (pid, uid) of the connected process, from the kernel."""
        return peer_of(self._socket)

    async def receive(self) -> bytes | None:
        """Return the next line, or None at the end. Raises ProtocolError for a line that is too long."""
        while (line := self._lines.next_line()) is None:
            data = await asyncio.get_running_loop().sock_recv(self._socket, _RECEIVE_BYTES)
            if not data:
                return None
            self._lines.feed(data)
        return line

    async def hear(self) -> bool:
        """Wait for any bytes and drop them; return False at the end."""
        return bool(await asyncio.get_running_loop().sock_recv(self._socket, _RECEIVE_BYTES))

    async def send(self, response: Response) -> None:
        """Send the response. Raises TimeoutError or ConnectionError for a peer that does not read."""
        line = encode_line(response.body)
        if response.fd >= 0:
            try:
                sent = socket.send_fds(self._socket, [line], [response.fd])
            except BlockingIOError:
                raise ConnectionAbortedError("the trainer does not read its responses") from None
            line = line[sent:]
        if line:
            async with asyncio.timeout(_SEND_S):
                await asyncio.get_running_loop().sock_sendall(self._socket, line)

    def shut(self) -> None:
        """End the connection; the task that reads it sees the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


async def serve_each(
    listener: socket.socket, serve: Callable[[UnixConnection], Awaitable[None]], most: int, who: str
) -> None:
    """Accept connections until cancelled, and ``serve`` each in a task, which a cancellation ends too.

    With ``most`` connections open, close a new connection at once. ``who``: the peers' name in the log.
    """
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    async def serve_one(connection: UnixConnection) -> None:
        try:
            await serve(connection)
        except Exception:  # a defect in one connection must not end other connections
            log.exception("a defect ended the connection of %s", who)
        finally:
            connection.close()

    try:
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("the connection of %s could not be accepted: %s", who, error)
                await asyncio.sleep(_LOOK_AGAIN_S)
                continue
            if len(tasks) >= most:
                accepted.close()
                continue
            accepted.setblocking(False)
            tasks.add(task := asyncio.create_task(serve_one(UnixConnection(accepted))))
            task.add_done_callback(tasks.discard)
    finally:
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# Snapshots for readers on the same host: read out of the server's memory, not sent over the network.
#
# The server listens on a unix socket whose name is a hash of the server's host and port. The name is
# abstract: it vanishes with its process, and only processes in one network namespace can reach it, so
# every reader is on this host. The server checks with the kernel that the reader runs as the same user,
# and then checks the job's token. It answers with a read-only descriptor of the memory. The slot counts
# as read while the connection lasts. The server ends the connection when it withdraws the slot.


# A reader that sends nothing in this time is cut off, because the server cannot reuse a slot during a read.
STALL_S = 60.0
_MOST_READERS = 64


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A reader's request. ``digest``: the file's digest, from its manifest."""

    generation: Int64
    step: Int64
    digest: str
    token: str


class LocalReadServer:
    """Gives readers on this host descriptors of published snapshots."""

    def __init__(self, memory: SlotTable, token: TokenFile | str | None, stall_s: float = STALL_S) -> None:
        self._memory = memory
        self._tokens = TokenFile.of(token)
        self._stall_s = stall_s

    @asynccontextmanager
    async def open(self, place: str) -> AsyncIterator[None]:
        """Serve readers while the block lasts; ``place`` is the host:port that readers dial. Where another
        process has taken the socket's name, readers have only HTTP."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.setblocking(False)
            try:
                listener.bind(local_socket_name(place))
            except OSError as error:
                log.warning(
                    "another process has the socket for readers on this host (%s): they read over HTTP",
                    error.strerror,
                )
                yield
                return
            listener.listen(_MOST_READERS)
            serving = asyncio.create_task(serve_each(listener, self._serve, _MOST_READERS, "a reader"))
            try:
                yield
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

    async def _serve(self, connection: UnixConnection) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            try:
                async with asyncio.timeout(LOCAL_ASK_S):
                    line = await connection.receive()
                if line is not None:
                    await self._show(connection, decode_as(ReadRequest, decode_line(line), "look"))
            except FabricError as error:
                await connection.send(Response({"ok": False, "error": str(error)}))

    async def _show(self, connection: UnixConnection, look: ReadRequest) -> None:
        _, uid = connection.peer()
        if uid != os.geteuid():
            raise Refused("this is another user's memory: ask over HTTP")
        if not self._tokens.is_open:
            check_bearer(f"Bearer {look.token}", self._tokens)
        slot = self._memory.find(SNAPSHOT, look.step, look.generation)
        if slot is None or slot.memfd is None or slot.content is None or slot.content.digest != look.digest:
            raise Gone(f"step {look.step} of generation {look.generation} with that digest is not held here")
        with slot.reading(connection.shut):
            # Open the slot's memory again, read-only: a reader must not get a writable descriptor.
            descriptor = os.open(f"/proc/self/fd/{slot.memfd.fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                await connection.send(Response({"ok": True, "nbytes": slot.content.nbytes}, descriptor))
            finally:
                os.close(descriptor)
            while True:
                async with asyncio.timeout(self._stall_s):
                    if not await connection.hear():
                        return
