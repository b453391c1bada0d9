"""The processes that a supervisor starts and ends, which a mark in their environment identifies.

A launcher starts trainers in sessions of their own, and a trainer starts a checkpoint server that outlives
it. So process groups do not cover all of them, but every descendant inherits the mark.

A supervisor that is killed with SIGKILL cannot end its processes. So a guard, a process without the mark,
waits for the end of a pipe that the supervisor alone holds open. Then the guard ends all processes that carry
the mark.
"""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from fabric.runtime.process_environment import LAUNCH_MARK, own_program, start_helper


class MarkedProcesses:
    """The processes with ``name=mark`` in their environment, or in one of ``sessions``, but not ``spared``.

    Both may be set.

    A process group does not hold all descendants: some begin a session of their own. A signal goes through a
    pidfd, which is opened before the mark is checked. So the signal never hits another process to which the
    kernel has given the same pid in between.
    """

    def __init__(self, name: str, mark: str) -> None:
        self._entry = f"{name}={mark}".encode()
        # A process that writes its own title may overwrite its environment, but stays in its session.
        self.sessions: frozenset[int] = frozenset()
        self.spared: frozenset[int] = frozenset()  # pids of children that have not been waited for

    def living(self) -> list[int]:
        """The pids of all these processes, zombies excepted."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [pid for pid in pids if self._is_ours(pid)]

    def signal(self, pid: int, number: int) -> bool:
        """Send a signal to process ``pid`` if it is one of these; return whether it was."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return False
        try:
            if not self._is_ours(pid):
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        else:
            return True
        finally:
            os.close(descriptor)

    def kill(self, within_s: float = 10.0) -> None:
        """SIGKILL all these processes, for at most ``within_s``."""
        deadline = time.monotonic() + within_s
        # A marked process may start another during the search: search again until no process is left.
        while (pids := self.living()) and time.monotonic() < deadline:
            for pid in pids:
                self.signal(pid, signal.SIGKILL)
            self.wait(0.5)

    def wait(self, within_s: float) -> None:
        """Wait until the processes that live now have ended, at most ``within_s``."""
        deadline = time.monotonic() + within_s
        for pid in self.living():
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(pid)
                try:
                    select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
                finally:
                    os.close(descriptor)

    def _is_ours(self, pid: int) -> bool:
        if pid in self.spared:
            return False
        # The environment of a zombie is empty, and that of another user's process cannot be read.
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if self._entry in environment.split(b"\0"):
                return True
            if not self.sessions:
                return False
            state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            return False
        return state not in "ZX" and int(session) in self.sessions


class LauncherWatch:
    """Kills what launchers leave behind that end before their checkpoint server. Lives on one event loop.

    The kernel kills the ranks of a launcher that ends, but not the processes that the ranks have started.
    """

    def __init__(self) -> None:
        # Mark of a living launcher -> rank -> session of the rank's newest trainer.
        self._sessions: dict[str, dict[int, int]] = {}

    def watch(self, mark: str, trainer: int, rank: int) -> None:
        """Watch the launcher with ``mark``, if it has started process ``trainer``, the new one of ``rank``.

        A person may have started the trainer with a copy of the mark, in the session of a shell.
        """
        try:
            pid = int(mark.partition("-")[0])
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError, OverflowError):  # no launcher with this mark lives
            return
        # A launcher is older than its trainer. So a process that has its id by now cannot be an ancestor.
        ancestor = trainer
        with contextlib.suppress(OSError):
            while ancestor not in (pid, 0):
                ancestor = int(Path(f"/proc/{ancestor}/stat").read_text().rpartition(")")[2].split()[1])
        if ancestor != pid or mark in self._sessions:
            os.close(pidfd)
        else:
            self._sessions[mark] = {}
            asyncio.get_running_loop().add_reader(pidfd, self._on_end, mark, pidfd)
        if ancestor == pid:
            with contextlib.suppress(OSError):
                self._sessions[mark][rank] = os.getsid(trainer)

    def _on_end(self, mark: str, pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(pidfd)
        os.close(pidfd)
        marked = MarkedProcesses(LAUNCH_MARK, mark)
        marked.sessions = frozenset(self._sessions.pop(mark).values())
        loop.run_in_executor(None, marked.kill)


MARK = "FABRIC_GUARD_MARK"


class Processes:
    """Starts processes, and ends all of them with their descendants."""

    def __init__(self, environment: Mapping[str, str], mark: str = "") -> None:
        self.mark = mark or uuid.uuid4().hex
        self._marked = MarkedProcesses(MARK, self.mark)
        self._environment = {**environment, MARK: self.mark}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self, name: str, module: Sequence[str], log: Path, **environment: str) -> None:
        """Run ``python -P -m module...`` as ``name``, its output appended to ``log``."""
        self.start_program(name, own_program(*module), log, **environment)

    def start_program(self, name: str, command: Sequence[str], log: Path, **environment: str) -> None:
        """Run ``command`` as ``name``, its output appended to ``log``."""
        if self._guard is None:
            self._guard = guard(self.mark)
        with log.open("ab") as output:
            self._children[name] = subprocess.Popen(
                command,
                env=self._environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal must reach only the supervisor, which ends the others in order.
                start_new_session=True,
            )

    def exit_code(self, name: str) -> int | None:
        """Return the exit code of process ``name``, None while it runs."""
        return self._children[name].poll()

    def pid_of(self, name: str) -> int:
        return self._children[name].pid

    def kill(self, pid: int) -> bool:
        """Send SIGKILL to process ``pid`` if it carries the mark; return whether it did."""
        return self._marked.signal(pid, signal.SIGKILL)

    def end(self, grace_s: float = 5.0) -> None:
        """End every process that carries the mark: with SIGTERM, then after ``grace_s`` with SIGKILL.

        In the main thread, ignore a second Ctrl-C until all have ended: it would leave some processes behind.
        """
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._end(grace_s)
        finally:
            signal.signal(signal.SIGINT, before)

    def _end(self, grace_s: float) -> None:
        for pid in self._marked.living():
            self._marked.signal(pid, signal.SIGTERM)
        self._marked.wait(grace_s)
        self._marked.kill(grace_s)
        for child in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=grace_s)
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait()
            self._guard = None


def guard(mark: str) -> "subprocess.Popen[bytes]":
    """Start a process that ends all processes with ``mark`` once its standard input ends.

    Its input ends when it is closed, or when this process has ended for any reason."""
    return start_helper("fabric.runtime.guarded_processes", mark, stdin=subprocess.PIPE)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    Processes({}, sys.argv[1]).end()
