"""The addresses that the lighthouse may call: those from which a job's processes have connected, and networks
that the operator allowed."""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from fabric.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class HostNotAllowed(OSError):
    """A name resolves to no address that the lighthouse may call."""


@dataclass(frozen=True, slots=True)
class AllowedHosts:
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
        asked = _address(address)
        if asked is None:
            return False
        if any(asked in network for network in self.networks):
            return True
        came = [_address(source) for source in sources]
        # A process that connects over loopback runs on this host; it may listen on each of the host's
        # addresses.
        return asked in came or (any(x is not None and x.is_loopback for x in came) and _is_this_host(asked))


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


def is_address(text: str) -> bool:
    """Whether ``text`` is an IP address and not a name."""
    return _address(text) is not None


def _address(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped if mapped is not None else address


def _is_this_host(address: Address) -> bool:
    if address.is_loopback:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))  # a socket binds only to addresses of its own host
        except OSError:
            return False
    return not address.is_unspecified
