"""What the kernel says of the trainer process: running, stopped or gone.

Two sources. The process's pidfd becomes readable when it is dead, and wakes the loop at once. But the
kernel frees a dying process's memory first, which takes tens of milliseconds per GiB; so every beat
also reads ``/proc/PID/stat``, where a flag says that the process has begun to exit, and where a stopped
process shows at all. A process that runs is never called anything else, however busy it may be.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RUNNING = "running"
STOPPED = "stopped"
GONE = "gone"
ABSENT = "absent"
STATES = (RUNNING, STOPPED, GONE, ABSENT)

# Kernel flags of a task (include/linux/sched.h), as /proc shows them.
_PF_EXITING = 0x4
_PF_SIGNALED = 0x400


@dataclass(frozen=True, slots=True)
class TaskStat:
    """The fields of ``/proc/PID/stat`` that are looked at; ``started`` tells a re-used pid."""

    state: str
    flags: int
    threads: int
    started: int

    @property
    def verdict(self) -> str:
        """One of ``running``, ``stopped``, ``gone``."""
        # The first thread may end alone while others work on; killed by a signal they end together.
        ending = self.flags & _PF_EXITING or self.state in "ZX"
        if ending and (self.flags & _PF_SIGNALED or self.threads <= 1):
            return GONE
        return STOPPED if self.state in "Tt" else RUNNING


def parse_stat(text: str) -> TaskStat:
    """Parses ``/proc/PID/stat``; the name in it may hold spaces and parentheses."""
    fields = text.rpartition(")")[2].split()
    return TaskStat(state=fields[0], flags=int(fields[6]), threads=int(fields[17]), started=int(fields[19]))


def read_stat(pid: int) -> TaskStat | None:
    """The stat of process ``pid``, or None when there is none."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except OSError:
        return None


class Trainer:
    """The trainer that this server watches: at most one at a time, attached or only remembered.

    ``changed`` is set whenever its state may have changed; ``on_death`` is called when its process is
    dead. Lives on one event loop.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.incarnation = 0
        self.is_attached = False
        self.changed = asyncio.Event()
        self.on_death: Callable[[], None] = _nothing
        self._started = 0
        self._pidfd = -1
        self._dead = False

    def attach(self, pid: int, incarnation: int) -> None:
        """From now on watch process ``pid``, whose channel is open."""
        self._unwatch()
        self.pid, self.incarnation, self.is_attached = pid, incarnation, True
        stat = read_stat(pid)
        self._started = 0 if stat is None else stat.started
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._dead = True
        else:
            asyncio.get_running_loop().add_reader(self._pidfd, self._on_death)
        self.changed.set()

    def detach(self) -> None:
        """Its channel is closed; the process is watched on."""
        self.is_attached = False
        self.changed.set()

    @property
    def state(self) -> str:
        """``running``, ``stopped``, ``gone``, or ``absent`` when none has attached yet."""
        if not self.pid:
            return ABSENT
        if not self._dead:
            stat = read_stat(self.pid)
            reused = stat is not None and stat.started != self._started
            if stat is None or reused:
                self._dead = True
            else:
                return stat.verdict
        return GONE

    def close(self) -> None:
        """Watch no more."""
        self._unwatch()

    def _on_death(self) -> None:
        self._unwatch()
        self._dead = True
        self.changed.set()
        self.on_death()

    def _unwatch(self) -> None:
        self._dead = False
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            with contextlib.suppress(OSError):
                os.close(self._pidfd)
            self._pidfd = -1


def _nothing() -> None:
    """Nobody else cares."""
