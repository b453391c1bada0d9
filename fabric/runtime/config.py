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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from fabric.errors import ConfigError
from fabric.model import Value
from fabric.protocol.rules.adaptive_timeout import problem
from fabric.runtime.guarded_processes import MARK
from fabric.runtime.http import parse_ports
from fabric.runtime.http.tls import Tls
from fabric.runtime.http.token_file import read_token
from fabric.runtime.logs import FORMATS
from fabric.runtime.private_folder import rank_folder
from fabric.runtime.process_environment import LAUNCH_MARK, LAUNCH_RESTARTS, LAUNCH_STOP_S, LAYOUT_ORDERS
from fabric.runtime.rank_layout import RankLayout, is_count, parse_layout

# Messages to systemd from a service that it supervises: it is ready, and its event loop runs.
#
# systemd names a socket and a time. It kills and restarts a service that sends no message for that time. So
# a lighthouse whose loop hangs makes room for another one, although its process lives.


log = logging.getLogger(__name__)


class Supervisor(Value):
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
# Removed setting -> what to give in its place.
_REPLACED = {
    "contact_s": ("autonomy_s", "1800"),
    "durable_every_s": ("durable_every", "10m"),
    "durable_keep": ("durable_every", "10m keep 3"),
    "durable_required": ("durable_every", "10m required"),
    "max_failed_rounds": ("on_abort", "retry 3"),
    "orphan_s": ("autonomy_s", "1800"),
    "ports": ("bind", "0.0.0.0:29500-29510"),
    "ranks": ("layout", "ranks=4"),
    "reproducible": ("digest_every", "drift"),
    "retain_gradients": ("on_abort", "recompute"),
    "snapshot_max_age_s": ("snapshot_every", "10m"),
    "snapshot_share": ("snapshot_every", "2% 10m"),
    **dict.fromkeys(("tls_ca", "tls_cert", "tls_key"), ("tls", "FOLDER")),
}
# The ends of the variables that Kubernetes sets for a service, such as ``fabric-lighthouse``.
_SERVICE = "_SERVICE_HOST"
_OF_SERVICE = re.compile("_PORT|(_SERVICE_|_PORT_).*")


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
_NAME = (
    r"(?=.*[^.])[\w.-]{1,64}",
    'give a name of 1 to 64 letters, digits, ".", "_" or "-", not of dots alone',
)
# Setting -> the form of its text, and what to do about another one.
_FORMS = {
    "job": _NAME,
    "replica": _NAME,
    "rack": (f"({_NAME[0]})?", _NAME[1]),
    "digest_every": (
        r"\d{1,9}|drift",
        'give a number of steps, 0 for no digests, or "drift" where equal gradients give unequal states',
    ),
    "on_abort": (
        r"(retry|recompute)( 0*[1-9]\d{0,8})?",
        'give "retry" or "recompute", if wanted with the most failures in a row, such as "retry 3"',
    ),
}

# An address that belongs to no network: the way there is the default route.
_ELSEWHERE = "http://192.0.2.1"
# A URL with a user and a password.
_PASSWORD = re.compile(r"://[^/?#]*:[^/]*@")
_EVERY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(s|m|h)|0*([1-9]\d{0,8})", re.ASCII)
_SHARE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)%", re.ASCII)
_DURABLE = re.compile(r"(\S+)(?: keep 0*([1-9]\d{0,8}))?( required)?", re.ASCII)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST = 2000  # characters of a setting
_WORDS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("", "0", "false", "no", "off"), False
)


class Settings(Value):
    """The settings of one trainer; each field is an environment variable too, see ``settings``."""

    job: str = "job"  # name of the training run
    replica: str = ""  # name of this replica within the job
    replicas: str = "1"  # "3": start with 3, go on with 1 or more; "2:8": start with 8, need 2
    spare: bool = False  # hold the state, and contribute only while a member is missing
    layout: str = ""  # how this replica's model is spread over its ranks, such as "tp=2,layers=5+7"
    rack: str = ""  # rack of this host: readers of one shard lie in several, see ``loader(redundancy=)``
    lighthouse: tuple[str, ...] = ()  # base URLs of all lighthouses
    token_file: Path | None = None  # file with the job's token
    # Folder with this process's certificate, its key, and the authority that it believes.
    tls: Tls = Tls()
    bind: str = "127.0.0.1"  # address to listen on; also with ports, as in "0.0.0.0:29500-29510"
    advertise: str = ""  # host names or addresses that peers dial; empty: the address in ``bind``
    run_dir: Path | None = None  # folder of this replica's sockets, logs and lock on this host
    journal: Path | None = None  # file that gets one JSON line per event
    disable: bool = False  # plain training, without any service
    adapt: str = (
        "advise"  # about a slow replica: "off", "advise" (report what helps), "act" (lower its share)
    )
    on_nan: str = "propagate"  # average that is not finite: "propagate", "stop" the job, "skip" the update
    on_exception: str = "fail"  # the user's loop raises: "fail" the job, or "restart" this replica alone
    on_abort: str = "retry"  # a failed exchange; "recompute": without the gradient; "retry 3": at most 3
    exchange_s: float = 60.0  # time budget once all members are in a round; other deadlines derive from it
    user_code_s: float = 1800.0  # how long other members wait for a member in user code
    autonomy_s: float = 1800.0  # how long to step without any lighthouse
    data_plane: str = "auto"  # "auto" (members on one host share memory), "tcp" or "nccl"
    exchange: str = "float32"  # as what gradients of float32 travel over TCP: "bfloat16" or "int8" in blocks
    digest_every: str = "10"  # steps between digests of the state; "drift": states drift apart, no replay
    snapshot_every: str = "2% 10m"  # share of the step time, greatest age; or "100": exactly every 100 steps
    unequal: bool = False  # replicas may have different layouts of ranks
    log: str = "text"  # form of the logs here and in the checkpoint server: "text" or "json" lines
    durable: str = ""  # folder or fsspec URL of durable checkpoints; empty for none
    durable_every: str = "10m keep 3"  # interval, or "100" steps; how many stay; "required": see the page
    drill: str = ""  # "1": `fabric drill` may break this process; or a file with the key of its orders

    @property
    def home(self) -> Path:
        """The folder of this replica's sockets and logs; where none is set, one for this user alone."""
        if self.run_dir is not None:
            return self.run_dir
        folder = Path(tempfile.gettempdir()) / f"fabric-{os.getuid()}"
        own = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
        if own.is_absolute() and own.is_dir():
            there = own.lstat()
            if there.st_uid == os.geteuid() and not there.st_mode & 0o077:
                folder = own / "fabric"
        return folder / self.job / self.replica

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
    def host(self) -> str:
        """The address to listen on; empty for all."""
        return parse_bind(self.bind)[0]

    @property
    def ports(self) -> str:
        """A port, a range such as 29500-29510, or 0 for any."""
        return parse_bind(self.bind)[1]

    @property
    def contact_s(self) -> float:
        """How long a starting replica looks for a lighthouse, or for storage that it needs."""
        return min(60.0, self.autonomy_s)

    @property
    def orphan_s(self) -> float:
        """How long the checkpoint server lives without a trainer."""
        return max(600.0, self.autonomy_s / 3)

    @property
    def retain_gradients(self) -> bool:
        """Whether the local gradient is kept, so that an aborted round is retried with it."""
        return self.on_abort.startswith("retry")

    @property
    def max_failed_rounds(self) -> int:
        """How many failed exchanges in a row raise RoundsFailed; 0: any number is tried."""
        return int(self.on_abort.partition(" ")[2] or 0)

    @property
    def reproducible(self) -> bool:
        """Whether equal gradients give bitwise equal states; else there are no digests and no replay."""
        return self.digest_every != "drift"

    @property
    def digest_steps(self) -> int:
        """Steps from one digest of the state to the next; 0 for no digests."""
        return int(self.digest_every) if self.reproducible else 0

    @property
    def token(self) -> bytes:
        return b"" if self.token_file is None else read_token(self.token_file).encode()


class Interval(Value):
    """The time between two snapshots or checkpoints: ``steps``, or ``seconds`` where that is 0."""

    steps: int = 0
    seconds: float = 0.0


class DurableRule(Value):
    """When durable checkpoints are written, as ``durable_every`` says."""

    every: Interval
    keep: int  # how many complete ones are kept
    required: bool  # refuse to start or write where storage has no checkpoint of the job


def parse_every(name: str, given: object, text: str = "") -> Interval:
    """Return the interval of "100" (steps), "30s" or "1h". Raises ConfigError, which repeats ``text``."""
    form = _EVERY.fullmatch(str(given).strip())
    if form is None:
        raise ConfigError(
            f'{_variable(name)} is "{(text or str(given))[:80]}": give a number of steps such as 100, or a '
            "time such as 10m"
        )
    if form[3]:
        return Interval(steps=int(form[3]))
    return Interval(seconds=float(form[1]) * _SECONDS[form[2]])


def parse_snapshot_every(given: object) -> tuple[float, Interval]:
    """Return the share of the step time and the interval of "2% 10m", "2%", "10m" or "100".

    Raises ConfigError.
    """
    text = str(given)
    first, _, rest = text.strip().partition(" ")
    share = _SHARE.fullmatch(first)
    every = parse_every("snapshot_every", text if share is None else rest or "10m", text)
    if share is not None and every.steps:
        raise ConfigError(
            f'FABRIC_SNAPSHOT_EVERY is "{text[:80]}": give a time such as 10m after a share, or leave the '
            "share away"
        )
    return 0.02 if share is None else float(share[1]) / 100, every


def parse_durable_every(given: object) -> DurableRule:
    """Return the rule of "10m", "100 keep 5" or "10m, keep 3, required". Raises ConfigError."""
    text = " ".join(str(given).replace(",", " ").split())
    form = _DURABLE.fullmatch(text)
    if form is None:
        raise ConfigError(
            f'FABRIC_DURABLE_EVERY is "{text[:80]}": give a number of steps such as 100, or a time such as '
            '10m, and behind it, if wanted, "keep 3" and "required"'
        )
    return DurableRule(parse_every("durable_every", form[1], text), int(form[2] or 3), form[3] is not None)


def parse_bind(text: str, name: str = "FABRIC_BIND") -> tuple[str, str]:
    """Return the address and the ports of "10.0.0.5", "0.0.0.0:29500-29510", "::" or "[::]:8600".

    Without ports these are "0", for any. An error calls the value ``name``. Raises ConfigError.
    """
    host, colon, ports = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not text.startswith("[")):
        host, ports = text, "0"
    try:
        parse_ports(ports)
    except ConfigError:
        raise ConfigError(
            f'{name} is "{text[:80]}": give an address, and if wanted ":" and a port, a range such as '
            "29500-29510, or 0 for any"
        ) from None
    return host.strip("[]"), ports


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
    names = Settings.__struct_fields__
    unknown = set(arguments).difference(names)
    if unknown:
        wrong = sorted(unknown)[0]
        if wrong in _REPLACED:
            new, value = _REPLACED[wrong]
            raise ConfigError(f"the setting {wrong} is gone: give {new}='{value}' in its place")
        raise ConfigError(f"unknown setting {wrong}: known are {', '.join(sorted(names))}")
    values = {k: _parse(k, str(v)) if k == "tls" else v for k, v in arguments.items() if v is not None}
    for name in names:
        text = environment.get(_variable(name), "")
        if len(text) > _LONGEST:  # a sentence about it repeats it
            raise ConfigError(f"{_variable(name)} has {len(text)} characters: give at most {_LONGEST}")
        if name not in values and text:
            values[name] = _parse(name, text)
    chosen = Settings(**values)
    check_no_password("FABRIC_DURABLE", chosen.durable)
    if chosen.durable and "://" not in chosen.durable and not chosen.durable.startswith("~"):
        # The writer of durable checkpoints has another working folder than the trainer.
        chosen = replace(chosen, durable=str(Path(chosen.durable).absolute()))
    return _checked(chosen)


def refuse_unknown_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError for the first ``FABRIC_`` variable that is neither a setting nor fabric's own.

    It names the nearest one. An empty variable counts as not set.
    """
    variables = set(map(_variable, Settings.__struct_fields__))
    services = tuple(name.removesuffix(_SERVICE) for name in environment if name.endswith(_SERVICE))
    for name in sorted(name for name, text in environment.items() if text and name.startswith(PREFIX)):
        is_of_service = any(
            name.startswith(service) and _OF_SERVICE.fullmatch(name.removeprefix(service))
            for service in services
        )
        if name in variables or name in _OWN or is_of_service:
            continue
        if replaced := _REPLACED.get(name.removeprefix(PREFIX).lower()):
            new, value = replaced
            value = f'"{value}"' if " " in value else value
            raise ConfigError(f"the setting {name} is gone: set {_variable(new)}={value} in its place")
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
    folder = environment.get(_variable("tls"), "")
    tls = Tls(Path(folder) if folder else None)
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
    if name in ("token_file", "run_dir", "journal"):
        return Path(text)
    if name == "tls":
        return Tls(Path(text))
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


def _checked(chosen: Settings) -> Settings:
    parse_replicas(chosen.replicas)
    for name, words in _CHOICES.items():
        if (word := getattr(chosen, name)) not in words:
            *first, last = (f'"{x}"' for x in words)
            raise ConfigError(f'{_variable(name)} is "{word}": it must be {", ".join(first)} or {last}')
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
    parse_bind(chosen.bind)
    for name, (form, remedy) in _FORMS.items():
        text = str(getattr(chosen, name))
        if not re.fullmatch(form, text, re.ASCII):
            raise ConfigError(f'{_variable(name)} is "{text[:80]}": {remedy}')
    for name in ("exchange_s", "user_code_s", "autonomy_s"):
        if not (math.isfinite(time_s := getattr(chosen, name)) and time_s >= 0):
            raise ConfigError(f"{_variable(name)} is {time_s:g}: give a finite number from 0")
    parse_snapshot_every(chosen.snapshot_every)
    parse_durable_every(chosen.durable_every)
    wrong = problem(chosen.exchange_s, chosen.user_code_s, chosen.autonomy_s)
    if wrong:
        raise ConfigError(wrong)
    return chosen


def advertised_host(chosen: Settings, *, by_name: bool = False) -> str:
    """Return the host name or address that peers dial: the setting, else the bound address.

    A host that binds all its addresses gives the one from which it reaches a lighthouse or other networks.
    Its name is the last choice, because hosts have names that are cloned, unknown, or mean the host itself.
    With ``by_name`` the name is the first choice, as in a URL under TLS: certificates have names. Of several
    addresses in the setting it is the first.
    """
    if chosen.advertise:
        return chosen.advertise.partition(",")[0].strip()
    if chosen.host in ("0.0.0.0", "::", ""):
        return ("" if by_name else _outward_address(chosen)) or socket.gethostname()
    return chosen.host


def advertised_hosts(chosen: Settings) -> list[str]:
    """Return the addresses that links are spread over: those of the setting, or ``advertised_host``."""
    return [x.strip() for x in chosen.advertise.split(",") if x.strip()] or [advertised_host(chosen)]


def _outward_address(chosen: Settings) -> str:
    """Return this host's address towards a lighthouse, else towards other networks; empty if it has none."""
    family = socket.AF_UNSPEC if chosen.host == "::" else socket.AF_INET
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
