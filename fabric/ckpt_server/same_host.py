"""Snapshots for readers on the same host: read out of the server's memory, not sent over the network.

A server also listens on a unix socket that is named by its URL. The name is abstract: it ends with its
process and can be reached within one network namespace only, so whoever reaches it is on this host. Each side
asks the kernel who the other one is, and wants its own user; the reader shows the job's token after that, and
says which state it means. It gets a read-only descriptor of the memory and reads that as a file.

The connection stays while it reads: the slot counts as read, and the end of the connection says that the slot
was withdrawn. What is read after that may be another state, or half of one. So nothing is believed without
the digest that the manifest promises, and what has it is right, whatever has happened since.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import xxhash

from fabric.ckpt_server.connections import Connection, Response, serve_each
from fabric.ckpt_server.lines import MAX_FIRST_LINE_BYTES, LineBuffer, decode_line, encode_line
from fabric.ckpt_server.memory import SNAPSHOT, Memory
from fabric.errors import FabricError, Gone, Refused
from fabric.model import SnapshotRef
from fabric.protocol.wire import decode_as
from fabric.runtime.token_file import TokenFile
from fabric.runtime.web import check_bearer

log = logging.getLogger(__name__)

_ASK_S = 5.0
# A reader that says nothing in this time is cut off: it would keep the slot from being used again.
STALL_S = 60.0
_MOST_READERS = 64
_CREDENTIALS = struct.Struct("iII")
_SIGN = b"."  # a reader's: it reads still


@dataclass(frozen=True, slots=True)
class Look:
    """A reader's request. ``digest``: of the file, as its manifest says."""

    generation: int
    step: int
    digest: str
    token: str


def name_of(place: str) -> str:
    """The unix socket's name of the server that is reached at ``place``, which is host:port."""
    return f"\0fabric-ckpt-{xxhash.xxh3_128_hexdigest(place.encode())}"


class Door:
    """The server's side."""

    def __init__(self, memory: Memory, token: TokenFile | str | None, stall_s: float = STALL_S) -> None:
        self._memory = memory
        self._tokens = TokenFile.of(token)
        self._stall_s = stall_s

    @asynccontextmanager
    async def open(self, place: str) -> AsyncIterator[None]:
        """Let readers in while the block lasts; ``place`` is the host:port that readers dial. Where somebody
        else has taken the socket's name, readers come over HTTP alone."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.setblocking(False)
            try:
                listener.bind(name_of(place))
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

    async def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            try:
                async with asyncio.timeout(_ASK_S):
                    line = await connection.receive()
                if line is not None:
                    await self._show(connection, decode_as(Look, decode_line(line), "look"))
            except FabricError as error:
                await connection.send(Response({"ok": False, "error": str(error)}))

    async def _show(self, connection: Connection, look: Look) -> None:
        _, uid = connection.peer()
        if uid != os.geteuid():
            raise Refused("this is another user's memory: ask over HTTP")
        if not self._tokens.is_open:
            check_bearer(f"Bearer {look.token}", self._tokens)
        slot = self._memory.find(SNAPSHOT, look.step, look.generation)
        if slot is None or slot.region is None or slot.content is None or slot.content.digest != look.digest:
            raise Gone(f"step {look.step} of generation {look.generation} with that digest is not held here")
        with slot.reading(connection.shut):
            # Opened anew, for who only reads needs no descriptor that can be written to.
            descriptor = os.open(f"/proc/self/fd/{slot.region.fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                await connection.send(Response({"ok": True, "nbytes": slot.content.nbytes}, descriptor))
            finally:
                os.close(descriptor)
            while True:
                async with asyncio.timeout(self._stall_s):
                    if not await connection.hear():
                        return


class HostMemory:
    """The reader's side: one snapshot in the memory of a server on this host. Any thread may read."""

    def __init__(self, connection: socket.socket, descriptor: int) -> None:
        self._connection = connection
        self._descriptor = descriptor

    @classmethod
    def find(cls, place: str, state: SnapshotRef, token: str, nbytes: int) -> "HostMemory | None":
        """That of the server at ``place`` (host:port), if it holds ``state`` (its digest is the file's), of
        ``nbytes``; None where there is no such thing here: HTTP says why."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_ASK_S)
            connection.connect(name_of(place))
            if _user_of(connection) != os.geteuid():
                raise Refused("another user's process listens there")
            look = {
                "generation": state.generation,
                "step": state.step,
                "digest": state.digest,
                "token": token,
            }
            connection.sendall(encode_line(look))
            descriptor = _receive(connection)
            found = cls(connection, descriptor)
            if os.fstat(descriptor).st_size < nbytes:
                found.close()
                return None
            return found
        except (OSError, FabricError) as error:
            log.debug("%s is not read from its memory: %s", place, error)
            connection.close()
            return None

    def body(self, begin: int) -> "MemoryBody":
        """The bytes from ``begin`` on."""
        return MemoryBody(self._descriptor, begin)

    def still_there(self) -> bool:
        """Whether what was read so far is the state that was asked for; tells the server that we read on."""
        try:
            self._connection.send(_SIGN, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:  # it has not looked for a while: so it has not withdrawn the slot either
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """The slot may be used again. Nobody may be reading."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._connection.close()


class MemoryBody:
    """A snapshot's bytes, one after the other, as of a response's body."""

    def __init__(self, descriptor: int, begin: int) -> None:
        self._descriptor = descriptor
        self._at = begin

    def read(self, into: memoryview) -> None:
        """Fills ``into``. Raises ConnectionError where the memory ends too early."""
        while len(into):
            # Not mapped: the kernel copies as fast, and needs no page tables for it.
            count = os.preadv(self._descriptor, [into], self._at)
            if not count:
                raise ConnectionError(f"its memory ends {len(into)} bytes too early")
            self._at, into = self._at + count, into[count:]


def _user_of(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


def _receive(connection: socket.socket) -> int:
    """The descriptor that was sent. Raises OSError or FabricError where there is none."""
    lines, descriptors = LineBuffer(MAX_FIRST_LINE_BYTES), list[int]()
    try:
        while (line := lines.next_line()) is None:
            data, received, _, _ = socket.recv_fds(connection, 4096, 4)
            descriptors += received
            if not data:
                raise ConnectionResetError("it has closed the connection")
            lines.feed(data)
        if decode_line(line).get("ok") is not True or len(descriptors) != 1:
            raise Refused("it shows nothing")
        return descriptors.pop()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
