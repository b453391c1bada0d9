"""The job that a drill starts: lighthouses, a store, a relay per replica, and a launcher per replica."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fabric.drill.injection.link_relay import LinkRelay, LinkWeather
from fabric.drill.injection.memory_ballast import available_bytes
from fabric.drill.injection.small_disk import SmallDisk, may_mount
from fabric.drill.run.etcd_members import EtcdMembers
from fabric.drill.schedule.fault_table import FaultNeed
from fabric.errors import ConfigError, FabricError
from fabric.runtime.guarded_processes import Processes
from fabric.runtime.http.lighthouse_client import Lighthouses

JOB = "drill"
READY_S = 120.0
POLL_S = 0.02
# Each replica has so many ports: its links, its checkpoint server, and those of a process before it.
_PORTS = 6
# The kernel takes the local ports of connections from higher ports, and must not take these.
_DURABLE_EVERY_S = "2"
_LAST_BYTES, _MOST_WORDS = 1000, 300
_LOW_PORT, _HIGH_PORT = 20_000, 32_000


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The job that a drill starts."""

    out: Path
    command: tuple[str, ...]  # the training command, the same for each replica
    replicas: int = 3
    lighthouses: int = 1
    store_members: int = 0  # etcd members; 0: the store is SQLite
    environment: Mapping[str, str] = field(default_factory=dict)
    may_lose: bool = False  # the drill may end the job
    faults: frozenset[str] = frozenset()  # the faults of the schedule, for which the job may need settings

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"r{number}" for number in range(self.replicas))

    def needs_met(self) -> frozenset[FaultNeed]:
        """Return the needs of faults that this job meets."""
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


class StartedJob:
    """Use it in a ``with`` block, which ends every process that it has started."""

    def __init__(self, options: JobOptions) -> None:
        self.options = options
        self.processes = Processes(options.environment)
        self.members = EtcdMembers(self.processes, options.out, options.store_members)
        self.relays: dict[str, LinkRelay] = {}  # by replica: in front of the replica
        self.lighthouse_relays: dict[str, LinkRelay] = {}  # by replica: in front of the lighthouse
        self.weathers = {name: LinkWeather() for name in options.names}  # of the links between replicas
        self.lighthouse_weathers = {name: LinkWeather() for name in options.names}
        self.urls: dict[str, str] = {}  # by lighthouse
        self.disk: SmallDisk | None = None  # of the durable checkpoints, where the schedule fills it
        self._token = secrets.token_hex(16)

    def __enter__(self) -> "StartedJob":
        options = self.options
        for name in ("journal", "log", "run"):
            (options.out / name).mkdir(mode=0o700, exist_ok=True)
        with os.fdopen(os.open(self.token_file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
            file.write(self._token + "\n")
        if "disk-full" in options.faults:
            self.disk = SmallDisk(options.out / "durable", available_bytes())
        try:
            self.members.start()
            for number in range(options.lighthouses):
                self.start_lighthouse(f"lighthouse{number}")
            for number, name in enumerate(options.names):
                self._start_replica(number, name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.end()
        for relay in (*self.relays.values(), *self.lighthouse_relays.values()):
            relay.close()

    @property
    def token_file(self) -> Path:
        return self.options.out / "token"

    @property
    def client(self) -> Lighthouses:
        """A client of the lighthouses."""
        return Lighthouses(tuple(self.urls.values()), JOB, self._token)

    @property
    def name(self) -> str:
        """The name of this drill in the logs of its trainers."""
        return self.options.out.name[:64]

    def run_dir(self, replica: str) -> Path:
        return self.options.out / "run" / replica

    def journal(self, replica: str) -> Path:
        return self.options.out / "journal" / f"{replica}.jsonl"

    def log(self, name: str) -> Path:
        return self.options.out / "log" / f"{name}.log"

    @property
    def is_over(self) -> bool:
        """Whether every launcher has ended with exit code 0. Raises FabricError if one ended otherwise."""
        codes = {name: self.processes.exit_code(name) for name in self.options.names}
        for name, code in codes.items():
            if code not in (0, None):
                raise FabricError(
                    f"the launcher of {name} ended with exit code {code}{self._last_words(name)}: "
                    f"see its log {self.log(name)}"
                )
        return set(codes.values()) == {0}

    def start_lighthouse(self, name: str) -> None:
        """Start a lighthouse, at its earlier address if it had one, and wait until it answers."""
        out = self.options.out
        ready = out / f"{name}.json"
        ready.unlink(missing_ok=True)
        port = self.urls[name].rpartition(":")[2] if name in self.urls else "0"
        store = self.members.url or f"sqlite:///{out / 'lighthouse.db'}"
        command = ["fabric.cli.main", "lighthouse", "--store", store, "--bind", "127.0.0.1", "--port", port]
        # A drill fails the same replica again and again, which must not keep the replica out.
        command += ["--token-file", str(self.token_file), "--ready-file", str(ready), "--failures", "0"]
        self.processes.start(name, command, self.log(name))
        wait_for(ready.exists, lambda: self._living(name, "is not ready"))
        self.urls[name] = str(json.loads(ready.read_bytes())["url"])

    def _living(self, name: str, what: str) -> str:
        code = self.processes.exit_code(name)
        if code is not None:
            raise FabricError(
                f"{name} ended with exit code {code}{self._last_words(name)}: see its log {self.log(name)}"
            )
        return f"{name} {what}: see its log {self.log(name)}"

    def _last_words(self, name: str) -> str:
        """Return the last line of a process's log without the launcher's own, in brackets, or nothing."""
        with contextlib.suppress(OSError), self.log(name).open("rb") as file:
            file.seek(max(0, self.log(name).stat().st_size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
            own = [line.strip() for line in lines if line.strip() and " fabric.cli.launch." not in line]
            text = own[-1] if own else ""
            return f" ({text[:_MOST_WORDS]})" if text else ""
        return ""

    def _start_replica(self, number: int, name: str) -> None:
        out = self.options.out
        run = out / "run" / name
        run.mkdir(mode=0o700, exist_ok=True)
        host, ports = self._relay(number, name)
        urls = list(self.urls.values())
        if len(urls) == 1:
            port = int(urls[0].rpartition(":")[2])
            relay = LinkRelay("127.0.0.1", {0: port}, name, self.lighthouse_weathers)
            self.lighthouse_relays[name] = relay
            urls = [f"http://127.0.0.1:{relay.ports[0]}"]
        self.processes.start(
            name,
            ["fabric.cli.main", "launch", "--no-python", *self.options.command],
            self.log(name),
            FABRIC_DRILL="1",
            FABRIC_JOB=JOB,
            FABRIC_REPLICA=name,
            FABRIC_REPLICAS=str(self.options.replicas),
            FABRIC_LIGHTHOUSE=",".join(urls),
            FABRIC_TOKEN_FILE=str(self.token_file),
            FABRIC_JOURNAL=str(self.journal(name)),
            FABRIC_RUN_DIR=str(run),
            FABRIC_BIND="127.0.0.1",
            FABRIC_ADVERTISE=host,
            FABRIC_PORTS=f"{ports[0]}-{ports[-1]}",
            # Links in shared memory would pass by the relay.
            FABRIC_DATA_PLANE="tcp",
            # The audit needs the digest of the state after every step.
            FABRIC_DIGEST_EVERY="1",
            **self._settings_of_faults(),
        )

    def _settings_of_faults(self) -> dict[str, str]:
        """Return the settings without which the job would not survive a fault of the schedule."""
        settings = {"FABRIC_ON_NAN": "skip"} if "poison" in self.options.faults else {}
        if self.disk is not None:
            settings |= {"FABRIC_DURABLE": str(self.disk.path), "FABRIC_DURABLE_EVERY_S": _DURABLE_EVERY_S}
        return settings

    def _relay(self, number: int, name: str) -> tuple[str, Sequence[int]]:
        """Start the relay in front of a replica; return its host and its ports."""
        host = f"127.77.{number // 200}.{number % 200 + 1}"
        ports = _free_ports(_PORTS)
        self.relays[name] = LinkRelay(host, {port: port for port in ports}, name, self.weathers)
        return host, ports


def wait_for(condition: Callable[[], object], problem: Callable[[], str], within_s: float = READY_S) -> None:
    """Poll until ``condition``. Raises FabricError with the sentence of ``problem`` after ``within_s``."""
    deadline = time.monotonic() + within_s
    while not condition():
        sentence = problem()
        if time.monotonic() > deadline:
            raise FabricError(sentence)
        time.sleep(POLL_S)


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
