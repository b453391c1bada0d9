"""Settings of a trainer: arguments, else environment, else defaults. No other module reads the environment.

A number has its unit in its name. A value that cannot be used raises ConfigError with one sentence.
"""

import asyncio
import contextlib
import difflib
import ipaddress
import logging
import math
import multiprocessing
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fabric.errors import ConfigError
from fabric.protocol.rules.adaptive_timeout import problem
from fabric.runtime.guarded_processes import MARK
from fabric.runtime.http.http_service import parse_ports, read_token
from fabric.runtime.http.tls import Tls
from fabric.runtime.logs import FORMATS
from fabric.runtime.private_folder import rank_folder
from fabric.runtime.process_environment import LAUNCH_MARK, LAUNCH_RESTARTS, LAUNCH_STOP_S, LAYOUT_ORDERS
from fabric.runtime.rank_layout import RankLayout, is_count, parse_layout

# Messages to systemd from a service that it supervises: it is ready, and its event loop runs.
#
# systemd names a socket and a time. It kills and restarts a service that sends no message for that time. So
# a lighthouse whose loop hangs makes room for another one, although its process lives.


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Supervisor:
    """The systemd that supervises this service, if any."""

    address: str = ""  # address of systemd's datagram socket, empty for none
    watchdog_s: float = 0.0  # the longest silence that systemd allows, 0 for any

    def tell(self, state: str) -> None:
        """Send ``state``, such as READY=1; a failure to send does not end the service."""
        if not self.address:
            return
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto(state.encode(), address)
        except OSError as error:
            log.warning("the supervisor at %s did not receive %s: %s", self.address, state, error)

    async def show_life(self) -> None:
        """Send signs of life from the event loop, three within the time that the supervisor allows."""
        while self.address and self.watchdog_s > 0:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 3)


# Fabric owns this prefix. A name that fabric does not know is a mistake more often than the variable of
# another program, and an ignored setting changes a job in silence.
PREFIX = "FABRIC_"
_TEST_POINTS = "FABRIC_TEST_POINTS"
# Launchers, the demo, drills and tests set these in the processes that they start.
_OWN = (MARK, LAUNCH_MARK, LAUNCH_RESTARTS, LAUNCH_STOP_S, LAYOUT_ORDERS, _TEST_POINTS)
# Removed setting -> the setting that took its place.
_REPLACED = {"durable_every_s": "durable_every", "snapshot_max_age_s": "snapshot_every"}
_SERVICE = "_SERVICE_HOST"
# The beginnings of further variables that Kubernetes sets for a service.
_OF_SERVICE = ("_SERVICE_", "_PORT_")


ADAPT_MODES = ("off", "advise", "act")
# The words that a setting may have.
_CHOICES = {
    "adapt": ADAPT_MODES,
    "data_plane": ("auto", "tcp", "nccl"),
    "exchange": ("float32", "bfloat16", "int8"),
    "log": FORMATS,
    "on_exception": ("fail", "restart"),
    "on_nan": ("propagate", "stop", "skip"),
}

# An address that belongs to no network: the way there is the default route.
_ELSEWHERE = "http://192.0.2.1"
# A URL with a user and a password.
_PASSWORD = re.compile(r"://[^/?#]*:[^/]*@")
_EVERY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(s|m|h)|0*([1-9]\d{0,8})", re.ASCII)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST = 2000  # characters of a setting
_WORDS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("", "0", "false", "no", "off"), False
)


def _belongs(name: str, service: str) -> bool:
    """Whether Kubernetes sets ``name`` in each container, for a service such as ``fabric-lighthouse``."""
    rest = name.removeprefix(service) if name.startswith(service) else ""
    return rest == "_PORT" or rest.startswith(_OF_SERVICE)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one trainer; each field is an environment variable too, see ``settings``."""

    job: str = "job"  # name of the training run
    replica: str = ""  # name of this replica within the job
    replicas: str = "1"  # "3": start with 3, go on with 1 or more; "2:8": start with 8, need 2
    spare: bool = False  # hold the state, and contribute only while a member is missing
    ranks: str = ""  # ranks that `fabric launch` starts: "4", or "1:4"; empty: 1, or as the layout says
    layout: str = ""  # how this replica's model is spread over its ranks, such as "tp=2,layers=5+7"
    rack: str = ""  # rack of this host: readers of one shard lie in several, see ``loader(redundancy=)``
    lighthouse: tuple[str, ...] = ()  # base URLs of all lighthouses
    token_file: Path | None = None  # file with the job's token
    tls_cert: Path | None = None  # certificate of this process; set all three TLS files or none
    tls_key: Path | None = None  # key of that certificate
    tls_ca: Path | None = None  # authority that issues the job's certificates
    bind: str = "127.0.0.1"  # address to listen on
    advertise: str = ""  # host names or addresses that peers dial; empty: the address in ``bind``
    ports: str = "0"  # port, range such as 29500-29510, or 0 for any
    run_dir: Path | None = None  # folder of this replica's sockets, logs and lock on this host
    journal: Path | None = None  # file that gets one JSON line per event
    disable: bool = False  # plain training, without any service
    reproducible: bool = True  # equal gradients give bitwise equal states; off: no digests, no replay
    adapt: str = (
        "advise"  # about a slow replica: "off", "advise" (report what helps), "act" (lower its share)
    )
    on_nan: str = "propagate"  # average that is not finite: "propagate", "stop" the job, "skip" the update
    on_exception: str = "fail"  # the user's loop raises: "fail" the job, or "restart" this replica alone
    max_failed_rounds: int = 0  # failed exchanges in a row that raise RoundsFailed; 0: try for ever
    contact_s: float = 60.0  # time to find a lighthouse at the start
    exchange_s: float = 60.0  # time budget once all members are in a round; other deadlines derive from it
    user_code_s: float = 1800.0  # how long other members wait for a member in user code
    autonomy_s: float = 1800.0  # how long to step without any lighthouse
    data_plane: str = "auto"  # "auto" (members on one host share memory), "tcp" or "nccl"
    exchange: str = "float32"  # as what gradients of float32 travel over TCP: "bfloat16" or "int8" in blocks
    digest_every: int = 10  # steps from one digest of the state to the next
    snapshot_share: float = 0.02  # share of the step time that snapshots may cost
    snapshot_every: str = "10m"  # greatest age of the newest snapshot; or "100": exactly every 100 steps
    unequal: bool = False  # replicas may have different layouts of ranks
    retain_gradients: bool = True  # keep the local gradient, so that an aborted round is retried with it
    orphan_s: float = 600.0  # how long the checkpoint server lives without a trainer
    log: str = "text"  # form of the logs here and in the checkpoint server: "text" or "json" lines
    durable: str = ""  # folder or fsspec URL of durable checkpoints; empty for none
    durable_every: str = "10m"  # time from one durable checkpoint to the next; or "100": every 100 steps
    durable_keep: int = 3  # how many durable checkpoints are kept
    durable_required: bool = False  # refuse to start or write where storage has no checkpoint of the job
    drill: str = ""  # "1": `fabric drill` may break this process; or a file with the key of its orders

    @property
    def home(self) -> Path:
        """The folder of this replica's sockets and logs."""
        if self.run_dir is not None:
            return self.run_dir
        return _run_folders() / self.job / self.replica

    def of_rank(self, rank: int) -> "Settings":
        """Return the settings of one rank of a replica of several, with its own folder and journal."""
        if rank == 0:
            return self
        journal = self.journal
        if journal is not None:
            journal = journal.parent / f"rank{rank}" / journal.name
        return replace(self, run_dir=rank_folder(self.home, rank), journal=journal)

    @property
    def agreed(self) -> dict[str, str]:
        """The settings that must be equal on all members of a job, by name."""
        return {"on_nan": self.on_nan, "exchange": self.exchange}

    @property
    def min_replicas(self) -> int:
        """How many members a step needs."""
        return parse_replicas(self.replicas)[0]

    @property
    def tls(self) -> Tls:
        """The TLS of HTTP: to the lighthouse, to checkpoint servers, and of our own server."""
        return Tls(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def token(self) -> bytes:
        return b"" if self.token_file is None else read_token(self.token_file).encode()


@dataclass(frozen=True, slots=True)
class Interval:
    """The time between two snapshots or checkpoints: ``steps``, or ``seconds`` where that is 0."""

    steps: int = 0
    seconds: float = 0.0


def parse_every(name: str, given: object) -> Interval:
    """Return the interval of "100" (steps), "30s", "10m" or "1h". Raises ConfigError."""
    text = str(given)
    form = _EVERY.fullmatch(text.strip())
    if form is None:
        raise ConfigError(
            f'{_variable(name)} is "{text[:80]}": give a number of steps such as 100, or a time such as 10m'
        )
    if form[3]:
        return Interval(steps=int(form[3]))
    return Interval(seconds=float(form[1]) * _SECONDS[form[2]])


def parse_replicas(text: str) -> tuple[int, int]:
    """Return (least, start) of "3" or "2:8"; raises ConfigError."""
    parts = text.split(":")
    if len(parts) > 2 or not all(is_count(part) for part in parts):
        raise ConfigError(f'FABRIC_REPLICAS is "{text[:80]}": give a count such as 3, or a range such as 2:8')
    least, start = (1, int(parts[0])) if len(parts) == 1 else (int(parts[0]), int(parts[1]))
    if least > start:
        raise ConfigError(f'FABRIC_REPLICAS is "{text}": the first number must not exceed the second')
    return least, start


def check_no_password(what: str, url: str) -> None:
    """Raise ConfigError for a storage URL with a password, without repeating the URL."""
    if _PASSWORD.search(url):
        raise ConfigError(
            f"{what} holds a password, which logs would show: put it into fsspec's configuration"
            " (~/.config/fsspec, or FSSPEC_PROTOCOL_PASSWORD) and leave it out of the URL"
        )


def check_main_guard() -> None:
    """Raise ConfigError in a worker process that runs the script again, as Python's ``spawn`` does."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "a worker process runs the script from its first line, and came to attach: put the training of "
            'the script below `if __name__ == "__main__":`'
        )


def settings(environment: Mapping[str, str] = os.environ, **arguments: Any) -> Settings:
    """Return the settings from ``arguments`` (None: not given), else ``FABRIC_*`` variables, else defaults.

    Raises ConfigError naming the variable, for values that cannot be used and for unknown variables.
    """
    refuse_unknown_variables(environment)
    names = {f.name: f.type for f in fields(Settings)}
    unknown = set(arguments) - set(names)
    if unknown:
        wrong = sorted(unknown)[0]
        if wrong in _REPLACED:
            raise ConfigError(f"the setting {wrong} is gone: give {_REPLACED[wrong]}='10m' in its place")
        raise ConfigError(f"unknown setting {wrong}: known are {', '.join(sorted(names))}")
    values = {k: v for k, v in arguments.items() if v is not None}
    for name in names:
        text = environment.get(_variable(name), "")
        if len(text) > _LONGEST:  # a sentence about it repeats it
            raise ConfigError(f"{_variable(name)} has {len(text)} characters: give at most {_LONGEST}")
        if name not in values and text:
            values[name] = _parse(name, text)
    return _checked(_anchored(Settings(**values)))


def refuse_unknown_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError for the first ``FABRIC_`` variable that is neither a setting nor fabric's own.

    It names the nearest one. An empty variable counts as not set.
    """
    variables = {_variable(field.name) for field in fields(Settings)}
    services = {name.removesuffix(_SERVICE) for name in environment if name.endswith(_SERVICE)}
    for name in sorted(name for name, text in environment.items() if text and name.startswith(PREFIX)):
        if name in variables or name in _OWN or any(_belongs(name, service) for service in services):
            continue
        replaced = _REPLACED.get(name.removeprefix(PREFIX).lower(), "")
        if _variable(replaced) in variables:
            raise ConfigError(f"the setting {name} is gone: set {_variable(replaced)}=10m in its place")
        words = {setting.removeprefix(PREFIX): setting for setting in sorted(variables)}
        nearest = difflib.get_close_matches(name.removeprefix(PREFIX), words, 1)
        remedy = f"set {words[nearest[0]]} in its place, or unset it" if nearest else "unset it"
        raise ConfigError(f"the variable {name[:80]} is set, and fabric has no such setting: {remedy}")


def given_text(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the text that the environment has for a setting; empty where it has none."""
    return environment.get(_variable(name), "")


def reader_access(
    token_file: str | Path | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[str, Tls]:
    """Return the token and the TLS with which a process outside of the job reads a state.

    ``token_file``: default FABRIC_TOKEN_FILE; without a file the token is empty. Raises ConfigError.
    """
    names = ("tls_cert", "tls_key", "tls_ca")
    files = [_parse(name, text) if (text := environment.get(_variable(name), "")) else None for name in names]
    tls = Tls(*files)
    tls.check()
    path = token_file or environment.get(_variable("token_file"), "")
    return read_token(Path(path)) if path else "", tls


def launched_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Count the ranks that the launcher (`fabric launch`, torchrun) started for this replica; 1 without one.

    Raises ConfigError.
    """
    text = environment.get("WORLD_SIZE", "1")
    if not is_count(text):
        raise ConfigError(f'WORLD_SIZE is "{text[:80]}": it must be the number of ranks of this replica')
    return int(text)


def asked_layout(environment: Mapping[str, str] = os.environ) -> RankLayout:
    """Return the layout that this process's environment asks for, over the ranks that were launched.

    Raises ConfigError.
    """
    return parse_layout(environment.get("FABRIC_LAYOUT", "")).over(launched_ranks(environment))


def layout_orders() -> int:
    """Return the descriptor over which `fabric launch` offers layouts and takes orders; -1 without one."""
    text = os.environ.get(LAYOUT_ORDERS, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1


def supervisor(environment: Mapping[str, str] = os.environ) -> Supervisor:
    """Return the systemd that started this process, if it wants messages."""
    allowed_us = environment.get("WATCHDOG_USEC", "")
    is_number = allowed_us.isascii() and allowed_us.isdecimal() and len(allowed_us) < 16
    return Supervisor(environment.get("NOTIFY_SOCKET", ""), int(allowed_us) / 1e6 if is_number else 0.0)


def armed_points() -> str:
    """Return the failpoints that a test has armed in this process."""
    return os.environ.get(_TEST_POINTS, "")


def _variable(name: str) -> str:
    return f"FABRIC_{name.upper()}"


def _parse(name: str, text: str) -> Any:
    default = getattr(_DEFAULTS, name)
    if name in ("token_file", "run_dir", "journal", "tls_cert", "tls_key", "tls_ca"):
        return Path(text)
    if name == "lighthouse":
        return tuple(part.strip().rstrip("/") for part in text.split(",") if part.strip())
    if name == "drill":
        return text if text.startswith("/") else "1" if _yes_or_no(name, text) else ""
    if isinstance(default, bool):
        return _yes_or_no(name, text)
    try:
        return type(default)(text)
    except ValueError:
        raise ConfigError(
            f'{_variable(name)} is "{text[:80]}": it must be a {type(default).__name__}'
        ) from None


def _yes_or_no(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word not in _WORDS:
        raise ConfigError(
            f'{_variable(name)} is "{text[:80]}": it must be 1, true, yes or on, or 0, false, no or off'
            + (", or the absolute path of a file with the key of its orders" if name == "drill" else "")
        )
    return _WORDS[word]


def _anchored(chosen: Settings) -> Settings:
    # Make a relative folder absolute: the writer of durable checkpoints has another working folder than the
    # trainer.
    check_no_password("FABRIC_DURABLE", chosen.durable)
    if not chosen.durable or "://" in chosen.durable or chosen.durable.startswith("~"):
        return chosen
    return replace(chosen, durable=str(Path(chosen.durable).absolute()))


def _checked(chosen: Settings) -> Settings:
    parse_replicas(chosen.replicas)
    _check_words(chosen)
    if chosen.disable:
        return chosen
    if not chosen.lighthouse:
        raise ConfigError(
            "no lighthouse is named: set FABRIC_LIGHTHOUSE=http://host:port (or FABRIC_DISABLE=1)"
        )
    for url in chosen.lighthouse:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f'FABRIC_LIGHTHOUSE has "{url[:80]}": give URLs such as http://host:port')
    parse_layout(chosen.layout)
    chosen.tls.check()
    _check_ports(str(chosen.ports))
    for name in ("job", "replica", *(["rack"] if chosen.rack else [])):
        _check_name(name, getattr(chosen, name))
    for name in (
        "contact_s",
        "exchange_s",
        "user_code_s",
        "autonomy_s",
        "digest_every",
        "snapshot_share",
        "orphan_s",
        "durable_keep",
        "max_failed_rounds",
    ):
        value, least = getattr(chosen, name), 1 if name == "durable_keep" else 0
        if not (math.isfinite(value) and value >= least):
            raise ConfigError(f"{_variable(name)} is {value:g}: give a finite number from {least}")
    for name in ("snapshot_every", "durable_every"):
        parse_every(name, getattr(chosen, name))
    wrong = problem(chosen.exchange_s, chosen.user_code_s, chosen.autonomy_s)
    if wrong:
        raise ConfigError(wrong)
    return chosen


def _check_words(chosen: Settings) -> None:
    for name, words in _CHOICES.items():
        if (word := getattr(chosen, name)) not in words:
            *first, last = (f'"{x}"' for x in words)
            raise ConfigError(f'{_variable(name)} is "{word}": it must be {", ".join(first)} or {last}')


def _run_folders() -> Path:
    """Return the folder of all run folders: in XDG_RUNTIME_DIR, else in the temporary folder."""
    own = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if own.is_absolute() and own.is_dir():
        there = own.lstat()
        if there.st_uid == os.geteuid() and not there.st_mode & 0o077:
            return own / "fabric"
    return Path(tempfile.gettempdir()) / f"fabric-{os.getuid()}"


def _check_ports(text: str) -> None:
    try:
        parse_ports(text)
    except ConfigError:
        raise ConfigError(
            f'FABRIC_PORTS is "{text}": give a port, a range such as 29500-29510, or 0 for any'
        ) from None


def _check_name(what: str, name: str) -> None:
    allowed = all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
    if not name.strip(".") or len(name) > 64 or not allowed:
        raise ConfigError(
            f'FABRIC_{what.upper()} is "{name[:80]}": give a name of 1 to 64 letters, digits, ".", "_" or'
            ' "-", not of dots alone'
        )


def advertised_host(chosen: Settings, *, by_name: bool = False) -> str:
    """Return the host name or address that peers dial: the setting, else the bound address.

    A host that binds all its addresses gives the one from which it reaches a lighthouse or other networks.
    Its name is the last choice, because hosts have names that are cloned, unknown, or mean the host itself.
    With ``by_name`` the name is the first choice, as in a URL under TLS: certificates have names. Of several
    addresses in the setting it is the first.
    """
    if chosen.advertise:
        return chosen.advertise.partition(",")[0].strip()
    if chosen.bind in ("0.0.0.0", "::", ""):
        return ("" if by_name else _outward_address(chosen)) or socket.gethostname()
    return chosen.bind


def advertised_hosts(chosen: Settings) -> list[str]:
    """Return the addresses that links are spread over: those of the setting, or ``advertised_host``."""
    return [x.strip() for x in chosen.advertise.split(",") if x.strip()] or [advertised_host(chosen)]


def _outward_address(chosen: Settings) -> str:
    """Return this host's address towards a lighthouse, else towards other networks; empty if it has none."""
    family = socket.AF_UNSPEC if chosen.bind == "::" else socket.AF_INET
    for url in (*chosen.lighthouse, _ELSEWHERE):
        with contextlib.suppress(OSError, ValueError):
            where = urlsplit(url)
            places = socket.getaddrinfo(where.hostname, where.port or 80, family, socket.SOCK_DGRAM)
            for kind, _, _, _, place in places:
                address = _source(kind, place)
                if address and not ipaddress.ip_address(address).is_loopback:
                    return address
    return ""


def _source(family: int, place: Any) -> str:
    """Return the address from which this host reaches ``place``; empty where no route leads there."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(place)  # sends nothing: it asks the kernel for a route
        return str(sock.getsockname()[0])
    return ""


_DEFAULTS = Settings()
