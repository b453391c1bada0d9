"""Tells the lighthouse how a launcher's attempts end, so that people see replicas that never attach.

The launcher must keep one thread and must not wait, so a process of its own carries each report.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fabric.errors import FabricError, Unreachable
from fabric.model import shortened
from fabric.runtime.config import advertised_host, settings
from fabric.runtime.http.lighthouse_client import Lighthouses
from fabric.runtime.http.token_file import TokenFile
from fabric.runtime.process_environment import LAUNCH_MARK, own_program
from fabric.runtime.system_calls import die_with

# A report that no lighthouse has taken by then is old, and is dropped.
_TRIES_S = 30.0
_PAUSE_S = 2.0
# A launcher that gives up waits at most this long for its last report. On a busy host, where Ctrl-C ends many
# launchers at once, each starts a process that sends it.
_LAST_S = 15.0
_LONGEST = 300  # characters of a reason that the lighthouse takes


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """How an attempt ended, for the lighthouse."""

    attempt: int
    why: str
    last_line: str  # of standard error; empty: the launcher does not read it
    gave_up: bool  # the launcher starts the replica no more
    stopped: int  # the signal that ended the launcher; 0: none


class Reporter:
    """Sends reports one at a time; a newer report ends the sending of the older one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        # The mark would let the next attempt kill the sender. The layout may be a list of several.
        hidden = (LAUNCH_MARK, "FABRIC_LAYOUT")
        self._environment = {name: value for name, value in environment.items() if name not in hidden}
        self._sender: subprocess.Popen[bytes] | None = None

    def tell(self, report: AttemptReport) -> None:
        """Begin to report the end of an attempt; never waits."""
        self.close()
        body = asdict(replace(report, why=shortened(report.why, _LONGEST)))
        with contextlib.suppress(OSError):
            self._sender = subprocess.Popen(
                own_program("fabric.cli.launch.reports", json.dumps(body)),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509  (this process has one thread)
            )

    def finish(self) -> None:
        """Wait a moment until the last report has arrived."""
        if self._sender is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._sender.wait(_LAST_S)

    def close(self) -> None:
        """End the sending of a report."""
        if self._sender is not None:
            self._sender.kill()
            self._sender.wait()
            self._sender = None


def send(body: dict[str, Any]) -> None:
    """Send one report to the leader, and wait for a leader if there is none. Raises FabricError."""
    chosen = settings()
    token = TokenFile(chosen.token_file)  # it may be replaced while no lighthouse leads
    lighthouses = Lighthouses(chosen.lighthouse, chosen.job, token, chosen.tls)
    own = {"replica": chosen.replica, "host": advertised_host(chosen), "spare": chosen.spare}
    until = time.monotonic() + _TRIES_S
    while True:
        try:
            lighthouses.ask(lighthouses.path("launcher"), {**own, **body})
        except Unreachable:
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


if __name__ == "__main__":
    with contextlib.suppress(FabricError):  # the lighthouse knows no such job, or is of an older release
        send(json.loads(sys.argv[1]))
