"""Snapshots for readers on the same host: read out of the server's memory, not sent over the network.

The server listens on a unix socket whose name is a hash of the server's host and port. The name is abstract:
it vanishes with its process, and only processes in one network namespace can reach it, so every reader is on
this host. The server checks with the kernel that the reader runs as the same user, and then checks the job's
token. It answers with a read-only descriptor of the memory. The slot counts as read while the connection
lasts. The server ends the connection when it withdraws the slot.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fabric.ckpt_server.server.slots import SNAPSHOT, SlotTable
from fabric.ckpt_server.server.unix_sockets import Response, UnixConnection, serve_each
from fabric.ckpt_server.wire.channel_protocol import LOCAL_ASK_S, decode_line, local_socket_name
from fabric.errors import FabricError, Gone, Refused
from fabric.model import Int64
from fabric.protocol.messages.wire import decode_as
from fabric.runtime.http.http_service import check_bearer
from fabric.runtime.http.token_file import TokenFile

log = logging.getLogger(__name__)

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
