"""Keeps web pages out of services without a token.

Without a token a service listens on loopback alone. But any web page can make a browser on that host send
requests there, by a form, by a script, or by a host name that resolves to 127.0.0.1. Such a request has a
foreign ``Origin``, a foreign ``Host``, or a body of a type that a form can send.
"""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from fabric.errors import ProtocolError
from fabric.runtime.http.http_service import Handler

_READS = frozenset({"GET", "HEAD", "OPTIONS"})


def host_of(url: str) -> str:
    """Return the host in a URL, or in a host with or without a port; empty where it cannot be read."""
    try:
        return (urlsplit(url if "://" in url else f"//{url}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_own_page(request: web.Request) -> bool:
    """Whether the request comes from this service's own page, or from no page."""
    origin = request.headers.get("Origin")
    if origin is None:
        return True
    scheme, _, host = origin.partition("://")
    # Where a proxy speaks TLS for a service, the page's scheme is https and the request's is http.
    return host == request.host and (scheme == "https" or not request.secure)


def pages_kept_out(names: Iterable[str] = ()) -> Middleware:
    """Return a middleware for a service without a token; ``names`` are its host names besides loopback."""
    own = frozenset(name.lower() for name in map(host_of, names) if name)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = host_of(request.host)
        if not _is_loopback(host) and host not in own:
            raise web.HTTPForbidden(
                text="without a token this service answers to loopback addresses alone, not to"
                f" {host[:200]!r}: ask at 127.0.0.1, or start it with a token file"
            )
        if not is_own_page(request):
            raise web.HTTPForbidden(
                text="a page of another site may not ask here: use the service's own page, or a token file"
            )
        # A missing path or method gets an error of its own, with the allowed methods.
        has_body = request.match_info.http_exception is None and request.method not in _READS
        if has_body and request.content_type != "application/json":
            raise ProtocolError(
                "without a token a body must say that it is JSON: send the header"
                " Content-Type: application/json"
            )
        return await handler(request)

    return check


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
