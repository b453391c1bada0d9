"""Real etcds for tests: on free loopback ports, with a data directory of their own, stopped by pid.

Where the kernel allows it, each etcd dies with the test process, so that an aborted run leaves none behind.
"""

import http.client
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

START_WITHIN_S = 30.0
HOW_TO_GET_ONE = (
    "no etcd or etcdctl on PATH: install your distribution's etcd-server and etcd-client or etcd package, or "
    "put the binaries of a release archive on PATH (on Debian, as root: ops/dev/ensure-etcd.sh)"
)


def require_etcd(program: str = "etcd") -> str:
    """Return the path of the binary. Without it skip the test, or fail the test under ``CI=true``."""
    path = shutil.which(program)
    if path is None:
        if os.environ.get("CI") == "true":
            pytest.fail(HOW_TO_GET_ONE, pytrace=False)
        pytest.skip(HOW_TO_GET_ONE)
    return path


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = START_WITHIN_S) -> None:
    """Poll until the condition is true; fails the test after ``deadline_s``."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"still waiting after {deadline_s} s: {what}"
        time.sleep(0.02)


@dataclass
class EtcdMember:
    """One etcd. One etcd process; ``cluster`` is its --initial-cluster if it belongs to a cluster."""

    data: Path
    client_port: int
    peer_port: int
    name: str = "one"
    cluster: str = ""
    extra: tuple[str, ...] = ()
    tls: bool = False
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    @property
    def url(self) -> str:
        return f"etcd://{self.address}"

    def launch(self) -> None:
        scheme = "https" if self.tls else "http"
        client, peer = f"{scheme}://{self.address}", f"http://127.0.0.1:{self.peer_port}"
        command = [
            *die_with_parent(),
            require_etcd(),
            *("--name", self.name, "--data-dir", str(self.data)),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", self.cluster or f"{self.name}={peer}"),
            # Quick elections, so that tests need not wait for the default second.
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
            *("--logger", "zap", "--log-level", "error"),
            *self.extra,
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def log(self) -> Path:
        return self.data.parent / f"{self.data.name}.log"

    def is_healthy(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"etcd ended: {self.log.read_text(errors='replace')[-2000:]}"
        if self.tls:
            # Only the tests of certificates need this, and for them a listening etcd is enough.
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.client_port), timeout=2):
                return True
            return False
        connection = http.client.HTTPConnection("127.0.0.1", self.client_port, timeout=2)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    def start(self) -> None:
        self.launch()
        wait_until(self.is_healthy, f"etcd {self.name} to be healthy")

    def stop(self) -> None:
        """End the process for good, even if it is stopped."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def save(self, snapshot: Path) -> None:
        """Save a snapshot, as an operator does."""
        self._control("etcdctl", "--endpoints", self.address, "snapshot", "save", str(snapshot))

    def restore(self, snapshot: Path) -> None:
        """Stop the process, restore the snapshot into its data directory, and start it again."""
        self.stop()
        shutil.rmtree(self.data)
        peer = f"http://127.0.0.1:{self.peer_port}"
        self._control(
            *("etcdutl" if shutil.which("etcdutl") else "etcdctl", "snapshot", "restore", str(snapshot)),
            *("--data-dir", str(self.data), "--name", self.name, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", self.cluster or f"{self.name}={peer}"),
        )
        self.start()

    def _control(self, program: str, *words: str) -> None:
        command = [require_etcd(program), *words]
        done = subprocess.run(command, capture_output=True, env=os.environ | {"ETCDCTL_API": "3"})
        assert done.returncode == 0, done.stderr.decode(errors="replace")

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def running_etcd(directory: Path) -> Iterator[EtcdMember]:
    """Start one empty etcd, and wait until it is healthy."""
    with running_cluster(directory, 1) as members:
        yield members[0]


@contextmanager
def running_cluster(directory: Path, size: int) -> Iterator[list[EtcdMember]]:
    """Start a cluster of ``size`` members, and wait until it has a leader."""
    require_etcd()
    ports = free_ports(2 * size)
    names = [f"m{index}" for index in range(size)]
    peers = ports[size:]
    cluster = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in zip(names, peers, strict=True))
    members = [
        EtcdMember(directory / name, ports[index], peers[index], name, cluster)
        for index, name in enumerate(names)
    ]
    try:
        for member in members:
            member.launch()
        for member in members:
            wait_until(member.is_healthy, f"etcd {member.name} to be healthy")
        yield members
    finally:
        for member in members:
            member.stop()


def free_ports(count: int) -> list[int]:
    """Return free ports; hold each port until the last is known, so that all differ."""
    with_ports = [socket.socket() for _ in range(count)]
    try:
        for holder in with_ports:
            holder.bind(("127.0.0.1", 0))
        return [int(holder.getsockname()[1]) for holder in with_ports]
    finally:
        for holder in with_ports:
            holder.close()


def die_with_parent() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
