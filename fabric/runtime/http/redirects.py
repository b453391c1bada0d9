"""The redirects that a client follows: only those to another lighthouse of the same job.

A client shows the job's token to the target of a redirect. So a lighthouse, or a process that answers in its
place, must not choose that target freely. Every rule starts from the addresses in the client's settings.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

import aiohttp
from yarl import URL


class RedirectRefused(aiohttp.ClientError):
    """A redirect that this client does not follow, with the reason."""


class Redirected(aiohttp.ClientError):
    """A redirect to another lighthouse, ``target``."""

    def __init__(self, target: URL) -> None:
        super().__init__(f"it redirects to {target.origin()}")
        self.target = target


def trace_of(urls: Sequence[str]) -> aiohttp.TraceConfig:
    """Return a trace for a ClientSession: each redirect raises Redirected, or what ``check`` raises."""

    async def look(_: object, __: object, params: aiohttp.TraceRequestRedirectParams) -> None:
        params.response.close()
        raise Redirected(await check(params.response.url, params.response.headers.get("Location", ""), urls))

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(look)
    return trace


async def check(asked: URL, location: str, urls: Sequence[str]) -> URL:
    """Return the target of a redirect from ``asked`` to ``location``.

    Raises RedirectRefused unless a client with ``urls`` may go there.
    """
    try:
        target = asked.join(URL(location))
    except ValueError as error:
        raise RedirectRefused("it redirects to a text that is not an address") from error
    short = f"{target.scheme}://{target.host}"[:200]
    if target.scheme not in ("http", "https") or not target.host:
        raise RedirectRefused("it redirects to a URL that is not an address of a lighthouse")
    if asked.scheme == "https" and target.scheme == "http":
        raise RedirectRefused(f"it redirects from TLS to {short}: give --advertise an https:// address there")
    hosts = [host for host in (URL(url).host for url in urls) if host]
    if not any(_belongs(target.host, host) for host in hosts) and not await _is_at(target.host, hosts):
        raise RedirectRefused(
            f"it redirects to {short}, a host that is none of those given: if a lighthouse runs there,"
            " name it in FABRIC_LIGHTHOUSE"
        )
    return target


def _belongs(host: str, given: str) -> bool:
    """Whether ``host`` is ``given``, a name below it, or a name in the same domain.

    A domain of one label, such as ``com``, does not count.
    """
    host, given = host.lower().rstrip("."), given.lower().rstrip(".")
    if host == given or (_is_loopback(host) and _is_loopback(given)):
        return True
    if _is_address(host) or _is_address(given):
        return False
    domain = given.partition(".")[2]
    return host.endswith(f".{given}") or ("." in domain and host.endswith(f".{domain}"))


async def _is_at(host: str, given: Sequence[str]) -> bool:
    """Whether all addresses of ``host`` are addresses of the ``given`` names."""
    wanted = await _addresses(host)
    if not wanted:
        return False
    known_addresses = await asyncio.gather(*map(_addresses, given))
    return wanted <= set().union(*known_addresses)


async def _addresses(host: str) -> set[str]:
    if _is_address(host):
        return {host}
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {str(entry[4][0]) for entry in entries}


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
