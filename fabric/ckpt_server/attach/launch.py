"""Starts a checkpoint server from its trainer, in a session of its own, so that it outlives the trainer.

The new process reports over a pipe when trainers can attach, or why it cannot serve. Its output goes to a
log in the run folder. Two trainers may start a server at the same time: the folder's lock lets one server
win, and the other trainer attaches to the winner.
"""

import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import fabric
from fabric.ckpt_server.wire.channel_protocol import LOCK_NAME, LOG_NAME
from fabric.ckpt_server.wire.server_settings import ServerSettings
from fabric.errors import ConfigError, Refused, ServerLost
from fabric.runtime.private_folder import make_private, open_private
from fabric.runtime.process_environment import outliving_environment

_MAX_REPORT_BYTES = 64 * 1024
_LOG_TAIL_BYTES = 2000

# The servers that this process started; ``reap`` waits for the dead ones, so that none stays a zombie.
_started: dict[int, "subprocess.Popen[bytes]"] = {}


def is_served(run_dir: Path) -> bool:
    """Whether a process holds the lock of ``run_dir``: a server that starts, serves or ends."""
    try:
        with os.fdopen(open_private(run_dir / LOCK_NAME, os.O_RDONLY), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def start(settings: ServerSettings, deadline: float) -> bool:
    """Start a server and wait until it serves, or until monotonic ``deadline``.

    Returns False where another server won the folder meanwhile. Raises ConfigError, Refused (with the new
    server's sentence) or ServerLost (the new server died, or took too long).
    """
    make_private(settings.run_dir)
    output_fd = open_private(settings.run_dir / LOG_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    reader, writer = os.pipe()
    try:
        with os.fdopen(output_fd, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "fabric.ckpt_server", *settings.arguments(), f"--ready-fd={writer}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(writer,),
                # The server outlives its trainer and its launcher. The server's environment lacks the
                # launcher's mark, because a launcher ends all processes with its mark.
                start_new_session=True,
                env=outliving_environment(),
                # The folder from which this package is imported, installed or not.
                cwd=Path(fabric.__file__).resolve().parent.parent,
            )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    _started[process.pid] = process
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        report = _read_report(pipe.fileno(), deadline)
    if report is None:
        process.kill()
        process.wait()
        raise ServerLost(
            f"the checkpoint server of {settings.replica} did not start in time{_tail(settings.run_dir)}"
        )
    return _judge(report, process, settings)


def reap() -> None:
    """Wait for our servers that have died, so that none is left a zombie."""
    for pid, process in tuple(_started.items()):
        if process.poll() is not None:
            _started.pop(pid, None)


def _read_report(pipe: int, deadline: float) -> bytes | None:
    """Return the new process's report, up to the end of its line or of the pipe; None at the deadline."""
    report = b""
    while not report.endswith(b"\n") and len(report) < _MAX_REPORT_BYTES:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
            return None
        data = os.read(pipe, _MAX_REPORT_BYTES)
        if not data:
            break
        report += data
    return report


def _judge(report: bytes, process: "subprocess.Popen[bytes]", settings: ServerSettings) -> bool:
    body: object = None
    with contextlib.suppress(ValueError):
        body = json.loads(report)
    if isinstance(body, dict) and body.get("ok") is True:
        return True
    process.wait()
    _started.pop(process.pid, None)
    if isinstance(body, dict) and body.get("busy") is True:
        return False
    if isinstance(body, dict) and isinstance(body.get("error"), str):
        raise Refused(f"the checkpoint server of {settings.replica} cannot serve: {body['error']}")
    raise ServerLost(
        f"the checkpoint server of {settings.replica} ended as it started, exit code {process.returncode}"
        f"{_tail(settings.run_dir)}"
    )


def _tail(run_dir: Path) -> str:
    path = run_dir / LOG_NAME
    try:
        with os.fdopen(open_private(path, os.O_RDONLY), "rb") as log:
            log.seek(max(os.fstat(log.fileno()).st_size - _LOG_TAIL_BYTES, 0))
            lines = log.read().decode(errors="replace").strip().splitlines()
    except (OSError, ConfigError):
        lines = []
    return f": its log {path} ends with: {lines[-1]}" if lines else f": see its log {path}"
