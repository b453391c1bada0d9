"""The etcd members that a drill starts as the store of its job."""

import socket
import urllib.error
import urllib.request
from pathlib import Path

from fabric.errors import FabricError
from fabric.runtime.guarded_processes import Processes


class EtcdMembers:
    """``count`` members on loopback; with none, ``url`` is empty."""

    def __init__(self, processes: Processes, out: Path, count: int) -> None:
        self._processes, self._out = processes, out
        self.names = tuple(f"etcd{number}" for number in range(count))
        ports = _ports(2 * count)
        self._client = dict(zip(self.names, ports[:count], strict=True))
        self._peer = dict(zip(self.names, ports[count:], strict=True))

    @property
    def url(self) -> str:
        """The store's URL, with all members."""
        addresses = ",".join(f"127.0.0.1:{port}" for port in self._client.values())
        return f"etcd://{addresses}" if addresses else ""

    def start(self) -> None:
        """Start every member."""
        for name in self.names:
            self.start_member(name)

    def folder(self, name: str) -> Path:
        """The folder of a member's data."""
        return self._out / name

    def start_member(self, name: str) -> None:
        """Start one member, with the data that it had."""
        client, peer = (f"http://127.0.0.1:{ports[name]}" for ports in (self._client, self._peer))
        cluster = ",".join(f"{other}=http://127.0.0.1:{port}" for other, port in self._peer.items())
        command = ["etcd", "--name", name, "--data-dir", str(self.folder(name))]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", cluster, "--logger", "zap", "--log-level", "error"]
        self._processes.start_program(name, command, self._out / "log" / f"{name}.log")

    def is_healthy(self, name: str) -> bool:
        """Whether the member answers that it is healthy. Raises FabricError if it has ended."""
        if self._processes.exit_code(name) is not None:
            raise FabricError(f"{name} ended: see its log {self._out / 'log' / f'{name}.log'}")
        url = f"http://127.0.0.1:{self._client[name]}/health"
        try:
            with urllib.request.urlopen(url, timeout=1.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def _ports(count: int) -> list[int]:
    """Return free ports of 127.0.0.1, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()
