"""The server's unix sockets: the channels to its trainers, and snapshots for readers on this host.

On the channel each request of the trainer gets one response before the next request.

The socket lies in a folder of mode 0700, and the kernel names the peer's user and pid. One trainer of each
rank at a time is attached. The server refuses a second one until the first one ends or closes its channel,
because two writers would mix their snapshots. Memory travels as file descriptors. The server decodes requests
strictly; it answers a malformed request with a sentence, and changes nothing.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from msgspec import to_builtins

from fabric.ckpt_server.format.safetensors_file import MAX_FILE_BYTES
from fabric.ckpt_server.server.local_ranks import LocalRank, LocalRanks
from fabric.ckpt_server.server.slots import (
    GRADIENT,
    SNAPSHOT,
    SharedSlot,
    gradient_content,
    snapshot_content,
)
from fabric.ckpt_server.server.trainer_watch import ABSENT, GONE
from fabric.ckpt_server.wire.channel_protocol import (
    LOCAL_ASK_S,
    MAX_FIRST_LINE_BYTES,
    MAX_LINE_BYTES,
    DurableJob,
    LineBuffer,
    encode_line,
    local_socket_name,
)
from fabric.errors import FabricError, Gone, ProtocolError, Refused
from fabric.model import Int64, JobEnd, Value
from fabric.protocol.messages.wire import decode_as, decode_line
from fabric.runtime.http.http_service import check_bearer
from fabric.runtime.http.token_file import TokenFile
from fabric.runtime.private_folder import peer_of

# Unix sockets for requests of other processes of this host: a line in, a line and a descriptor out.


log = logging.getLogger(__name__)

_SEND_S = 30.0
_RECEIVE_BYTES = 256 * 1024
# The pause after the process ran out of file descriptors, because no event reports a free descriptor.
_LOOK_AGAIN_S = 0.1


class Response(Value):
    """A line ``body``, with the descriptor ``fd`` (-1: none)."""

    body: Mapping[str, object]
    fd: int = -1


class UnixConnection:
    """One accepted socket; lines in, responses out."""

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.lines = LineBuffer(MAX_FIRST_LINE_BYTES)

    async def receive(self) -> bytes | None:
        """Return the next line, or None at the end. Raises ProtocolError for a line that is too long."""
        while (line := self.lines.next_line()) is None:
            data = await asyncio.get_running_loop().sock_recv(self.socket, _RECEIVE_BYTES)
            if not data:
                return None
            self.lines.feed(data)
        return line

    async def hear(self) -> bool:
        """Wait for any bytes and drop them; return False at the end."""
        return bool(await asyncio.get_running_loop().sock_recv(self.socket, _RECEIVE_BYTES))

    async def send(self, response: Response) -> None:
        """Send the response. Raises TimeoutError or ConnectionError for a peer that does not read."""
        line = encode_line(response.body)
        if response.fd >= 0:
            try:
                sent = socket.send_fds(self.socket, [line], [response.fd])
            except BlockingIOError:
                raise ConnectionAbortedError("the trainer does not read its responses") from None
            line = line[sent:]
        if line:
            async with asyncio.timeout(_SEND_S):
                await asyncio.get_running_loop().sock_sendall(self.socket, line)

    def shut(self) -> None:
        """End the connection; the task that reads it sees the end."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


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
            connection.socket.close()

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


class ReadRequest(Value):
    """A reader's request. ``digest``: the file's digest, from its manifest."""

    generation: Int64
    step: Int64
    digest: str
    token: str


class LocalReadServer:
    """Gives readers on this host descriptors of published snapshots."""

    def __init__(
        self, ranks: Mapping[int, LocalRank], token: TokenFile | str | None, stall_s: float = STALL_S
    ) -> None:
        self._ranks = ranks
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
        _, uid = peer_of(connection.socket)
        if uid != os.geteuid():
            raise Refused("this is another user's memory: ask over HTTP")
        if not self._tokens.is_open:
            check_bearer(f"Bearer {look.token}", self._tokens)
        slots = (x.slots.find(SNAPSHOT, look.step, look.generation) for x in self._ranks.values())
        slot = next((x for x in slots if x and x.content and x.content.digest == look.digest), None)
        if slot is None or slot.memfd is None or slot.content is None:
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


_MAX_CONNECTIONS = 512
_ATTACH_S = 10.0
_OPERATIONS = (
    "allocate, begin, publish_snapshot, publish_gradient, persist, durable, void, finish, gone, ping"
)


class AttachRequest(Value):
    pid: Int64
    incarnation: Int64
    replica: str
    job: str
    rank: Int64 = 0
    launch_mark: str = ""  # of the launcher that started the trainer; empty: none


class AllocateRequest(Value):
    kind: str
    slot: Int64
    nbytes: Int64


class BeginRequest(Value):
    kind: str
    slot: Int64
    unless_read: bool = False


class PublishSnapshotRequest(Value):
    slot: Int64


class FinishRequest(Value):
    linger_s: float = 5.0
    ended: JobEnd | None = None


class TrainerChannel:
    """Accepts trainers of all ranks, and serves the requests of those that are attached."""

    def __init__(self, ranks: LocalRanks) -> None:
        self._ranks = ranks
        self._current: dict[LocalRank, UnixConnection] = {}

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections on ``listener`` until cancelled."""
        await serve_each(listener, self._serve, _MAX_CONNECTIONS, "a trainer")

    async def _serve(self, connection: UnixConnection) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            rank = await self._greet(connection)
            if rank is None:
                return
            try:
                held = rank.slots.contents(SNAPSHOT)
                welcome = _success(
                    url=rank.url,
                    pid=os.getpid(),
                    instance=rank.instance,
                    rank=rank.number,
                    snapshots=[to_builtins(content.ref) for content in held],
                    slots=[slot.index for slot in rank.slots.held(SNAPSHOT)],
                    parts=[content.parts for content in held],
                    sizes=[content.nbytes for content in held],
                )
                await connection.send(welcome)
                await self._work(rank, connection)
            finally:
                if self._current.get(rank) is connection:
                    del self._current[rank]
                    rank.trainer.detach()
                    rank.lifetime.trainer_left()

    async def _greet(self, connection: UnixConnection) -> LocalRank | None:
        """Handle the first request, which must be ``attach``; return the rank that it attached to."""
        try:
            async with asyncio.timeout(_ATTACH_S):
                line = await connection.receive()
            return None if line is None else self._attach(decode_line(line), connection)
        except FabricError as error:
            await connection.send(_refusal(error))
            return None

    async def _work(self, rank: LocalRank, connection: UnixConnection) -> None:
        connection.lines.limit_bytes = MAX_LINE_BYTES
        while True:
            try:
                line = await connection.receive()
            except ProtocolError as error:
                # After a malformed line the server cannot know where the next line begins.
                await connection.send(_refusal(error))
                return
            if line is None or self._current.get(rank) is not connection:
                return
            try:
                response = await self._do(rank, decode_line(line))
            except FabricError as error:
                response = _refusal(error)
            await connection.send(response)

    async def _do(self, rank: LocalRank, body: dict[str, Any]) -> Response:
        match body.get("op"):
            case "allocate":
                return await self._allocate(rank, body)
            case "begin":
                return await self._begin(rank, body)
            case "publish_snapshot":
                await self._publish_snapshot(rank, body)
            case "publish_gradient":
                return await self._publish_gradient(rank, body)
            case "persist":
                own = {"job": self._ranks.settings.job, "replica": self._ranks.settings.replica}
                rank.durable.start(decode_as(DurableJob, {**body, **own}, "persist"))
            case "durable":
                return _success(**rank.durable.outcome())
            case "void":
                await rank.slots.void()
            case "finish":
                request = decode_as(FinishRequest, body, "finish")
                if not 0 <= request.linger_s <= 86400:
                    raise ProtocolError("finish.linger_s must be a number of seconds from 0 to 86400")
                rank.trainer.leave_word(request.ended)
                rank.lifetime.finish(request.linger_s)
            case "gone":
                rank.trainer.give_up()
            case "ping":
                pass
            case name:
                raise ProtocolError(
                    f"there is no operation {str(name)[:40]!r} on this channel: known are {_OPERATIONS}"
                )
        return _success()

    def _attach(self, body: dict[str, Any], connection: UnixConnection) -> LocalRank:
        if body.get("op") != "attach":
            raise ProtocolError("the first request on this channel must be attach")
        request = decode_as(AttachRequest, body, "attach")
        pid, uid = peer_of(connection.socket)
        if uid != os.geteuid():
            raise Refused("another user's process asks for this server: run the trainer as the same user")
        if request.pid != pid:
            raise Refused(f"the kernel says that process {pid} asks, not {request.pid}: attach for yourself")
        identity = self._ranks.settings
        if (request.job, request.replica) != (identity.job, identity.replica):
            raise Refused(
                f"this folder's checkpoint server is of replica {identity.replica} in job {identity.job},"
                f" not of {request.replica[:80]} in {request.job[:80]}: give each replica a folder of its own"
            )
        if request.rank < 0:
            raise ProtocolError(f"attach.rank is {request.rank}: give 0 or more")
        rank = self._ranks.take(request.rank)
        trainer, current = rank.trainer, self._current.get(rank)
        if current is not None and trainer.pid != pid and trainer.state != GONE:
            of_rank = f"rank {rank.number} of " if rank.number else ""
            raise Refused(
                f"{of_rank}replica {identity.replica} already has a trainer, process {trainer.pid}"
                f" ({trainer.state}): stop that one, or give this one another replica name"
            )
        try:
            trainer.attach(pid, request.incarnation)
        except Refused:
            if trainer.state == ABSENT:
                rank.lifetime.finish(0.0)  # this rank has had no trainer, and holds no state
            raise
        if current is not None:
            current.shut()
        self._current[rank] = connection
        # A child that the trainer forked may still hold the trainer's end of the channel open.
        trainer.hang_up = connection.shut
        rank.lifetime.trainer_came()
        self._ranks.launchers.watch(request.launch_mark, pid, rank.number)
        return rank

    async def _allocate(self, rank: LocalRank, body: dict[str, Any]) -> Response:
        request = decode_as(AllocateRequest, body, "allocate")
        slot = rank.slots.slot(request.kind, request.slot)
        if not 0 < request.nbytes <= MAX_FILE_BYTES:
            raise ProtocolError(f"{request.nbytes} bytes cannot be allocated: ask for 1 to {MAX_FILE_BYTES}")
        memfd = await rank.slots.allocate(slot, request.nbytes)
        return Response({"ok": True, "nbytes": memfd.capacity}, memfd.fd)

    async def _begin(self, rank: LocalRank, body: dict[str, Any]) -> Response:
        request = decode_as(BeginRequest, body, "begin")
        slot = rank.slots.slot(request.kind, request.slot)
        if request.unless_read and slot.is_read(time.monotonic()):
            return _success(busy=True, readers=len(slot.readers))
        return _success(readers=await slot.withdraw())

    async def _publish_snapshot(self, rank: LocalRank, body: dict[str, Any]) -> None:
        request = decode_as(PublishSnapshotRequest, body, "publish_snapshot")
        slot = rank.slots.slot(SNAPSHOT, request.slot)
        view, version = self._published_view(slot), slot.version
        content = await asyncio.to_thread(
            snapshot_content, body.get("manifest"), view, self._ranks.settings.job, rank.url
        )
        if slot.version != version:
            raise Refused(
                f"snapshot slot {slot.index} was withdrawn while it was being published: begin anew"
            )
        rank.slots.publish(slot, content)
        rank.trainer.changed.set()  # report the checkpoint at once, because a cold start could begin from it

    async def _publish_gradient(self, rank: LocalRank, body: dict[str, Any]) -> Response:
        index, following = body.get("slot"), body.get("then_begin", -1)
        slot = rank.slots.slot(GRADIENT, index if type(index) is int else -1)
        rank.slots.publish(slot, gradient_content(body, len(self._published_view(slot))))
        if following == -1:
            return _success()
        return await self._begin(rank, {"kind": GRADIENT, "slot": following})

    def _published_view(self, slot: SharedSlot) -> memoryview:
        if slot.memfd is None:
            raise Refused(f"{slot.kind} slot {slot.index} has no memory: allocate it first")
        return slot.memfd.view


def _success(**body: object) -> Response:
    return Response({"ok": True, **body})


def _refusal(error: FabricError) -> Response:
    return Response({"ok": False, "error": str(error)})
