"""Watches the trainer process through the kernel: running, stopped or gone.

The watch has two sources. The process's pidfd becomes readable when the process is dead, and wakes the loop
at once. But the kernel first frees the dying process's memory, which takes up to 200 ms per GiB, and then
closes its sockets. So the server also reads ``/proc/PID/stat`` every 10 ms. A read takes 4 microseconds, and
the wake-up 50, so one timer serves all ranks of the host. A flag in that file shows an exit within a fraction
of a millisecond, and only that file shows a stopped process. A running process is ``running``, however busy
it is.

``Lifetime`` decides when the server lets a rank go: on request, a while after the job's end, or without a
trainer. The server must outlive its trainer, but not for ever: a host whose trainer never comes back would
keep the memory. So a timer runs while no trainer is attached. Another timer runs after the trainer has
announced the job's end. A trainer that attaches stops both timers.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable

from fabric.ckpt_server.server.slots import CRASH_MARKER, SlotTable
from fabric.errors import ConfigError, Refused
from fabric.model import MAX_MICRO_BATCHES, Death, JobEnd
from fabric.runtime.system_calls import create_memfd, refused

RUNNING = "running"
STOPPED = "stopped"
GONE = "gone"
ABSENT = "absent"
STATES = (RUNNING, STOPPED, GONE, ABSENT)

LOOK_S = 0.01
_STAT_BYTES = 4096
# How long a new server waits for its first trainer at least: it has begun before the trainer can attach.
FIRST_TRAINER_S = 10.0

# Kernel flags of a task (include/linux/sched.h), as /proc shows them.
_PF_EXITING = 0x4
_PF_SIGNALED = 0x400


def state_in(text: str) -> str:
    """Return ``running``, ``stopped`` or ``gone`` for the ``text`` of ``/proc/PID/stat``."""
    fields = text.rpartition(")")[2].split()  # the name before may hold spaces and parentheses
    state, flags, threads = fields[0], int(fields[6]), int(fields[17])
    # A process's first thread may exit while other threads still run; a signal ends all threads together.
    ending = flags & _PF_EXITING or state in "ZX"
    if ending and (flags & _PF_SIGNALED or threads <= 1):
        return GONE
    return STOPPED if state in "Tt" else RUNNING


class TrainerWatch:
    """The trainer of one rank: at most one at a time, attached or detached.

    ``changed`` is set whenever its state may have changed; ``hang_up``, which is called when its process is
    dead, closes its channel. Lives on one event loop.
    """

    def __init__(self, changed: asyncio.Event | None = None) -> None:
        self.pid = 0
        self.incarnation = 0
        self.is_attached = False
        self.ended: JobEnd | None = None  # the job's end that the trainer reported when it ended
        self.changed = changed or asyncio.Event()
        self.hang_up: Callable[[], None] = lambda: None
        self.on_change: Callable[[str], None] = lambda _state: None  # called with the trainer's new state
        self.on_attach: Callable[[], None] = lambda: None  # called before another process replaces this one
        # The stat file and the pidfd refer to this process, even when another process gets its pid.
        self._stat = self._pidfd = -1
        self._dead = False
        self._seen = ABSENT  # its state at the last look

    def attach(self, pid: int, incarnation: int) -> None:
        """Begin to watch process ``pid``, whose channel is open. Raises Refused, with nothing changed, where
        this process has no free descriptors or may not open a pidfd."""
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
        """Note that the channel is closed; keep watching the process."""
        self.is_attached = False
        self.changed.set()

    def leave_word(self, ended: JobEnd | None) -> None:
        """Keep the end of the job that the trainer saw, to report it to the next lighthouse."""
        self.ended = ended
        self.changed.set()

    def give_up(self) -> None:
        """Count the process as gone, because it has said that it leaves, although it may still run."""
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
            return state_in(os.pread(self._stat, _STAT_BYTES, 0).decode(errors="replace"))
        except ProcessLookupError:
            self._dead = True
            return GONE

    def signal(self, number: int) -> None:
        """Send the process a signal, never another process with its pid. Raises ProcessLookupError."""
        if self._pidfd < 0:
            raise ProcessLookupError(f"process {self.pid} is gone")
        signal.pidfd_send_signal(self._pidfd, number)

    def look(self) -> None:
        """Set ``changed`` after a change since the last look, which only ``/proc`` may show."""
        if (state := self.state) != self._seen:
            self._seen = state
            self.changed.set()
            self.on_change(state)

    def close(self) -> None:
        """Stop watching; from now on the trainer counts as gone."""
        self._unwatch()
        self._dead = True

    def _on_death(self) -> None:
        self.close()
        self.changed.set()
        self.hang_up()

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
        os.close(create_memfd("fabric-attach"))  # else it holds no snapshot, and its host's links never form
    except (OSError, ConfigError) as error:
        for descriptor in opened:
            os.close(descriptor)
        if isinstance(error, ConfigError):
            raise Refused(f"the checkpoint server can hold no state: {error}") from error
        if isinstance(error, FileNotFoundError | ProcessLookupError):
            return None
        call = "pidfd_open" if opened else "open"
        raise Refused(f"the checkpoint server cannot watch process {pid} {refused(call, error)}") from error
    return opened[0], opened[1]


class Lifetime:
    """Says when the server lets a rank go, ``orphan_s`` after its last trainer left: sets ``ended``, with the
    ``reason``. ``at_once``: a signal has ended the server, which waits for no work under way."""

    def __init__(self, orphan_s: float) -> None:
        self.ended = asyncio.Event()
        self.reason = ""
        self.at_once = asyncio.Event()
        self._orphan_s = orphan_s
        self._orphan_timer: asyncio.TimerHandle | None = None
        self._finish_timer: asyncio.TimerHandle | None = None

    def trainer_came(self) -> None:
        """Stop the timers: a trainer is attached."""
        for timer in (self._orphan_timer, self._finish_timer):
            if timer is not None:
                timer.cancel()
        self._orphan_timer = self._finish_timer = None

    def trainer_left(self, at_least_s: float = 0.0) -> None:
        """Start the timer of a rank without a trainer: ``orphan_s``, or ``at_least_s`` if that is more."""
        if self._orphan_timer is None:
            orphan_s = max(self._orphan_s, at_least_s)
            reason = f"no trainer has been attached for {orphan_s:g} s"
            loop = asyncio.get_running_loop()
            self._orphan_timer = loop.call_later(orphan_s, self.end, reason)

    def finish(self, linger_s: float) -> None:
        """End it ``linger_s`` from now, because the job is done; a later call replaces the time."""
        if self._finish_timer is not None:
            self._finish_timer.cancel()
        loop = asyncio.get_running_loop()
        # Do not end before the answer to this request is sent.
        self._finish_timer = loop.call_later(max(linger_s, 0.02), self.end, "the job is done")

    def end(self, reason: str, *, at_once: bool = False) -> None:
        """End it now; ``at_once``: without waiting for work under way."""
        if at_once:
            self.at_once.set()
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()


# The micro-batch at which a trainer died: the trainer notes its position in eight bytes of shared memory.
#
# A note is one aligned store by the trainer, without a system call. The server reads the note when the
# trainer has ended. It keeps the notes of all trainers of this replica until a trainer of the replica is at
# a later step. A trainer that exits in order clears its note first, so only a killed or crashed process
# leaves a note.


MARKER_BYTES = 8
# The marker's low bits hold the micro-batch plus one; zero means that the trainer is at no micro-batch.
_BITS = 21
_MOST = 16


def encode_marker(step: int, micro_batch: int) -> int:
    """Return the marker that the trainer stores while it is at this micro-batch."""
    return (step << _BITS) | (micro_batch + 1)


class CrashLog:
    """The deaths of this replica's processes that this server saw."""

    def __init__(self, memory: SlotTable, trainer: TrainerWatch) -> None:
        self._slot = memory.slot(CRASH_MARKER, 0)
        self._trainer = trainer
        self._seen: list[Death] = []
        trainer.on_attach = self._turn

    def seen(self, state: str) -> tuple[Death, ...]:
        """Return the deaths at steps that the trainer has not passed; ``state``: the trainer's."""
        step, micro_batch = self._read()
        if micro_batch >= 0:
            death = Death(self._trainer.incarnation, step, micro_batch)
            if state == GONE and death not in self._seen:
                self._seen = [*self._seen, death][-_MOST:]
            elif state != GONE:
                self._seen = [d for d in self._seen if d.step >= step]
        return tuple(self._seen)

    def _turn(self) -> None:
        """Keep and clear the last trainer's note, because another trainer attaches."""
        self.seen(self._trainer.state)
        if self._slot.memfd is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._slot.memfd.fd, bytes(MARKER_BYTES), 0)

    def _read(self) -> tuple[int, int]:
        """Return (step, micro-batch) of the note; the micro-batch is -1 without a note, or with garbage."""
        view = self._slot.memfd.view if self._slot.memfd is not None else b""
        if len(view) < MARKER_BYTES:  # the marker's memory is still being allocated, or was released
            return 0, -1
        value = int.from_bytes(view[:MARKER_BYTES], sys.byteorder)
        step, micro_batch = value >> _BITS, (value & ((1 << _BITS) - 1)) - 1
        # A trainer that wrote beyond its own memory may have left any bytes.
        return step, micro_batch if micro_batch < MAX_MICRO_BATCHES else -1
