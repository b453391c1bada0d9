"""Processes that carry a mark in their environment, which every descendant inherits.

A process group does not hold all descendants: some begin a session of their own. A signal goes through a
pidfd, which is opened before the mark is checked. So the signal never hits another process to which the
kernel has given the same pid in between.
"""

import contextlib
import os
import select
import signal
import time
from pathlib import Path


class MarkedProcesses:
    """The processes with ``name=mark`` in their environment, or in one of ``sessions``, which may be set."""

    def __init__(self, name: str, mark: str) -> None:
        self._entry = f"{name}={mark}".encode()
        # A process that writes its own title may overwrite its environment, but stays in its session.
        self.sessions: frozenset[int] = frozenset()

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

    def kill(self, within_s: float) -> None:
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
