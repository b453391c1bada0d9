"""Watches the trainer process through the kernel: running, stopped or gone.

Two sources. The process's pidfd becomes readable when it is dead, and wakes the loop at once. But the kernel
frees a dying process's memory first, which takes up to 200 ms per GiB, and closes its sockets after that. So
the watch also reads ``/proc/PID/stat`` every 10 ms (4 microseconds each). A flag there shows an exit within a
fraction of a millisecond, and only there a stopped process shows. A running process is always called running,
however busy it is.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from fabric.errors import Refused
from fabric.model import JobEnd

RUNNING = "running"
STOPPED = "stopped"
GONE = "gone"
ABSENT = "absent"
STATES = (RUNNING, STOPPED, GONE, ABSENT)

LOOK_S = 0.01
_STAT_BYTES = 4096

# Kernel flags of a task (include/linux/sched.h), as /proc shows them.
_PF_EXITING = 0x4
_PF_SIGNALED = 0x400


@dataclass(frozen=True, slots=True)
class TaskStat:
    """The fields of ``/proc/PID/stat`` that are looked at."""

    state: str
    flags: int
    threads: int

    @property
    def verdict(self) -> str:
        """One of ``running``, ``stopped``, ``gone``."""
        # The first thread may end alone while others work on; killed by a signal they end together.
        ending = self.flags & _PF_EXITING or self.state in "ZX"
        if ending and (self.flags & _PF_SIGNALED or self.threads <= 1):
            return GONE
        return STOPPED if self.state in "Tt" else RUNNING


def parse_stat(text: str) -> TaskStat:
    """Parse ``/proc/PID/stat``; the name in it may hold spaces and parentheses."""
    fields = text.rpartition(")")[2].split()
    return TaskStat(state=fields[0], flags=int(fields[6]), threads=int(fields[17]))


class TrainerWatch:
    """The trainer that this server watches: at most one at a time, attached or only remembered.

    ``changed`` is set whenever its state may have changed; ``on_death`` is called when its process is
    dead. Lives on one event loop.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.incarnation = 0
        self.is_attached = False
        self.ended: JobEnd | None = None  # the end of the job that it reported when it ended
        self.changed = asyncio.Event()
        self.on_death: Callable[[], None] = _nothing
        self.on_change: Callable[[str], None] = _nothing_of_it  # with the new state, seen by a look
        self.on_attach: Callable[[], None] = _nothing  # before another process takes this one's place
        # Both stay with this process, even when another process gets its number.
        self._stat = self._pidfd = -1
        self._dead = False

    def attach(self, pid: int, incarnation: int) -> None:
        """Watch process ``pid`` from now on; its channel is open. Raises Refused, with nothing changed, where
        descriptors are short."""
        descriptors = _descriptors_of(pid)
        self.on_attach()
        self._unwatch()
        self.pid, self.incarnation, self.is_attached, self.ended = pid, incarnation, True, None
        if descriptors is None:
            self._dead = True
        else:
            self._stat, self._pidfd = descriptors
            asyncio.get_running_loop().add_reader(self._pidfd, self._on_death)
        self.changed.set()

    def detach(self) -> None:
        """Note that the channel is closed; watch the process on."""
        self.is_attached = False
        self.changed.set()

    def leave_word(self, ended: JobEnd | None) -> None:
        """Keep the end of the job that the trainer saw, to report it to the next lighthouse."""
        self.ended = ended
        self.changed.set()

    def give_up(self) -> None:
        """Count the process as gone, as it says itself, although the kernel still has it."""
        self._dead = True
        self.changed.set()

    @property
    def state(self) -> str:
        """``running``, ``stopped``, ``gone``, or ``absent`` when none has attached yet."""
        if not self.pid:
            return ABSENT
        if self._dead:
            return GONE
        try:
            return parse_stat(os.pread(self._stat, _STAT_BYTES, 0).decode(errors="replace")).verdict
        except ProcessLookupError:
            self._dead = True
            return GONE

    def signal(self, number: int) -> None:
        """Send it a signal, and never another process of its number. ProcessLookupError where it is gone."""
        if self._pidfd < 0:
            raise ProcessLookupError(f"process {self.pid} is gone")
        signal.pidfd_send_signal(self._pidfd, number)

    async def watch(self) -> None:
        """Set ``changed`` within LOOK_S of every change that only a look can tell, until cancelled."""
        last = self.state
        while True:
            await asyncio.sleep(LOOK_S)
            if (state := self.state) != last:
                last = state
                self.changed.set()
                self.on_change(state)

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
        for descriptor in (self._pidfd, self._stat):
            if descriptor >= 0:
                os.close(descriptor)
        self._pidfd = self._stat = -1


def _descriptors_of(pid: int) -> tuple[int, int] | None:
    """Open ``/proc/PID/stat`` and a pidfd; None where the process is gone."""
    opened: list[int] = []
    try:
        opened.append(os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC))
        opened.append(os.pidfd_open(pid))
    except OSError as error:
        for descriptor in opened:
            os.close(descriptor)
        if isinstance(error, FileNotFoundError | ProcessLookupError):
            return None
        raise Refused(
            f"the checkpoint server cannot watch process {pid} ({error.strerror}): raise its limit on open"
            " files (ulimit -n), where the trainer is started"
        ) from error
    return opened[0], opened[1]


def _nothing() -> None:
    """Do nothing: the default."""


def _nothing_of_it(_: str) -> None:
    """Do nothing: the default."""
