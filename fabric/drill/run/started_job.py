"""The job that a drill starts: lighthouses, a store, a relay per replica, and a launcher per replica."""

import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import field

from fabric.drill.injection.link_relay import LinkRelay, LinkWeather
from fabric.drill.schedule.fault_table import FaultNeed
from fabric.errors import ConfigError, FabricError, Refused
from fabric.model import Value
from fabric.runtime.guarded_processes import Processes
from fabric.runtime.local_job import LocalJob
from fabric.runtime.system_calls import available_bytes

REPORTS = ("report.html", "report.json", "junit.xml")
# Each replica has so many ports: its links, its checkpoint server, and those of a process before it.
_PORTS = 6
_DURABLE_EVERY = "2s"
# The kernel takes the local ports of connections from higher ports, and must not take these.
_LOW_PORT, _HIGH_PORT = 20_000, 32_000
_CLONE_NEWNS = 0x20000
_CAP_SYS_ADMIN = 21
# Used with care: the file system lies in the memory of this host.
_SHARE = 4
_MOST_BYTES = 1 << 30


def may_mount() -> bool:
    rights = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()
    return bool(int(rights[0], 16) >> _CAP_SYS_ADMIN & 1)


class SmallDisk:
    """A file system in memory that the drill can fill: a tmpfs, in a mount namespace of the drill's own.

    Make it in the thread that starts the processes, which see it. The kernel unmounts it with the last of
    them, so that nothing is left behind when the drill is killed. Raises Refused.
    """

    def __init__(self, path: Path, available_bytes: int) -> None:
        self.path = path
        self.nbytes = min(_MOST_BYTES, available_bytes // _SHARE)
        path.mkdir(exist_ok=True)
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
            reason = os.strerror(ctypes.get_errno())
            raise Refused(f"the drill gets no mount namespace ({reason}): leave disk-full away")
        self._mount("--make-rprivate", "/")
        self._mount("-t", "tmpfs", "-o", f"size={self.nbytes}", "fabric-drill", str(path))

    def fill(self) -> None:
        """Shrink the file system to what it holds. Raises Refused."""
        held = os.statvfs(self.path)
        used = (held.f_blocks - held.f_bfree) * held.f_frsize
        self._resize(max(used, held.f_frsize))

    def empty(self) -> None:
        """Give the file system its room again. Raises Refused."""
        self._resize(self.nbytes)

    @property
    def free_bytes(self) -> int:
        held = os.statvfs(self.path)
        return held.f_bavail * held.f_frsize

    def _resize(self, nbytes: int) -> None:
        self._mount("-o", f"remount,size={nbytes}", "fabric-drill", str(self.path))

    @staticmethod
    def _mount(*words: str) -> None:
        command: Sequence[str] = ["mount", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Refused(f"{' '.join(command)} failed ({done.stderr.strip()}): leave disk-full away")


class JobOptions(Value):
    """The job that a drill starts."""

    out: Path
    command: tuple[str, ...]  # the training command, the same for each replica
    replicas: int = 3
    lighthouses: int = 1
    store_members: int = 0  # etcd members; 0: the store is SQLite
    environment: Mapping[str, str] = field(default_factory=dict)
    may_lose: bool = False  # the drill may end the job
    faults: frozenset[str] = frozenset()  # the faults of the schedule, for which the job may need settings
    name: str = "drill"  # the job's name
    has_relays: bool = True  # faults of links need them

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"r{number}" for number in range(self.replicas))

    def needs_met(self) -> frozenset[FaultNeed]:
        met = {FaultNeed.TRAINERS, FaultNeed.OWN_JOB}
        met.add(FaultNeed.ONE_LIGHTHOUSE if self.lighthouses == 1 else FaultNeed.TWO_LIGHTHOUSES)
        met |= {FaultNeed.TWO_REPLICAS} if self.replicas > 2 else set()
        met |= {FaultNeed.THREE_MEMBERS} if self.store_members > 2 else set()
        met |= {FaultNeed.MAY_LOSE} if self.may_lose else set()
        met |= {FaultNeed.MOUNT} if may_mount() else set()
        return frozenset(met)

    def check(self) -> None:
        """Raise ConfigError for a job that cannot be started here."""
        if not self.command or shutil.which(self.command[0]) is None:
            program = self.command[0] if self.command else ""
            raise ConfigError(f'there is no program "{program}": give the training command after --')
        if self.lighthouses > 1 and not self.store_members:
            raise ConfigError("two lighthouses need an etcd: give --store-members 3 with --lighthouses 2")
        if self.store_members and shutil.which("etcd") is None:
            raise ConfigError("there is no etcd on PATH: install it, or leave --store-members away")


class EtcdMembers:
    """The etcd members on loopback that are the store of a job; with none, ``url`` is empty."""

    def __init__(self, processes: Processes, out: Path, count: int) -> None:
        self._processes, self._out = processes, out
        self.names = tuple(f"etcd{number}" for number in range(count))
        ports = _free_ports(2 * count)
        self._client = dict(zip(self.names, ports[:count], strict=True))
        self._peer = dict(zip(self.names, ports[count:], strict=True))

    @property
    def url(self) -> str:
        """The store's URL, with all members."""
        addresses = ",".join(f"127.0.0.1:{port}" for port in self._client.values())
        return f"etcd://{addresses}" if addresses else ""

    def start(self) -> None:
        for name in self.names:
            self.start_member(name)

    def folder(self, name: str) -> Path:
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


class StartedJob(LocalJob):
    """The job on this host, with a relay in front of each replica and of its lighthouse."""

    def __init__(self, options: JobOptions) -> None:
        super().__init__(options.out, options.name, options.names, options.environment)
        self.options = options
        self.members = EtcdMembers(self.processes, options.out, options.store_members)
        self.relays: dict[str, LinkRelay] = {}  # by replica: in front of the replica
        self.lighthouse_relays: dict[str, LinkRelay] = {}  # by replica: in front of the lighthouse
        self.weathers = {name: LinkWeather() for name in options.names}  # of the links between replicas
        self.lighthouse_weathers = {name: LinkWeather() for name in options.names}
        self.disk: SmallDisk | None = None  # of the durable checkpoints, where the schedule fills it
        # A drill fails the same replica again and again, which must not keep the replica out.
        self.lighthouse_options = ("--limit", "failures=0")

    def __enter__(self) -> "StartedJob":
        options = self.options
        super().__enter__()
        if "disk-full" in options.faults:
            self.disk = SmallDisk(options.out / "durable", available_bytes())
        try:
            self.members.start()
            self.store = self.members.url or self.store
            for number in range(options.lighthouses):
                self.start_lighthouse(f"lighthouse{number}")
            for number, name in enumerate(options.names):
                self._start_replica(number, name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for relay in (*self.relays.values(), *self.lighthouse_relays.values()):
            relay.close()

    def _start_replica(self, number: int, name: str) -> None:
        # The audit needs the digest of the state after every step.
        settings = {"FABRIC_DRILL": "1", "FABRIC_DIGEST_EVERY": "1"}
        if self.options.has_relays:
            settings |= self._relay(f"127.77.{number // 200}.{number % 200 + 1}", name)
        if "poison" in self.options.faults:
            settings["FABRIC_ON_NAN"] = "skip"
        if self.disk is not None:
            settings |= {"FABRIC_DURABLE": str(self.disk.path), "FABRIC_DURABLE_EVERY": _DURABLE_EVERY}
        self.start_replica(name, ["--no-python", *self.options.command], settings)

    def _relay(self, host: str, name: str) -> dict[str, str]:
        """Put relays in front of the replica and of its lighthouse; return the settings that lead there."""
        ports = _free_ports(_PORTS)
        self.relays[name] = LinkRelay(host, {port: port for port in ports}, name, self.weathers)
        # Links in shared memory would pass by the relay.
        settings = {"FABRIC_ADVERTISE": host, "FABRIC_DATA_PLANE": "tcp"}
        settings["FABRIC_BIND"] = f"127.0.0.1:{ports[0]}-{ports[-1]}"
        if len(self.urls) == 1:
            port = int(next(iter(self.urls.values())).rpartition(":")[2])
            relay = LinkRelay("127.0.0.1", {0: port}, name, self.lighthouse_weathers)
            self.lighthouse_relays[name] = relay
            settings["FABRIC_LIGHTHOUSE"] = f"http://127.0.0.1:{relay.ports[0]}"
        return settings


def _free_ports(count: int) -> range:
    """Return neighbouring ports of 127.0.0.1 that are free now."""
    for _ in range(100):
        start = _LOW_PORT + secrets.randbelow(_HIGH_PORT - _LOW_PORT)
        if all(_is_free(port) for port in range(start, start + count)):
            return range(start, start + count)
    raise FabricError("this host has no neighbouring free ports: end other programs, and drill again")


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
