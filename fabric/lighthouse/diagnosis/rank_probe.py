"""Probes ranks: asks their checkpoint servers what the trainers are doing.

An answer is untrusted: its size is bounded, and every field is checked. A probe says when a rank does not
answer in time. A server is called only at an address from which it has connected (``peer_addresses``), or in
a network that the lighthouse was given (``ProbeAccess.hosts``).
"""

import asyncio
import ipaddress
import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from msgspec import Struct, field
from yarl import URL

from fabric.collectives.plain_pickle import BadRecording
from fabric.collectives.recording import Process, Recording, parse_recording
from fabric.errors import ConfigError
from fabric.lighthouse.diagnosis.verdict import RankProbe
from fabric.model import Value
from fabric.protocol.messages.network import OpenSession
from fabric.runtime.http import parse_address
from fabric.runtime.http.lighthouse_client import read_bounded
from fabric.runtime.http.tls import Tls
from fabric.runtime.http.token_file import is_same

# The addresses from which a job's sessions and trainer statuses come, as the kernel reports them.
#
# A member names the address of its checkpoint server. After a failure the lighthouse calls that address
# and shows the job's token. It does so only if that member or its checkpoint server has connected from
# there. Otherwise a member could make the lighthouse call any host in its network.
#
# Each process also sends a secret, so that another process with the job's token cannot take over its
# session.


class _Source(Struct):
    session: str = ""
    status: str = ""
    is_trusted: bool = False
    opened: float = 0.0  # Unix seconds of the newest session
    incarnation: int = -1
    secret: str = ""


class PeerAddresses(Struct):
    """Addresses by replica and rank. A session speaks for every rank of its replica, a status for one."""

    _sources: dict[tuple[str, int], _Source] = field(default_factory=dict)
    wrong_tokens: dict[str, float] = field(default_factory=dict)  # address -> Unix seconds of its newest one

    def token_refused(self, address: str) -> None:
        """Note that a process at this address has shown a wrong token for the job."""
        if len(self.wrong_tokens) < 1000 or address in self.wrong_tokens:
            self.wrong_tokens[address] = time.time()

    def refused_at(self, replica: str) -> float:
        """Return when a wrong token last came from the replica's address; 0 where a session has followed."""
        newest = max((self.wrong_tokens.get(address, 0.0) for address in self.of(replica, 0)), default=0.0)
        source = self._sources.get((replica, 0))
        return newest if source is None or newest > source.opened else 0.0

    def stranger(self, session: OpenSession) -> str:
        """Return why the session is not from the process that it claims, or an empty string.

        The incarnation alone proves nothing, because the job's status shows it.
        """
        source = self._sources.get((session.replica, 0))
        if source is None or not source.secret or source.incarnation != session.incarnation:
            return ""
        if is_same(session.secret, source.secret):
            return ""
        return (
            f"another process speaks for {session.replica} as incarnation {session.incarnation}: start with a"
            " replica name of your own"
        )

    def session(self, session: OpenSession, address: str, *, is_trusted: bool) -> None:
        """Note that a session was opened; ``is_trusted``: it showed the lighthouse's own token."""
        source = self._sources.setdefault((session.replica, 0), _Source())
        source.session, source.is_trusted, source.opened = address, is_trusted, time.time()
        source.incarnation, source.secret = session.incarnation, session.secret

    def status(self, replica: str, rank: int, address: str) -> None:
        """Note the address of a rank's checkpoint server."""
        self._sources.setdefault((replica, rank), _Source()).status = address

    def of(self, replica: str, rank: int) -> frozenset[str]:
        """Return the addresses from which the rank's processes have connected."""
        first, own = self._sources.get((replica, 0)), self._sources.get((replica, rank))
        return frozenset(filter(None, (first.session if first else "", own.status if own else "")))

    def is_trusted(self, replica: str) -> bool:
        """Whether the replica's newest session showed the lighthouse's own token."""
        source = self._sources.get((replica, 0))
        return source is not None and source.is_trusted


# The addresses that the lighthouse may call: those from which a job's processes have connected, and
# networks that the operator allowed.


class HostNotAllowed(OSError):
    """A name resolves to no address that the lighthouse may call."""


class AllowedHosts(Value):
    """The lighthouse may always call addresses in ``networks``."""

    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "AllowedHosts":
        """Parse networks and addresses, separated by commas. Raises ConfigError."""
        try:
            return cls(tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip()))
        except ValueError as error:
            raise ConfigError(
                f"ckpt-networks is {text[:200]!r} ({error}): give networks such as 10.1.0.0/16,fd00::/8"
            ) from error

    def allow(self, address: str, sources: Iterable[str]) -> bool:
        """Whether the lighthouse may call ``address`` for processes that have connected from ``sources``."""
        asked = parse_address(address)
        if asked is None:
            return False
        if any(asked in network for network in self.networks):
            return True
        came = [parse_address(source) for source in sources]
        # A process that connects over loopback runs on this host; it may listen on each of the host's
        # addresses.
        is_from_here = any(x is not None and x.is_loopback for x in came)
        if asked in came or (is_from_here and asked.is_loopback):
            return True
        if asked.is_unspecified or not is_from_here:
            return False
        family = socket.AF_INET if asked.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.bind((str(asked), 0))  # a socket binds only to addresses of its own host
            return True
        return False


class ConfinedResolver(AbstractResolver):
    """Resolves names to allowed addresses only, so that the client dials the address that was checked."""

    def __init__(self, hosts: AllowedHosts, sources: Iterable[str]) -> None:
        self._hosts = hosts
        self._sources = tuple(sources)
        self._names = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Resolve ``host``. Raises HostNotAllowed where no allowed address is found."""
        addresses = await self._names.resolve(host, port, family)
        may = [x for x in addresses if await asyncio.to_thread(self._hosts.allow, x["host"], self._sources)]
        if not may:
            raise HostNotAllowed(host)
        return may

    async def close(self) -> None:
        """Do nothing: the resolver holds no resources."""
        await self._names.close()


# If a trainer holds the interpreter's lock and does not answer within a second, a signal writes its stacks.
ASK_S = 3.0
MAX_RANKS = 16
MAX_ANSWER_BYTES = 256 * 1024
_LAST_COLLECTIVES = 100
_MAX_FRAMES = 50
# A parsed answer may take many times its size in memory. So one thread parses all answers in turn, and keeps
# a bounded number of values of each.
_parser = ThreadPoolExecutor(1, "fabric-inquiry")
_MAX_VALUES = 20_000
_MAX_DEPTH = 12


NOT_WHERE_IT_CAME_FROM = (
    "its checkpoint server at {host} is not where it has connected from: give the lighthouse that network in"
    " --ckpt-networks"
)


class ProbeTarget(Value):
    """One rank to probe."""

    replica: str
    rank: int
    url: str  # the base URL of its checkpoint server, as the member names it
    hosts: frozenset[str] = frozenset()  # the addresses from which its processes have connected
    is_trusted: bool = False  # whether the member showed the lighthouse's own token when it connected


class ProbeAccess(Value):
    """The credentials for checkpoint servers: the job's token, and certificates where TLS is configured.
    ``hosts``: the networks where they may be, besides the addresses from which they have connected."""

    token: str | None = None
    tls: Tls = field(default_factory=Tls)
    hosts: AllowedHosts = field(default_factory=AllowedHosts)


async def ask(
    places: Sequence[ProbeTarget], access_to: Callable[[bool], ProbeAccess], ask_s: float = ASK_S
) -> list[RankProbe]:
    """Probe up to MAX_RANKS ranks within ``ask_s`` seconds.

    ``access_to`` is called with whether a member showed the lighthouse's own token. It is called for each
    probe, because tokens change.
    """
    return list(
        await asyncio.gather(
            *(_rank(place, access_to(place.is_trusted), ask_s) for place in places[:MAX_RANKS])
        )
    )


async def _rank(where: ProbeTarget, access: ProbeAccess, ask_s: float) -> RankProbe:
    base = where.url.partition("#")[0].rstrip("/")
    headers = {} if access.token is None else {"Authorization": f"Bearer {access.token}"}
    connector = aiohttp.TCPConnector(
        ssl=access.tls.client_context() or True, resolver=ConfinedResolver(access.hosts, where.hosts)
    )
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(headers=headers, cookie_jar=jar, connector=connector) as client:
        state, stacks, flight = await asyncio.gather(
            _get(client, f"{base}/debug/state", where, access.hosts, ask_s),
            _get(client, f"{base}/debug/stacks", where, access.hosts, ask_s),
            _get(client, f"{base}/debug/flight?last={_LAST_COLLECTIVES}", where, access.hosts, ask_s),
        )
    return of_answers(where, state, stacks, flight)


def of_answers(
    where: ProbeTarget, state: Mapping[str, Any], stacks: Mapping[str, Any], flight: Mapping[str, Any]
) -> RankProbe:
    """Return what the three answers of a rank's checkpoint server say, whatever they hold."""
    trainer = _mapping(state.get("trainer"))
    how, main, kernel = main_thread(stacks)
    pid = trainer.get("pid")
    problems = [str(x["error"]) for x in (state, stacks) if "error" in x]
    silent = trainer.get("silent")
    if not problems and isinstance(silent, str) and silent:
        problems = [silent]
    return RankProbe(
        replica=where.replica,
        rank=where.rank,
        process=str(trainer.get("state", "unknown"))[:20],
        pid=pid if isinstance(pid, int) else 0,
        says=_mapping(trainer.get("says")) or None,
        how=how,
        main=main,
        kernel=kernel,
        recording=_recording(flight, where),
        problem="; ".join(dict.fromkeys(problems)),
    )


async def _get(
    client: aiohttp.ClientSession, url: str, where: ProbeTarget, hosts: AllowedHosts, ask_s: float
) -> Mapping[str, Any]:
    """Return the JSON object at ``url``, or ``{"error": why}``."""
    try:
        host = URL(url).host or ""
        # The library does not pass an IP address to the resolver, so an IP address is checked here.
        if parse_address(host) is not None and not hosts.allow(host, where.hosts):
            raise HostNotAllowed(host)
        async with asyncio.timeout(ask_s), client.get(url, allow_redirects=False) as answer:
            data = await read_bounded(answer, MAX_ANSWER_BYTES + 1)
        if len(data) > MAX_ANSWER_BYTES:
            return {"error": f"it answered with more than {MAX_ANSWER_BYTES} bytes"}
        body = await asyncio.get_running_loop().run_in_executor(_parser, _parse, data)
    except TimeoutError:
        return {"error": f"its checkpoint server did not answer within {ask_s:g} s"}
    except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
        if isinstance(error, HostNotAllowed) or isinstance(getattr(error, "os_error", None), HostNotAllowed):
            return {"error": NOT_WHERE_IT_CAME_FROM.format(host=URL(url).host)}
        return {"error": f"its checkpoint server gave no answer ({type(error).__name__})"}
    return (
        body if isinstance(body, dict) else {"error": "its checkpoint server did not answer with an object"}
    )


def _parse(data: bytes) -> Any:
    """Parse an answer; the numbers of its values and levels are bounded."""
    return _kept(json.loads(data), [_MAX_VALUES], _MAX_DEPTH)


def _kept(value: Any, left: list[int], depth: int) -> Any:
    left[0] -= 1
    if not depth or left[0] < 0:
        return None
    if isinstance(value, dict):
        return {k: _kept(v, left, depth - 1) for k, v in value.items() if left[0] > 0}
    if isinstance(value, list):
        return [_kept(v, left, depth - 1) for v in value if left[0] > 0]
    return value


def main_thread(stacks: Mapping[str, Any]) -> tuple[str, tuple[str, ...], str]:
    """Return how the stacks were read, the main thread's stack, and the kernel function it sleeps in."""
    threads, kernel = stacks.get("threads"), stacks.get("kernel")
    first = _mapping(kernel[0]) if isinstance(kernel, list) and kernel else {}
    sleeps = " ".join(str(first.get(name, "")) for name in ("state", "wchan") if first.get(name))
    how = str(stacks.get("how", ""))[:20]
    main_frames: tuple[str, ...] = ()
    for thread in threads if isinstance(threads, list) else ():
        frames = _mapping(thread).get("stack")
        if isinstance(frames, list):
            # The interpreter lists the main thread first; a dump by signal lists it last.
            if how == "interpreter" and main_frames:
                break
            main_frames = tuple(str(frame) for frame in frames[:_MAX_FRAMES])
    return how, main_frames, sleeps


def _recording(flight: Mapping[str, Any], where: ProbeTarget) -> Recording | None:
    """Read torch's recording, but not its list of groups, which could name millions of members."""
    entries = flight.get("entries")
    if isinstance(entries, list) and entries:
        with suppress(BadRecording):
            last, process = entries[-_LAST_COLLECTIVES:], Process(where.replica, where.rank)
            return parse_recording({"entries": last}, process, where.url)
    return None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
