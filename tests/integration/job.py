"""A whole job of real processes for one test: lighthouse, trainers, their checkpoint servers, journals.

Each trainer has the variables that ``fabric launch`` sets: frameworks behave otherwise under a launcher.
"""

import contextlib
import itertools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if str(TESTS := Path(__file__).resolve().parents[1]) not in sys.path:  # where a script imports this
    sys.path.insert(0, str(TESTS))

import forked_processes

from fabric.cli.launch.attempt import AttemptSpec, Place
from fabric.runtime.rank_layout import RankLayout

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
# With this checkout, so that its code runs, and not that of another checkout which is installed.
SEARCH_PATH = os.pathsep.join(
    map(str, (HERE, EXAMPLES, HERE.parent / "conformance", HERE.parent, HERE.parent.parent))
)
_BEGINS = re.compile(
    r"fabric: \S+: ((begins|begins again with|goes on with) job \S+ at step \d+, generation |epoch \d+ with )"
)
# A trainer that finds no lighthouse gives up after a second.
SHORT_CONTACT = {"FABRIC_AUTONOMY_S": "1", "FABRIC_EXCHANGE_S": "1"}
DEADLINE_S = 180.0  # such a wait usually takes a second or two, but the machine may be loaded


def launcher_variables(number: int) -> dict[str, str]:
    """Return what ``fabric launch`` adds to the environment of a replica of one rank, at start ``number``."""
    # Port 0 for the rendezvous of one rank: the kernel chooses.
    attempt = AttemptSpec((), {}, RankLayout(1), Place(), number=number, run=f"test.{number}")
    return attempt.rank_environment(0)


class StartedProcess(int):
    """A process id with the process's start time, because the kernel reuses ids."""

    number: int


class Zygote:
    """Forks trainers; the tests of a session share one zygote, and one that has imported the frameworks."""

    def __init__(self, imports: Sequence[str] = ()) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SEARCH_PATH}
        environment["ZYGOTE_IMPORTS"] = " ".join(imports)
        environment[forked_processes.ADDRESS] = forked_processes.address()
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._started: queue.Queue[StartedProcess] = queue.Queue()
        self._living: dict[int, StartedProcess] = {}
        self._statuses: dict[int, int] = {}  # number of the start -> its exit status
        self._numbers = itertools.count()
        self.changed = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._process.stdout:
            message = json.loads(line)
            if "pid" in message:
                process = StartedProcess(message["pid"])
                process.number = next(self._numbers)
                self._living[process] = process
                self._started.put(process)
            else:
                with self.changed:
                    self._statuses[self._living.pop(message["ended"]).number] = message["status"]
                    self.changed.notify_all()

    def status_of(self, process: StartedProcess) -> int | None:
        """Return the exit status of this process; None while it runs."""
        return self._statuses.get(process.number)

    def start(self, environment: dict[str, str], log: Path) -> StartedProcess:
        log.touch()  # a test may read it before the process writes its first line
        request = {"environment": environment, "log": str(log)}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._started.get(timeout=DEADLINE_S)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=DEADLINE_S)


@dataclass
class Job:
    """Trainers by replica id; ended ones are restarted by ``finish`` unless they exited with 0 or 1."""

    zygote: Zygote
    folder: Path
    replicas: int = 3
    environment: dict[str, str] = field(default_factory=dict)
    lighthouse: subprocess.Popen | forked_processes.ForkedProcess | None = None
    url: str = ""
    pids: dict[str, StartedProcess] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    killed: dict[str, StartedProcess] = field(default_factory=dict)
    later_points: dict[str, list[str]] = field(default_factory=dict)
    bind: str = "127.0.0.1"
    network: str = ""  # the network namespace of the lighthouse

    def __enter__(self) -> "Job":
        self.folder.mkdir(parents=True, exist_ok=True)
        self.token.write_text("a-test-token\n")
        self.token.chmod(0o600)
        self.start_lighthouse()
        return self

    @property
    def token(self) -> Path:
        return self.folder / "token"

    def start_lighthouse(self, port: int = 0, apart: int = 0) -> None:
        """Start a lighthouse whose protocol version is ``apart`` above ours."""
        ready = self.folder / "lighthouse.json"
        ready.unlink(missing_ok=True)
        arguments = ["--store", self.store, "--bind", f"{self.bind}:{port}"]
        arguments += ["--token-file", str(self.token), "--ready-file", str(ready)]
        arguments += ["--namespace", self.environment.get("TEST_NAMESPACE", "default")]
        if failures := self.environment.get("TEST_FAILURES"):
            arguments += ["--limit", f"failures={failures}"]
        with (self.folder / "lighthouse.log").open("ab") as log:
            if apart:
                script = [str(HERE / "version_lighthouse.py"), str(apart)]
                command = [sys.executable, *script, "lighthouse", *arguments]
                self.lighthouse = subprocess.Popen(command, stdout=log, stderr=log)
            else:
                self.lighthouse = forked_processes.start_lighthouse(arguments, log, self.network)
        self.wait_for(ready.exists, "the lighthouse's ready file")
        self.url = json.loads(ready.read_text())["url"]

    @property
    def store(self) -> str:
        return self.environment.get("TEST_STORE", f"sqlite:///{self.folder}/lighthouse.db")

    def start(self, replica: str, points: str = "", **more: str) -> int:
        """Start one trainer, as a launcher does: once a killed one has ended. Returns its pid."""
        killed = self.killed.pop(replica, None)
        if killed is not None:
            with self.zygote.changed:
                ended = self.zygote.changed.wait_for(
                    lambda: self.zygote.status_of(killed) is not None, timeout=DEADLINE_S
                )
            assert ended, f"the killed process {killed} of {replica} has not ended"
        self.starts[replica] = self.starts.get(replica, 0) + 1
        launched = launcher_variables(self.starts[replica] - 1)
        environment = launched | self.trainer_environment(replica, FABRIC_TEST_POINTS=points, **more)
        self.pids[replica] = self.zygote.start(environment, self.folder / f"{replica}.log")
        return self.pids[replica]

    def trainer_environment(self, replica: str, **more: str) -> dict[str, str]:
        """Return the environment of a trainer of this job."""
        if "FABRIC_DURABLE" in self.environment:
            # Each write would import torch again, which takes three seconds of a processor.
            more = {forked_processes.WRITERS: forked_processes.address(forked_processes.TORCH), **more}
        return {
            "FABRIC_JOB": "test",
            "FABRIC_REPLICA": replica,
            "FABRIC_REPLICAS": str(self.replicas),
            "FABRIC_LIGHTHOUSE": self.url,
            "FABRIC_TOKEN_FILE": str(self.token),
            "FABRIC_JOURNAL": str(self.journal(replica)),
            "FABRIC_RUN_DIR": str(self.folder / "run" / replica),
            "FABRIC_DIGEST_EVERY": "1",
            **self.environment,
            **more,
        }

    def start_all(self, points: dict[str, str] | None = None) -> None:
        for i in range(self.replicas):
            self.start(f"r{i}", (points or {}).get(f"r{i}", ""))

    def journal(self, replica: str) -> Path:
        return self.folder / "journal" / f"{replica}.jsonl"

    def events(self, replica: str, event: str = "") -> list[dict]:
        return read_events(self.journal(replica), event)

    def ask(self, url: str) -> bytes:
        """Return the answer at ``url``, a path of the lighthouse or of any of the job's servers."""
        headers = {"Authorization": f"Bearer {self.token.read_text().strip()}"}
        url = self.url + url if url.startswith("/") else url
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.read()

    def status(self) -> dict:
        """Return the job's status from the lighthouse."""
        return json.loads(self.ask("/v1/jobs/test"))

    def told(self, kind: str = "") -> list[dict]:
        """Return the lighthouse's events of this kind, or all events."""
        found = json.loads(self.ask("/v1/jobs/test/events"))
        return [e for e in found if not kind or e["kind"] == kind]

    def recoveries(self) -> list[dict]:
        """Return the lighthouse's recovery records."""
        return [json.loads(line) for line in self.ask("/v1/jobs/test/recoveries").splitlines()]

    def wait_for(self, condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Poll until ``condition``; fails with the logs. A look takes at most a sixth of the time."""
        end = time.monotonic() + deadline_s
        while True:
            began = time.monotonic()
            if condition():
                return
            took = time.monotonic() - began
            assert began < end, f"waited {deadline_s:g} s for {what}\n{self.logs()}"
            with self.zygote.changed:
                self.zygote.changed.wait(min(0.01 + 5 * took, 0.1))

    def ended(self, replica: str) -> int | None:
        """The exit code of the current process (negative: a signal), or None while it runs."""
        status = self.zygote.status_of(self.pids[replica])
        return None if status is None else os.waitstatus_to_exitcode(status)

    def finish(self, restart: bool = True, deadline_s: float = DEADLINE_S) -> None:
        """Restart replicas that ended by a signal or 75, until every replica has exited with 0 or 1."""

        def all_done() -> bool:
            for replica in list(self.pids):
                code = self.ended(replica)
                if code is None:
                    continue
                if code in (0, 1) or not restart:
                    self.codes[replica] = code
                else:
                    later = self.later_points.get(replica, [])
                    self.start(replica, later.pop(0) if later else "")
            return len(self.codes) == len(self.pids)

        self.wait_for(all_done, "every trainer's end", deadline_s)

    def kill(self, replica: str) -> None:
        """SIGKILL the trainer of one replica."""
        _signal(self.pids[replica], signal.SIGKILL)
        self.killed[replica] = self.pids[replica]

    def kill_together(self, step: int, replicas: Sequence[str]) -> None:
        """Start all replicas; kill these together, each at the first micro-batch of its share of ``step``.

        If each killed itself, a slow replica might inherit the micro-batch at which another died.
        """
        gate = self.folder / "gate"
        awaited = [gate / f"{replica}.awaited" for replica in replicas]
        gate.mkdir()
        self.start_all({replica: f"forward@{step}=wait:{gate / replica}" for replica in replicas})
        self.wait_for(lambda: all(path.exists() for path in awaited), f"{replicas} to be in step {step}")
        for replica in replicas:
            self.kill(replica)

    def is_stopped(self, replica: str) -> bool:
        """Whether the kernel says that the trainer is stopped."""
        try:
            text = Path(f"/proc/{self.pids[replica]}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] == "T"

    def stop_lighthouse(self, number: int = signal.SIGTERM) -> None:
        if self.lighthouse is not None:
            self.lighthouse.send_signal(number)
            self.lighthouse.wait(timeout=20)
            self.lighthouse = None

    def server_pids(self) -> list[int]:
        """Checkpoint servers of this job, found by their run directories."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"fabric.ckpt_server" in words and any(str(self.folder).encode() in w for w in words):
                found.append(int(path.parent.name))
        return found

    def said(self, name: str) -> str:
        """Return a trainer's output without its first line, and without those on waits and epochs, which
        depend on the machine's speed.
        """
        lines = (self.folder / f"{name}.log").read_text().splitlines(keepends=True)
        return "".join(x for x in lines if " has waited " not in x and not _BEGINS.match(x))

    def logs(self) -> str:
        parts = []
        logs = sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("run/*/*.log"))
        parts += [f"--- {p.name} ({p.parent.name})\n" + p.read_text()[-3000:] for p in logs]
        for path in sorted(self.folder.glob("journal/**/*.jsonl")):
            tail = [line[:300] for line in path.read_text().splitlines()[-6:]]
            parts.append(f"--- {path.name}\n" + "\n".join(tail))
        return "\n".join(parts)

    def __exit__(self, *_: object) -> None:
        for pid in self.pids.values():
            if self.zygote.status_of(pid) is None:
                _signal(pid, signal.SIGCONT)
                _signal(pid, signal.SIGKILL)
        self.stop_lighthouse()
        for pid in self.server_pids():
            _signal(pid, signal.SIGINT)  # at once, without a wait for a durable checkpoint
        self.wait_for(lambda: not self.server_pids(), "the checkpoint servers' end", 20)


def read_events(journal: Path, event: str = "") -> list[dict]:
    """The events of this kind, or all, in a journal to which a process may still write."""
    if not journal.exists():
        return []
    found = []
    for line in journal.read_text().splitlines():
        try:
            body = json.loads(line)
        except ValueError:
            continue
        if not event or body["event"] == event:
            found.append(body)
    return found


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
