"""HTTP as every service of fabric does it. This file says what the text of an address or a port means."""

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
