"""The checkpoint server process: holds the shared memory of a replica's trainers on this host, serves it, and
reports their status.

A separate process keeps the snapshots of dead trainers, and serves snapshots without work for living
trainers. All ranks of the replica on this host have one server: one process, one port, one connection to the
lighthouse. A lock allows one server per folder; the kernel releases it however the process ends.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

from fabric.ckpt_server.fetch.http_source import HttpAddress
from fabric.ckpt_server.server.local_ranks import LocalRanks
from fabric.ckpt_server.server.metrics import CkptMetrics
from fabric.ckpt_server.server.routes import make_app
from fabric.ckpt_server.server.trainer_status import StatusSender
from fabric.ckpt_server.server.unix_sockets import LocalReadServer, TrainerChannel
from fabric.ckpt_server.wire.channel_protocol import LOCK_NAME, LOG_NAME, SOCKET_NAME
from fabric.ckpt_server.wire.server_settings import ServerSettings
from fabric.errors import ConfigError, Refused
from fabric.runtime.http import url_host
from fabric.runtime.http.http_service import check_exposure, serve
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
    """Serve until the last rank's lifetime ends; return the reason of the end.

    When ``ready_fd`` is given, one JSON line is written to it once trainers can attach. Raises
    FabricError where serving cannot begin.
    """
    token = TokenFile(settings.token_file)
    check_exposure(settings.bind, token.shown() or None)
    ranks = LocalRanks(settings)
    with own_folder(settings.run_dir):
        async with _http(ranks, token):
            with listening_socket(settings.run_dir) as listener, _signals(ranks):
                tell_ready(ready_fd, {"ok": True, "url": ranks.url})
                log.info("replica %s of job %s: %s", settings.replica, settings.job, ranks.url)
                local_reads = LocalReadServer(ranks.held, token).open(HttpAddress.parse(ranks.url).place)
                async with local_reads, asyncio.TaskGroup() as group:
                    ranks.begin(group)
                    tasks = [group.create_task(TrainerChannel(ranks).accept(listener))]
                    tasks.append(group.create_task(ranks.watch()))
                    tasks.append(group.create_task(keep_bounded(settings.run_dir / LOG_NAME)))
                    if settings.lighthouse:
                        ranks.status_sender = StatusSender(
                            settings, token, ranks.compose, ranks.changed, ranks.hear
                        )
                        tasks.append(group.create_task(ranks.status_sender.run()))
                    await ranks.ended.wait()
                    for task in tasks:
                        task.cancel()
    return ranks.reason


def tell_ready(ready_fd: int, body: dict[str, object]) -> None:
    """Report readiness, or a refusal, once, to the process that started this process."""
    if ready_fd >= 0:
        with contextlib.suppress(OSError), os.fdopen(ready_fd, "wb") as pipe:
            pipe.write(json.dumps(body).encode() + b"\n")


@asynccontextmanager
async def _http(ranks: LocalRanks, token: TokenFile) -> AsyncIterator[None]:
    """Serve HTTP inside the block; give the ranks their URL."""
    settings = ranks.settings
    metrics = CkptMetrics(ranks.held)
    app = make_app(ranks, metrics, token, (settings.advertise, settings.bind))
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
        ranks.url = f"{settings.tls.scheme}://{url_host(settings.advertise or settings.bind)}:{port}"
        yield
    finally:
        await runner.cleanup()


@contextmanager
def _signals(ranks: LocalRanks) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    # The end of a container sends SIGTERM to all processes: the running writer still ends its work.
    handled = {signal.SIGTERM: False, signal.SIGINT: True}
    for number, at_once in handled.items():
        loop.add_signal_handler(number, partial(ranks.end, f"signal {number.name}", at_once=at_once))
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
