"""Unix sockets for requests of other processes of this host: a line in, a line and a descriptor out."""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from fabric.ckpt_server.wire.channel_protocol import MAX_FIRST_LINE_BYTES, LineBuffer, encode_line

log = logging.getLogger(__name__)

_SEND_S = 30.0
_RECEIVE_BYTES = 256 * 1024
_PEER_CREDENTIALS = struct.Struct("iII")
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
        data = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        pid, uid, _ = _PEER_CREDENTIALS.unpack(data)
        return pid, uid

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
