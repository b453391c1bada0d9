"""The job that ``faults.py`` disturbs: a lighthouse, three trainers, and what they wrote down."""

import contextlib
import itertools
import json
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from fleet import Fleet

from fabric.cli.launch.standbys import Standbys
from fabric.cli.run import STANDBY_NAME

HERE = Path(__file__).resolve().parent
JOB = "faults"
REPLICAS = ("r0", "r1", "r2")
DEADLINE_S = 240.0
POLL_S = 0.02


class AppendedLines:
    """The JSON lines of a file to which other processes append."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self.kept: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Read all complete lines so far; leave an incomplete line for the next read."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at += len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError):  # the last line of a killed writer may be incomplete
                    self.kept.append(json.loads(line))
        return self.kept


class FaultFleet(Fleet):
    """Three trainers that run ``faults_trainer.py`` until the end of the ``with`` block."""

    def __init__(self) -> None:
        super().__init__(str(HERE / "faults_trainer.py"), len(REPLICAS), {"FABRIC_JOB": JOB})
        self._steps = {name: AppendedLines(self.folder / f"{name}.steps") for name in REPLICAS}
        self._journals = {name: AppendedLines(self.folder / f"{name}.journal") for name in REPLICAS}
        self._standbys = {name: Standbys() for name in REPLICAS}
        self._events: list[dict[str, Any]] = []  # of lighthouses that were stopped
        self.mode("timer")

    def begin(self, name: str) -> float:
        """Start a trainer, or its next process; return the monotonic time of the start."""
        began = time.monotonic()
        environment = self._environment_of(name)
        process = self._standbys[name].take(0, environment)
        self.trainers[name] = process or self.start_program(name, environment)
        return began

    def stand_by(self) -> None:
        """Start the standby of each trainer that has none, as a launcher does, and wait until all wait."""
        for name, standbys in self._standbys.items():
            if not standbys.pids:
                standbys.start(0, self._environment_of(name), partial(self.start_program, name))
        pids = [pid for standbys in self._standbys.values() for pid in standbys.pids]
        self.wait(lambda: all(map(stands_by, pids)), "the standbys")

    def _environment_of(self, name: str) -> dict[str, str]:
        journal = str(self.folder / f"{name}.journal")
        return self.environment_of(name, FABRIC_JOURNAL=journal, FAULTS_DIR=str(self.folder))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for standbys in self._standbys.values():
            standbys.close()
        super().__exit__(kind, error, trace)

    def signal(self, name: str, number: signal.Signals) -> float:
        """Send a signal to a trainer; return the monotonic time of the signal."""
        sent = time.monotonic()
        self.trainers[name].send_signal(number)
        if number == signal.SIGKILL:
            self.trainers[name].wait()
        return sent

    def copy_store(self) -> None:
        """Copy the files of the lighthouse's store, as a backup of a stopped lighthouse does."""
        port = self._stop_lighthouse()
        _copy(self.folder, self.folder / "backup")
        self._start_lighthouse(port)

    def restore_store(self) -> None:
        """Put the copied files back while the lighthouse is stopped."""
        port = self._stop_lighthouse()
        _copy(self.folder / "backup", self.folder)
        self._start_lighthouse(port)

    def _stop_lighthouse(self) -> int:
        assert self._lighthouse is not None
        self._events = self.events()
        self._lighthouse.terminate()
        self._lighthouse.wait()
        return int(self._url.rsplit(":", 1)[1])

    def server_pid(self, name: str) -> int:
        """The process id of a replica's checkpoint server; OSError or ValueError where there is none."""
        return int((self.folder / "run" / name / "ckpt.lock").read_text())

    def mode(self, name: str) -> None:
        """``timer`` or ``cpu``: what the trainers compute with from their next step on."""
        new = self.folder / "mode.new"
        new.write_text(name)
        new.replace(self.folder / "mode")

    def act(self, name: str, what: str, seconds: float) -> None:
        """Have a trainer ``hold`` the interpreter's lock, or stay in ``user`` code, once."""
        new = self.folder / f"{name}.new"
        new.write_text(f"{what} {seconds}")
        new.replace(self.folder / f"{name}.act")

    def steps(self, name: str) -> list[dict[str, Any]]:
        """Return the lines that the trainers of this replica wrote about their steps."""
        return self._steps[name].read()

    def journal(self, name: str) -> list[dict[str, Any]]:
        """This replica's journal."""
        return self._journals[name].read()

    def events(self) -> list[dict[str, Any]]:
        """All lighthouses' events, with ``mono``, the time on this machine's monotonic clock."""
        token = (self.folder / "token").read_text().strip()
        request = urllib.request.Request(  # noqa: S310  (our own lighthouse)
            f"{self._url}/v1/jobs/{JOB}/events?after=0", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            events = json.load(answer)
        offset = time.monotonic() - time.time()
        return [*self._events, *({**event, "mono": event["t"] + offset} for event in events)]

    def wait(self, condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Poll until ``condition``; a trainer that ends unasked, or the deadline, ends the benchmark."""
        end = time.monotonic() + deadline_s
        while not condition():
            for name, process in self.trainers.items():
                if process.poll() not in (None, -signal.SIGKILL):
                    self.fail(f"{name} ended with {process.poll()}")
            if time.monotonic() > end:
                self.fail(f"waited {deadline_s:g} s for {what}")
            time.sleep(POLL_S)


def stands_by(pid: int) -> bool:
    """Whether this process is a standby that has imported torch."""
    return Path(f"/proc/{pid}/comm").read_text().strip() == STANDBY_NAME


def _copy(source: Path, target: Path) -> None:
    """Copy the files of a SQLite store, in place of those that are there."""
    target.mkdir(exist_ok=True)
    for old in target.glob("lighthouse.db*"):
        old.unlink()
    for path in source.glob("lighthouse.db*"):
        shutil.copy(path, target)


def durations(steps: list[dict[str, Any]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Seconds from the commit before to the commit of each step, within one process."""
    for before, step in itertools.pairwise(steps):
        if before["pid"] == step["pid"]:
            yield step["end"] - before["end"], step
