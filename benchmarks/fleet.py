"""A job of real processes for a benchmark: a lighthouse, and trainers that run a script's own ``--member``.

Everything lives in a temporary folder and is ended and removed with the ``with`` block, however it is left
(see ``common.leave_nothing`` for a signal).
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from common import absent

START_S = 60.0


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Fleet:
    """Trainers ``r0`` to ``r{n-1}`` of one job; ``environment`` is added to everybody's."""

    bind = "127.0.0.1"  # where the lighthouse listens
    failures = 0  # the benchmark kills replicas on purpose, so no number of failures keeps a replica out

    def __init__(self, script: str, replicas: int, environment: dict[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fabric-benchmark-"))
        self._script = script
        self._replicas = replicas
        self._environment = environment or {}
        self.trainers: dict[str, subprocess.Popen[bytes]] = {}
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self._url = ""

    def __enter__(self) -> Self:
        try:
            self._start_lighthouse()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start_lighthouse(self, port: int = 0) -> None:
        token = self.folder / "token"
        token.write_text("benchmark\n")
        token.chmod(0o600)
        ready = self.folder / "lighthouse.json"
        ready.unlink(missing_ok=True)
        command = [*self.inside(""), sys.executable, "-m", "fabric.cli.main", "lighthouse"]
        command += ["--bind", f"{self.bind}:{port}"]
        command += ["--store", f"sqlite:///{self.folder}/lighthouse.db", "--token-file", str(token)]
        command += ["--ready-file", str(ready), "--limit", f"failures={self.failures}"]
        with (self.folder / "lighthouse.log").open("ab") as log:
            self._lighthouse = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if self._lighthouse.poll() is not None or time.monotonic() > deadline:
                self.fail("the lighthouse did not start")
            time.sleep(0.02)
        self._url = json.loads(ready.read_text())["url"]

    def inside(self, replica: str) -> list[str]:
        """Return the beginning of this replica's command line, or with an empty name of the lighthouse's."""
        return []

    def start(self, replica: str, **more: str) -> "subprocess.Popen[bytes]":
        """Start (or restart) one trainer: this script with ``--member``, its output in ``{replica}.log``."""
        self.trainers[replica] = self.start_program(replica, self.environment_of(replica, **more))
        return self.trainers[replica]

    def environment_of(self, replica: str, **more: str) -> dict[str, str]:
        """Return the environment of one trainer, with ``more`` variables."""
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "FABRIC_REPLICA": replica,
            "FABRIC_REPLICAS": str(self._replicas),
            "FABRIC_LIGHTHOUSE": self._url,
            "FABRIC_TOKEN_FILE": str(self.folder / "token"),
            "FABRIC_RUN_DIR": str(self.folder / "run" / replica),
            "BENCHMARK_OUT": str(self.folder / f"{replica}.json"),
            **self._environment,
            **more,
        }

    def start_program(
        self, replica: str, environment: Mapping[str, str], inherited: tuple[int, ...] = ()
    ) -> "subprocess.Popen[bytes]":
        """Start a process of the script, which inherits these descriptors."""
        command = [*self.inside(replica), sys.executable, "-m", "fabric.cli.main", "run"]
        command += [self._script, "--member"]
        with (self.folder / f"{replica}.log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, pass_fds=inherited)

    def results(self, deadline_s: float) -> dict[str, Any]:
        """Wait until every trainer has ended well; return each replica's output in BENCHMARK_OUT."""
        deadline = time.monotonic() + deadline_s
        while any(process.poll() is None for process in self.trainers.values()):
            failed = [name for name, process in self.trainers.items() if process.poll() not in (None, 0)]
            if failed or time.monotonic() > deadline:
                self.fail(f"{failed[0]} ended" if failed else f"not done within {deadline_s:g} s")
            time.sleep(0.05)
        if failed := [name for name, process in self.trainers.items() if process.returncode]:
            self.fail(f"{failed[0]} ended")
        return {name: json.loads((self.folder / f"{name}.json").read_text()) for name in self.trainers}

    def fail(self, why: str) -> None:
        """End the benchmark without figures, with the logs."""
        for log in sorted(self.folder.glob("*.log")):
            sys.stderr.write(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}\n")
        raise SystemExit(f"{Path(self._script).name}: {why}")

    def _servers(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes()
                if b"fabric.ckpt_server" in words and str(self.folder).encode() in words:
                    found.append(int(path.parent.name))
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in [*self.trainers.values(), self._lighthouse]:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        for pid in self._servers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while self._servers() and time.monotonic() < deadline:
            time.sleep(0.02)
        shutil.rmtree(self.folder, ignore_errors=True)


def need_gloo() -> None:
    """End the benchmark if torch lacks gloo, the reference of the comparison."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        absent("this torch has no gloo, which is what fabric is compared with")
