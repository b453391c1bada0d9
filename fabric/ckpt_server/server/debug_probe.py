"""Finds out what the trainer does: from the trainer, by a signal, and from the kernel.

A thread of the trainer answers on its own socket (``fabric.client.process.debug_endpoint``). While C code
holds the interpreter's lock, that thread cannot answer. Then a signal makes the interpreter write the stacks
of all threads to a file, which needs no lock. The signal is only the second way, because a dump of running
threads may read a frame that is being torn down; while one thread holds the lock for long, no frame changes.
The answer always includes the kernel's view of every thread. For a stopped process it has only that view.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
from functools import partial
from pathlib import Path
from typing import Any

from fabric.ckpt_server.server.trainer_watch import ABSENT, GONE, STOPPED, TrainerWatch
from fabric.ckpt_server.wire.channel_protocol import (
    DEBUG_SOCKET_NAME,
    STACKS_NAME,
    STACKS_SIGNAL,
    LineBuffer,
    encode_line,
)
from fabric.errors import ConfigError, FabricError, Refused
from fabric.model import Fence, incident_id_of
from fabric.protocol.messages.network import EpochNotice
from fabric.protocol.messages.wire import decode_line
from fabric.runtime import logs
from fabric.runtime.logs import fields
from fabric.runtime.private_folder import check_peer, open_private, socket_path

# Logs the job's epochs, so that log lines about the trainer carry an incident id.
#
# No decision depends on it: a server without notices (an older lighthouse, or none) serves as well.


log = logging.getLogger(__name__)


class EpochLog:
    """``epoch`` and ``incident_id`` are those of the newest epoch notice (at first 0 and empty)."""

    def __init__(self) -> None:
        self._fence = Fence("", 0, 0)
        self.incident_id = ""

    def watch(self, trainer: TrainerWatch, rank: int) -> None:
        trainer.on_change = partial(self._on_change, trainer, rank)

    @property
    def epoch(self) -> int:
        return self._fence.epoch

    def record(self, notice: EpochNotice, incarnation: int) -> None:
        """Log an epoch once, even if several lighthouses send its notice; ``incarnation``: the trainers'."""
        if (notice.fence, notice.incident_id) == (self._fence, self.incident_id):
            return
        self._fence, self.incident_id = notice.fence, notice.incident_id
        logs.describe(epoch=self.epoch, incident_id=self.incident_id, incarnation=incarnation)
        log.info("epoch: %s", notice.why)

    def _on_change(self, trainer: TrainerWatch, rank: int, state: str) -> None:
        # The next epoch may answer this change; the lighthouse then gives it the incident id of this change.
        incident_id = (
            incident_id_of(self.epoch + 1) if state != "running" and self.epoch else self.incident_id
        )
        log.info(
            "the trainer, process %d, is %s",
            trainer.pid,
            state,
            extra=fields(incident_id=incident_id, incarnation=trainer.incarnation, rank=rank or None),
        )


ANSWER_S = 1.0
_MAX_ANSWER_BYTES = 32 * 1024 * 1024
_MAX_DUMP_BYTES = 1024 * 1024
_MAX_THREADS = 1000
_DUMP_S = 2.0
_LOOK_S = 0.02
_QUIET_LOOKS = 5  # a dump of stacks is complete after this many looks in a row without a new piece
_TICKS_PER_S = 100  # the kernel's unit of processor time for every program (USER_HZ)
_THREAD = re.compile(r"(Current thread|Thread) (0x[0-9a-f]+).* \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class TrainerSilent(FabricError):
    """The trainer did not answer; the message gives possible reasons."""


class DebugProbe:
    """Asks the process that ``trainer`` watches, whose folder is ``run_dir``."""

    def __init__(self, run_dir: Path, trainer: TrainerWatch) -> None:
        self._run_dir = run_dir
        self._trainer = trainer
        self._one_dump = asyncio.Lock()

    def require_process(self) -> None:
        """Raises Refused without a living trainer."""
        state = self._trainer.state
        if state == ABSENT:
            raise Refused("no trainer has attached to this server yet: there are no stacks to show")
        if state == GONE:
            raise Refused(f"the trainer, process {self._trainer.pid}, has ended: it has no stacks to show")

    async def ask(self, what: str) -> dict[str, Any]:
        """Return the trainer's own answer to ``what``. Raises TrainerSilent, or Refused with its sentence."""
        if self._trainer.state == STOPPED:
            raise TrainerSilent(
                "the process is stopped (SIGSTOP, or a debugger): it answers when it is continued"
            )
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._exchange(what)
        except TimeoutError:
            raise TrainerSilent(
                f"the trainer did not answer within {ANSWER_S:g} s: code in it holds the interpreter's lock,"
                " or the host is overloaded"
            ) from None
        except (OSError, FabricError) as error:
            raise TrainerSilent(f"the trainer's debug endpoint cannot be reached ({error})") from error
        if answer.get("ok") is not True:
            raise Refused(str(answer.get("error", "the trainer gave no reason"))[:1000])
        del answer["ok"]
        return answer

    async def _exchange(self, what: str) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.setblocking(False)
            with socket_path(self._run_dir, DEBUG_SOCKET_NAME) as path:
                await loop.sock_connect(line, path)
            check_peer(line, f"the socket {DEBUG_SOCKET_NAME}")
            await loop.sock_sendall(line, encode_line({"ask": what, "pid": self._trainer.pid}))
            lines = LineBuffer(_MAX_ANSWER_BYTES)
            while (answer := lines.next_line()) is None:
                data = await loop.sock_recv(line, 256 * 1024)
                if not data:
                    raise ConnectionResetError("it closed the connection without an answer")
                lines.feed(data)
        return await asyncio.to_thread(decode_line, answer)

    async def stacks(self) -> dict[str, object]:
        """Return the stacks of all threads by the best way that works, and the kernel's view of the threads.

        ``how`` is ``interpreter``, ``signal`` or ``kernel`` (without Python stacks); ``why`` says why the
        better ways failed. Raises Refused where there is no process.
        """
        self.require_process()
        async with self._one_dump:
            how, why = "interpreter", ""
            try:
                threads = (await self.ask("stacks")).get("threads")
                if not isinstance(threads, list) or not threads:
                    raise TrainerSilent("the answer for the trainer names no threads")
            except (TrainerSilent, Refused) as error:
                how, why = "signal", str(error)
                try:
                    threads = parse_dump(await self._dump())
                except (TrainerSilent, ConfigError, OSError) as worse:
                    how, why, threads = "kernel", f"{why}; {worse}", []
            pid = self._trainer.pid
            kernel = await asyncio.to_thread(kernel_threads, pid)
        return {"pid": pid, "how": how, "why": why, "threads": threads, "kernel": kernel}

    async def _dump(self) -> str:
        """Return the interpreter's output after STACKS_SIGNAL. Raises TrainerSilent or OSError."""
        trainer, file = self._trainer, self._run_dir / STACKS_NAME
        if trainer.state == STOPPED:
            raise TrainerSilent("a signal would wait until it is continued")
        if not file.exists() or not catches(trainer.pid, STACKS_SIGNAL):
            raise TrainerSilent("it has not been made ready to write its stacks on a signal")
        with os.fdopen(open_private(file, os.O_RDWR), "r+b") as dump:
            dump.truncate(0)
            trainer.signal(STACKS_SIGNAL)
            size, quiet = 0, 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DUMP_S):
                    while not size or quiet < _QUIET_LOOKS:
                        await asyncio.sleep(_LOOK_S)
                        now = os.fstat(dump.fileno()).st_size
                        quiet = quiet + 1 if now == size else 0
                        size = now
            text = dump.read(_MAX_DUMP_BYTES).decode(errors="replace")
        if not text:
            raise TrainerSilent(f"it wrote no stacks within {_DUMP_S:g} s of the signal")
        return text


def parse_dump(text: str) -> list[dict[str, object]]:
    """Return the threads in the output of ``faulthandler``, most recent call first; leave out other lines."""
    threads: list[dict[str, object]] = []
    stack: list[str] = []
    for line in text.splitlines():
        if (thread := _THREAD.match(line)) is not None:
            stack = []
            threads.append({"name": thread[2], "current": thread[1] != "Thread", "stack": stack})
        elif (frame := _FRAME.match(line)) is not None:
            stack.append(f"{frame[1]}:{frame[2]} {frame[3]}")
    return threads


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal; without a handler the signal would end it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def kernel_threads(pid: int) -> list[dict[str, object]]:
    """Return the kernel's view of each thread: its name, state, what it sleeps in, and its processor time.

    ``wchan`` and ``syscall`` are empty where this user may not know. The first is the main thread.
    """
    threads = []
    try:
        tids = {int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()}
    except OSError:
        return []
    # The kernel reuses small numbers, so a younger thread may have a smaller one than the main thread.
    for tid in sorted(tids, key=lambda tid: (tid != pid, tid))[:_MAX_THREADS]:
        folder = Path(f"/proc/{pid}/task/{tid}")
        fields = _read(folder / "stat").rpartition(")")[2].split()
        if len(fields) < 13:
            continue  # the thread has ended
        threads.append(
            {
                "tid": tid,
                "name": _read(folder / "comm"),
                "state": fields[0],
                "wchan": _read(folder / "wchan").strip("0"),
                "syscall": _read(folder / "syscall").split(" ")[0],
                "cpu_s": (int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
            }
        )
    return threads


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def parse_flight(text: object) -> Any:
    """Parse torch's recording, JSON inside JSON. Raises Refused for any other text."""
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError) as error:
        raise Refused(f"torch's flight recording is not JSON ({error})") from error
