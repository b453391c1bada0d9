"""The processes that ``lighthouse.py`` starts and ends: an etcd, lighthouses, and three trainers."""

import http.client
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import absent
from fleet import free_port

HERE = Path(__file__).resolve().parent
REPLICAS = ("r0", "r1", "r2")


def wait_for(
    condition: Callable[[], object], what: str, within_s: float = 60.0, pause_s: float = 0.02
) -> None:
    """Wait until the condition holds. Raises TimeoutError when it takes too long."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {within_s:g} s for {what}")
        time.sleep(pause_s)


class BenchmarkProcess:
    """One process of ours, ended with the ``with`` block however it is left."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def launch(self) -> None:
        with self._log.open("ab") as log:
            # Set the working directory, which -m searches first, so that the benchmark measures this
            # checkout.
            self._process = subprocess.Popen(
                self.command(), env=self.environment(), stdout=log, stderr=log, cwd=HERE.parent
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> None:
        assert self._process is not None
        self._process.wait(30)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def rss_kb(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])

    def cpu_s(self) -> float:
        """Return the processor seconds of all its threads, user and system."""
        words = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


class Etcd(BenchmarkProcess):
    """One etcd with data of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "etcd.log")
        if shutil.which("etcd") is None:
            absent("there is no etcd on PATH: install your distribution's etcd-server")
        self._data = folder / "etcd"
        self._client, self._peer = free_port(), free_port()
        self.url = f"etcd://127.0.0.1:{self._client}"

    def __enter__(self) -> "Etcd":
        self.launch()
        wait_for(self._is_healthy, "etcd to be healthy")
        return self

    def command(self) -> list[str]:
        client, peer = f"http://127.0.0.1:{self._client}", f"http://127.0.0.1:{self._peer}"
        return [
            *(
                "etcd",
                "--name",
                "one",
                "--data-dir",
                str(self._data),
                "--logger",
                "zap",
                "--log-level",
                "error",
            ),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"one={peer}"),
        ]

    def revision(self) -> int:
        """Return the revision of the store: each write adds one."""
        body = json.dumps({"key": "AA==", "count_only": True}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self._client}/v3/kv/range", body, 10) as answer:
            return int(json.load(answer)["header"]["revision"])

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._client}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class BenchmarkLighthouse(BenchmarkProcess):
    """One lighthouse on a port that stays its own."""

    token = "benchmark"  # noqa: S105  (nothing outside of this machine hears of it)

    def __init__(self, folder: Path, store: str, name: str) -> None:
        super().__init__(folder / f"{name}.log")
        self._store, self._port = store, free_port()
        self._token_file, self._ready = folder / "token", folder / f"{name}.json"
        self._token_file.write_text(self.token + "\n")
        self._token_file.chmod(0o600)
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> "BenchmarkLighthouse":
        self.launch()
        wait_for(self._ready.exists, "a lighthouse to be ready")
        return self

    def command(self) -> list[str]:
        self._ready.unlink(missing_ok=True)
        return [
            *(sys.executable, "-m", "fabric.cli.main", "lighthouse", "--store", self._store),
            *("--bind", f"127.0.0.1:{self._port}", "--token-file", str(self._token_file)),
            *("--ready-file", str(self._ready), "--limit", "max-replicas=30000"),
        ]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(HERE.parent)}

    def serves(self) -> bool:
        """Whether it leads and answers for the jobs: the others send people away."""
        return self._status("/v1/jobs") == 200

    def follows(self) -> bool:
        return self._status("/v1/jobs") == 307

    def job(self, name: str) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310
            f"{self.url}/v1/jobs/{name}", headers={"Authorization": f"Bearer {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
            return found

    def _status(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()


class Trainers:
    """Three trainers that run ``lighthouse_trainer.py``; the first writes down when its steps ended."""

    def __init__(self, folder: Path, urls: list[str], token: str) -> None:
        self._folder, self._urls = folder, urls
        self._steps = folder / "steps"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log = folder / "trainers.log"

    def __enter__(self) -> "Trainers":
        for name in REPLICAS:
            environment = {
                **os.environ,
                "PYTHONPATH": str(HERE.parent),
                "OMP_NUM_THREADS": "1",
                "FABRIC_JOB": "steps",
                "FABRIC_REPLICA": name,
                "FABRIC_REPLICAS": str(len(REPLICAS)),
                "FABRIC_LIGHTHOUSE": ",".join(self._urls),
                "FABRIC_TOKEN_FILE": str(self._folder / "token"),
                "FABRIC_RUN_DIR": str(self._folder / name),
                "BENCHMARK_STEPS": str(self._steps) if name == REPLICAS[0] else "",
            }
            with self._log.open("ab") as log:
                command = [sys.executable, str(HERE / "lighthouse_trainer.py")]
                self._processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for pid in self._servers():
            os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not self._servers(), "the checkpoint servers to end")

    def wait_steps(self, count: int) -> None:
        """Wait until this many more steps are done."""
        until = len(self._ends()) + count
        wait_for(lambda: len(self._ends()) >= until, f"{count} steps: see {self._log}", 120.0)

    def durations(self, since: float = 0.0) -> list[float]:
        """Seconds of every step that ended after this monotonic time."""
        ends = self._ends()
        return [b - a for a, b in itertools.pairwise(ends) if b >= since]

    def _ends(self) -> list[float]:
        try:
            lines = self._steps.read_text().split("\n")
        except FileNotFoundError:
            return []
        return [float(line) for line in lines[:-1]]

    def _servers(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes()
            except OSError:
                continue
            if b"fabric.ckpt_server" in words and str(self._folder).encode() in words:
                found.append(int(path.parent.name))
        return found


def cores() -> tuple[int, list[int]]:
    """The lighthouses' core, and all others: the crowd's and etcd's."""
    first, *others = sorted(os.sched_getaffinity(0))
    return first, others or [first]


def pinned(process: BenchmarkProcess, to: list[int]) -> None:
    """Pin the process with all of its threads."""
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), to)
