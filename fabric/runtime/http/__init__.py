"""HTTP as every service of fabric does it. This file binds to an address and a port, which are texts."""

import errno
import ipaddress
import socket

from fabric.errors import ConfigError


def parse_ports(text: str) -> range:
    """Return the ports that "8000", "8000-8010" or "0" (any free one) name. Raises ConfigError."""
    first, dash, last = text.strip().partition("-")
    bounds = (first, last if dash else first)
    if all(b.isascii() and b.isdecimal() and len(b) <= 5 for b in bounds):
        low, high = int(bounds[0]), int(bounds[1])
        if 0 <= low <= high <= 65535 and (low > 0 or high == 0):
            return range(low, high + 1)
    raise ConfigError(f'the port "{text[:40]}" cannot be used: give a port, a range such as 8000-8010, or 0')


def url_host(bind: str) -> str:
    """Return the host of a URL for an address to listen on; the name of this host for all addresses."""
    host = socket.gethostname() if bind in ("", "0.0.0.0", "::") else bind
    return f"[{host}]" if ":" in host else host


def parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address in ``text``, without its zone; None for a name. An IPv4 address that an IPv6
    address contains counts as the former."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Whether this name or address leads to this host itself, wherever it is resolved."""
    address = parse_address(host)
    return address.is_loopback if address is not None else host == "localhost" or host.endswith(".localhost")


def bind_first_free(host: str, ports: range) -> socket.socket:
    """Bind a TCP socket to ``host`` and the first free port of ``ports``. Raises ConfigError."""
    family, address = resolved(host)
    for port in ports:
        candidate = socket.socket(family, socket.SOCK_STREAM)
        candidate.setblocking(False)
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((address, port))
            # With SO_REUSEADDR two sockets may be bound to one port until one of them listens.
            candidate.listen(128)
        except OSError as error:
            candidate.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise ConfigError(
                f"{host}:{port} cannot be bound ({error.strerror}): bind to an address of this machine"
                " and a port that this user may use"
            ) from error
        return candidate
    named = (
        f"port {ports[0]} on {host} is"
        if len(ports) == 1
        else f"ports {ports[0]}-{ports[-1]} on {host} are all"
    )
    raise ConfigError(f"{named} taken by another process: choose another port or range, or 0 for any")


def resolved(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the address to bind to for a host, if possible of IPv4. Raises ConfigError."""
    try:
        addresses = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f'the address "{host[:200]}" to bind to is unknown: give an address of this machine'
        ) from error
    family, _, _, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(address[0])
