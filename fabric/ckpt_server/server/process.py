"""The checkpoint server process: holds a trainer's shared memory, serves it, and reports the trainer's
status.

A separate process keeps the snapshots of a dead trainer, and serves snapshots without work for a living
trainer. A lock allows one server per folder; the kernel releases it however the process ends.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import random
import secrets
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fabric.ckpt_server.fetch.http_source import HttpAddress
from fabric.ckpt_server.server.debug_probe import DebugProbe
from fabric.ckpt_server.server.durable_jobs import DurableJobs
from fabric.ckpt_server.server.metrics import CkptMetrics
from fabric.ckpt_server.server.routes import CkptContext, make_app
from fabric.ckpt_server.server.slots import SNAPSHOT, SlotTable
from fabric.ckpt_server.server.trainer_status import StatusSender, StatusSource
from fabric.ckpt_server.server.trainer_watch import FIRST_TRAINER_S, CrashLog, Lifetime, TrainerWatch
from fabric.ckpt_server.server.unix_sockets import LocalReadServer, ServerIdentity, TrainerChannel
from fabric.ckpt_server.wire.channel_protocol import LOCK_NAME, LOG_NAME, SOCKET_NAME
from fabric.ckpt_server.wire.server_settings import ServerSettings
from fabric.errors import ConfigError, Refused
from fabric.protocol.messages.network import EpochNotice, TrainerStatus
from fabric.runtime.http.http_service import check_exposure, serve, url_host
from fabric.runtime.http.token_file import TokenFile
from fabric.runtime.private_folder import make_private, open_private, socket_path

# The largest checkpoint server's log, which no other program rotates. The process that starts the server
# opens the file for appending. So the file is copied and cut, not replaced.
MOST_BYTES = 16 << 20
_LOOK_S = 60.0


async def keep_bounded(path: Path) -> None:
    """Check the size from time to time, until cancelled."""
    while True:
        try:
            await asyncio.to_thread(bound, path)
        except OSError as error:
            log.warning("the log %s cannot be cut: %s", path, error.strerror)
        await asyncio.sleep(_LOOK_S)


def bound(path: Path, most: int = MOST_BYTES) -> None:
    """Copy a log of more than ``most`` bytes to ``NAME.1``, and empty it. Raises OSError."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        source = os.open(path, os.O_RDWR | flags)
    except FileNotFoundError:  # the server's output does not go to this file
        return
    with os.fdopen(source, "r+b") as file:
        if os.fstat(source).st_size <= most:
            return
        older = path.with_name(f"{path.name}.1")
        with contextlib.suppress(FileNotFoundError):
            older.unlink()
        target = os.open(older, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)
        with os.fdopen(target, "wb") as copy:
            shutil.copyfileobj(file, copy)
        os.ftruncate(source, 0)


log = logging.getLogger(__name__)

_SHUTDOWN_S = 0.5
# How long the server stays after the lighthouse has stored the job's end that this server reported.
JOB_END_STORED_S = 5.0


@dataclass(frozen=True, slots=True)
class _ServerParts:
    """The parts of one server process."""

    settings: ServerSettings
    token: TokenFile
    slots: SlotTable
    trainer: TrainerWatch
    durable: DurableJobs
    probe: DebugProbe
    lifetime: Lifetime


class AlreadyServed(Refused):
    """Another living server holds the folder's lock."""


@contextmanager
def own_folder(run_dir: Path) -> Iterator[None]:
    """Hold the lock of ``run_dir`` while the block lasts; make the folder where it is missing.

    Raises ConfigError where the folder cannot be made, AlreadyServed while another server holds the lock.
    """
    try:
        make_private(run_dir)
        descriptor = open_private(run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ConfigError(
            f"the folder {run_dir} cannot be used ({error.strerror}): name one that belongs to this user"
        ) from error
    with os.fdopen(descriptor, "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyServed(
                f"another checkpoint server (process {lock.read(20).strip() or 'unknown'}) serves {run_dir}:"
                " use that one, stop it, or give this replica a folder of its own"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


@contextmanager
def listening_socket(run_dir: Path) -> Iterator[socket.socket]:
    """Give the channel's listening socket (mode 0600) in ``run_dir``; remove it after the block."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    with listener:
        (run_dir / SOCKET_NAME).unlink(missing_ok=True)
        with socket_path(run_dir, SOCKET_NAME) as path:
            listener.bind(path)
        (run_dir / SOCKET_NAME).chmod(0o600)
        listener.listen(128)
        try:
            yield listener
        finally:
            (run_dir / SOCKET_NAME).unlink(missing_ok=True)


async def run(settings: ServerSettings, ready_fd: int = -1) -> str:
    """Serve until the server's lifetime ends; return the reason of the end.

    When ``ready_fd`` is given, one JSON line is written to it once trainers can attach. Raises
    FabricError where serving cannot begin.
    """
    token = TokenFile(settings.token_file)
    check_exposure(settings.bind, token.shown() or None)
    slots, trainer = SlotTable(), TrainerWatch()
    durable, probe = DurableJobs(slots), DebugProbe(settings.run_dir, trainer)
    parts = _ServerParts(settings, token, slots, trainer, durable, probe, Lifetime(settings.orphan_s))
    with own_folder(settings.run_dir):
        try:
            async with _http(parts) as identity:
                with listening_socket(settings.run_dir) as listener, _signals(parts.lifetime):
                    tell_ready(ready_fd, {"ok": True, "url": identity.url})
                    log.info("replica %s of job %s: %s", settings.replica, settings.job, identity.url)
                    await _serve_until_end(parts, identity, listener)
        finally:
            parts.trainer.close()
            parts.slots.close()
    return parts.lifetime.reason


async def _serve_until_end(parts: _ServerParts, identity: ServerIdentity, listener: socket.socket) -> None:
    """Serve the trainer on ``listener``, local readers and the lighthouse until the lifetime ends."""
    settings, trainer, durable, lifetime = parts.settings, parts.trainer, parts.durable, parts.lifetime
    local_reads = LocalReadServer(parts.slots, parts.token).open(HttpAddress.parse(identity.url).place)
    channel = TrainerChannel(identity, parts.slots, trainer, lifetime, durable)
    lifetime.trainer_left(FIRST_TRAINER_S)
    async with local_reads, asyncio.TaskGroup() as group:
        tasks = [group.create_task(channel.accept(listener))]
        tasks.append(group.create_task(keep_bounded(settings.run_dir / LOG_NAME)))
        if settings.lighthouse:
            tasks.append(group.create_task(trainer.watch()))
            parts.probe.status_sender = _status_sender(parts, identity)
            tasks.append(group.create_task(parts.probe.status_sender.run()))
        await lifetime.ended.wait()
        ends = [group.create_task(x) for x in (durable.finish(), lifetime.at_once.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await durable.close()
        for task in (*tasks, *ends):
            task.cancel()


def tell_ready(ready_fd: int, body: dict[str, object]) -> None:
    """Report readiness, or a refusal, once, to the process that started this process."""
    if ready_fd >= 0:
        with contextlib.suppress(OSError):
            os.write(ready_fd, json.dumps(body).encode() + b"\n")
        with contextlib.suppress(OSError):
            os.close(ready_fd)


@asynccontextmanager
async def _http(parts: _ServerParts) -> AsyncIterator[ServerIdentity]:
    """Serve HTTP inside the block."""
    settings = parts.settings
    name = {"job": settings.job, "replica": settings.replica, "instance": secrets.token_hex(8)}
    metrics = CkptMetrics(parts.slots, parts.trainer, parts.durable)
    context = CkptContext(name, parts.slots, parts.trainer, metrics, parts.probe)
    app = make_app(context, parts.token, (settings.advertise, settings.bind))
    runner, port = await serve(
        app,
        settings.bind,
        settings.port,
        ssl_context=settings.tls.server_context(),
        shutdown_s=_SHUTDOWN_S,
        cancel_abandoned=True,
        limit=metrics.connections,
    )
    try:
        host = url_host(settings.advertise or settings.bind)
        yield ServerIdentity(url=f"{settings.tls.scheme}://{host}:{port}", **name)
    finally:
        await runner.cleanup()


def _status_sender(parts: _ServerParts, identity: ServerIdentity) -> StatusSender:
    settings, slots, trainer, durable = parts.settings, parts.slots, parts.trainer, parts.durable
    crash_log = CrashLog(slots, trainer)

    def compose(number: int) -> TrainerStatus:
        state, held, now = trainer.state, slots.contents(SNAPSHOT), time.monotonic()
        return TrainerStatus(
            replica=settings.replica,
            incarnation=trainer.incarnation,
            trainer=state,
            number=number,
            ckpt=identity.url + (f"#{settings.rank}" if settings.rank else ""),
            snapshots=tuple(content.ref for content in held),
            deaths=crash_log.seen(state),
            rank=settings.rank,
            ages_s=tuple(round(now - content.taken, 3) for content in held),
            durable=(durable.newest,) if durable.newest is not None else (),
            durable_error=durable.error,
            parts=tuple(content.parts for content in held),
            ended=trainer.ended,
        )

    def on_notice(notice: EpochNotice) -> None:
        parts.probe.epoch_log.record(notice)
        if notice.complete and trainer.ended is not None:
            parts.lifetime.finish(JOB_END_STORED_S)  # the server stayed until the lighthouse stored the end

    chance = random.Random()  # noqa: S311 - spreads reconnections, protects nothing
    source = StatusSource(compose, trainer.changed, on_notice)
    return StatusSender(
        settings.lighthouse, settings.job, settings.replica, parts.token, source, chance, tls=settings.tls
    )


@contextmanager
def _signals(lifetime: Lifetime) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    # The end of a container sends SIGTERM to all processes: the running writer still ends its work.
    handled = {signal.SIGTERM: lifetime.end, signal.SIGINT: lifetime.end_at_once}
    for number, end in handled.items():
        loop.add_signal_handler(number, end, f"signal {number.name}")
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
