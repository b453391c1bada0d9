"""The server's side of the channel to its trainer: one request at a time, one response each.

The socket lies in a folder of mode 0700, and the kernel names the peer's user and pid. One trainer at a time
is attached. The server refuses a second trainer until the first one ends or closes its channel, because two
writers would mix their snapshots. Memory travels as file descriptors. The server decodes requests strictly;
it answers a malformed request with a sentence, and changes nothing.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fabric.ckpt_server.format.safetensors_file import MAX_FILE_BYTES
from fabric.ckpt_server.server.durable_jobs import DurableJobs
from fabric.ckpt_server.server.slots import (
    GRADIENT,
    SNAPSHOT,
    SharedSlot,
    SlotTable,
    gradient_content,
    snapshot_content,
)
from fabric.ckpt_server.server.trainer_watch import ABSENT, GONE, Lifetime, TrainerWatch
from fabric.ckpt_server.server.unix_sockets import Response, UnixConnection, serve_each
from fabric.ckpt_server.wire.channel_protocol import MAX_LINE_BYTES, DurableJob, decode_line
from fabric.errors import FabricError, ProtocolError, Refused
from fabric.model import Int64, JobEnd
from fabric.protocol.messages.wire import decode_as

_MAX_CONNECTIONS = 32
_ATTACH_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """This server's identity; ``instance`` differs between two processes, even with the same pid."""

    job: str
    replica: str
    url: str
    instance: str


@dataclass(frozen=True, slots=True)
class AttachRequest:
    pid: Int64
    incarnation: Int64
    replica: str
    job: str


@dataclass(frozen=True, slots=True)
class AllocateRequest:
    kind: str
    slot: Int64
    nbytes: Int64


@dataclass(frozen=True, slots=True)
class BeginRequest:
    kind: str
    slot: Int64
    unless_read: bool = False


@dataclass(frozen=True, slots=True)
class PublishSnapshotRequest:
    slot: Int64


@dataclass(frozen=True, slots=True)
class FinishRequest:
    linger_s: float = 5.0
    ended: JobEnd | None = None


class TrainerChannel:
    """Accepts trainers, and serves the requests of the attached one."""

    def __init__(
        self,
        identity: ServerIdentity,
        memory: SlotTable,
        trainer: TrainerWatch,
        lifetime: Lifetime,
        durable: DurableJobs,
    ) -> None:
        self._durable = durable
        self._identity = identity
        self._memory = memory
        self._trainer = trainer
        self._lifetime = lifetime
        self._current: UnixConnection | None = None
        self._operations: dict[str, Callable[[dict[str, Any]], Awaitable[Response]]] = {
            "allocate": self._allocate,
            "begin": self._begin,
            "publish_snapshot": self._publish_snapshot,
            "publish_gradient": self._publish_gradient,
            "persist": self._persist,
            "durable": self._durable_outcome,
            "void": self._void,
            "finish": self._finish,
            "gone": self._gone,
            "ping": self._ping,
        }
        trainer.on_death = self._trainer_died

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections on ``listener`` until cancelled."""
        await serve_each(listener, self._serve, _MAX_CONNECTIONS, "a trainer")

    def _trainer_died(self) -> None:
        # A child that the trainer forked may still hold the trainer's end of the channel open.
        if self._current is not None:
            self._current.shut()

    async def _serve(self, connection: UnixConnection) -> None:
        try:
            with contextlib.suppress(ConnectionError, TimeoutError):
                if await self._greet(connection):
                    await self._work(connection)
        finally:
            if self._current is connection:
                self._current = None
                self._trainer.detach()
                self._lifetime.trainer_left()

    async def _greet(self, connection: UnixConnection) -> bool:
        """Handle the first request, which must be ``attach``; return whether it attached."""
        try:
            async with asyncio.timeout(_ATTACH_S):
                line = await connection.receive()
            if line is None:
                return False
            response = self._attach(decode_line(line), connection)
        except FabricError as error:
            await connection.send(_refusal(error))
            return False
        await connection.send(response)
        return True

    async def _work(self, connection: UnixConnection) -> None:
        connection.limit(MAX_LINE_BYTES)
        while True:
            try:
                line = await connection.receive()
            except ProtocolError as error:
                # After a malformed line the server cannot know where the next line begins.
                await connection.send(_refusal(error))
                return
            if line is None or self._current is not connection:
                return
            try:
                response = await self._do(decode_line(line))
            except FabricError as error:
                response = _refusal(error)
            await connection.send(response)

    async def _do(self, body: dict[str, Any]) -> Response:
        name = body.get("op")
        operation = self._operations.get(name) if isinstance(name, str) else None
        if operation is None:
            operations = ", ".join(self._operations)
            raise ProtocolError(
                f"there is no operation {str(name)[:40]!r} on this channel: known are {operations}"
            )
        return await operation(body)

    def _attach(self, body: dict[str, Any], connection: UnixConnection) -> Response:
        if body.get("op") != "attach":
            raise ProtocolError("the first request on this channel must be attach")
        request = decode_as(AttachRequest, body, "attach")
        pid, uid = connection.peer()
        if uid != os.geteuid():
            raise Refused("another user's process asks for this server: run the trainer as the same user")
        if request.pid != pid:
            raise Refused(f"the kernel says that process {pid} asks, not {request.pid}: attach for yourself")
        identity = self._identity
        if (request.job, request.replica) != (identity.job, identity.replica):
            raise Refused(
                f"this folder's checkpoint server is of replica {identity.replica} in job {identity.job},"
                f" not of {request.replica[:80]} in {request.job[:80]}: give each replica a folder of its own"
            )
        if self._current is not None and self._trainer.pid != pid and self._trainer.state != GONE:
            raise Refused(
                f"replica {identity.replica} already has a trainer, process {self._trainer.pid}"
                f" ({self._trainer.state}): stop that one, or give this one another replica name"
            )
        try:
            self._trainer.attach(pid, request.incarnation)
        except Refused:
            if self._trainer.state == ABSENT:
                self._lifetime.finish(0.0)  # this server has served no trainer, and holds no state
            raise
        if self._current is not None:
            self._current.shut()
        self._current = connection
        self._lifetime.trainer_came()
        snapshots = [
            {"generation": ref.generation, "step": ref.step, "digest": ref.digest}
            for ref in self._memory.snapshot_refs()
        ]
        slots = [slot.index for slot in self._memory.held(SNAPSHOT)]
        return _success(
            url=identity.url,
            pid=os.getpid(),
            instance=identity.instance,
            snapshots=snapshots,
            slots=slots,
            parts=self._memory.snapshot_parts(),
        )

    async def _allocate(self, body: dict[str, Any]) -> Response:
        request = decode_as(AllocateRequest, body, "allocate")
        slot = self._memory.slot(request.kind, request.slot)
        if not 0 < request.nbytes <= MAX_FILE_BYTES:
            raise ProtocolError(f"{request.nbytes} bytes cannot be allocated: ask for 1 to {MAX_FILE_BYTES}")
        memfd = await self._memory.allocate(slot, request.nbytes)
        return Response({"ok": True, "nbytes": memfd.capacity}, memfd.fd)

    async def _begin(self, body: dict[str, Any]) -> Response:
        request = decode_as(BeginRequest, body, "begin")
        slot = self._memory.slot(request.kind, request.slot)
        if request.unless_read and slot.is_read(time.monotonic()):
            return _success(busy=True, readers=len(slot.readers))
        return _success(readers=await slot.withdraw())

    async def _publish_snapshot(self, body: dict[str, Any]) -> Response:
        request = decode_as(PublishSnapshotRequest, body, "publish_snapshot")
        slot = self._memory.slot(SNAPSHOT, request.slot)
        view, version = self._published_view(slot)
        content = await asyncio.to_thread(
            snapshot_content, body.get("manifest"), view, self._identity.job, self._identity.url
        )
        if slot.version != version:
            raise Refused(
                f"snapshot slot {slot.index} was withdrawn while it was being published: begin anew"
            )
        self._memory.publish(slot, content)
        self._trainer.changed.set()  # report the checkpoint at once, because a cold start could begin from it
        return _success()

    async def _publish_gradient(self, body: dict[str, Any]) -> Response:
        index = body.get("slot")
        slot = self._memory.slot(GRADIENT, index if type(index) is int else -1)
        view, _ = self._published_view(slot)
        self._memory.publish(slot, gradient_content(body, len(view)))
        following = body.get("then_begin", -1)
        if following == -1:
            return _success()
        return await self._begin({"kind": GRADIENT, "slot": following})

    def _published_view(self, slot: SharedSlot) -> tuple[memoryview, int]:
        if slot.memfd is None:
            raise Refused(f"{slot.kind} slot {slot.index} has no memory: allocate it first")
        return slot.memfd.view, slot.version

    async def _persist(self, body: dict[str, Any]) -> Response:
        own = {"job": self._identity.job, "replica": self._identity.replica}
        self._durable.start(decode_as(DurableJob, {**body, **own}, "persist"))
        return _success()

    async def _durable_outcome(self, _: dict[str, Any]) -> Response:
        return _success(**self._durable.outcome())

    async def _void(self, body: dict[str, Any]) -> Response:
        await self._memory.void()
        return _success()

    async def _finish(self, body: dict[str, Any]) -> Response:
        request = decode_as(FinishRequest, body, "finish")
        if not 0 <= request.linger_s <= 86400:
            raise ProtocolError("finish.linger_s must be a number of seconds from 0 to 86400")
        self._trainer.leave_word(request.ended)
        self._lifetime.finish(request.linger_s)
        return _success()

    async def _ping(self, _: dict[str, Any]) -> Response:
        return _success()

    async def _gone(self, _: dict[str, Any]) -> Response:
        self._trainer.give_up()
        return _success()


def _success(**body: object) -> Response:
    return Response({"ok": True, **body})


def _refusal(error: FabricError) -> Response:
    return Response({"ok": False, "error": str(error)})
