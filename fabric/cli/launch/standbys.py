"""Standbys: processes that have imported torch and fabric, and become ranks when ranks start again.

An import of torch takes seconds of a processor, and much longer from a network's disk. So each rank of this
host has a standby, which is its next process: `fabric run` in the rank's environment, session and streams,
which waits before it reads the script. The launcher then sends the variables that only the attempt knows. So
a script cannot tell a rank that was a standby from another one.

A standby serves only a rank whose environment is else the one that it was started with, because torch reads
some variables when it is imported. Where a standby is dead, busy or stopped, the rank starts without it.
"""

import contextlib
import json
import select
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from fabric.model import Value
from fabric.runtime.process_environment import STANDBY

# No module reads these variables when it is imported. A spare host knows most of them only once it has taken
# a node's place.
_OF_ATTEMPT = (
    *("RANK", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "FABRIC_REPLICA"),
)
_ANSWER_S = 1.0  # a standby that waits answers at once
_MAX_WORD = 64

# Starts the program of a rank with this environment; the process inherits these descriptors too.
StartRank = Callable[[Mapping[str, str], tuple[int, ...]], "subprocess.Popen[bytes]"]


class _Standby(Value):
    process: "subprocess.Popen[bytes]"
    connection: socket.socket
    environment: dict[str, str]  # without the variables of the attempt

    def become(self, environment: Mapping[str, str]) -> bool:
        """Let the process be a rank with this environment; return whether it has begun to be one."""
        with contextlib.suppress(OSError):
            if self.connection.recv(_MAX_WORD, socket.MSG_DONTWAIT) == b"ready":
                own = {name: environment[name] for name in _OF_ATTEMPT if name in environment}
                self.connection.send(json.dumps(own).encode())
                if select.select([self.connection], [], [], _ANSWER_S)[0]:
                    return self.connection.recv(_MAX_WORD) == b"begins"
        return False


class Standbys:
    """The standbys of one launcher, by local rank."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Standby] = {}
        self._killed: list[subprocess.Popen[bytes]] = []  # the kernel may end them late

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(x.process.pid for x in self._waiting.values())

    def start(self, local_rank: int, environment: Mapping[str, str], start: StartRank) -> None:
        """Start the standby of a rank that runs now, in its environment. Raises OSError."""
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            name = {STANDBY: f"{number} {Path(f'/proc/self/fd/{number}').readlink()}"}
            try:
                process = start({**environment, **name}, (number,))
            except OSError:
                own.close()
                raise
        self._waiting[local_rank] = _Standby(process, own, _lasting(environment))

    def take(self, local_rank: int, environment: Mapping[str, str]) -> "subprocess.Popen[bytes] | None":
        """Return the process of a rank that has begun with this environment, where there was a standby."""
        standby = self._waiting.pop(local_rank, None)
        if standby is None:
            return None
        with standby.connection:
            if standby.environment == _lasting(environment) and standby.become(environment):
                return standby.process
        self._end(standby.process)
        return None

    def close(self) -> None:
        """End all standbys."""
        for standby in self._waiting.values():
            standby.connection.close()
            self._end(standby.process)
        self._waiting.clear()

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        process.kill()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        self._killed = [x for x in (*self._killed, process) if x.poll() is None]


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _OF_ATTEMPT}
