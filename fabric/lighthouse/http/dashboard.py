"""The page at ``/``: four files without data, a login that trades the token for a credential, a live stream.

The page must not keep the token. So it sends the token once, and gets a credential that it keeps in its tab
and sends as ``Authorization: Page``. A cookie would go to every port of the host. The credential is a time of
expiry and an HMAC of it, with the token as key. So the lighthouse stores no logins, and a credential is void
when its token is replaced.
"""

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from functools import partial
from importlib.resources import files

from aiohttp import web
from msgspec import to_builtins

from fabric.errors import ProtocolError
from fabric.lighthouse.http.job_status import StatusCache
from fabric.lighthouse.http.tokens import Scope, Tokens, TokenTries, scope_of
from fabric.lighthouse.jobs.job import Job
from fabric.runtime.http.http_service import read_body
from fabric.runtime.http.token_file import is_same

LOGIN = "/login"
LOGIN_S = 12 * 3600
# The clocks of lighthouses that succeed each other may differ by this many seconds.
_CLOCK_S = 300
# Paths of WebSockets for trainers and checkpoint servers, which no login opens.
_FOR_PROCESSES = ("/session", "/trainer-status")
_KINDS = {
    "index.html": "text/html",
    "dashboard.js": "text/javascript",
    "speeds.js": "text/javascript",
    "dashboard.css": "text/css",
}
OPEN_PATHS = frozenset({"/", LOGIN, "/dashboard.js", "/speeds.js", "/dashboard.css"})
# The browser may load only the page's own script and style.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
# The longest silence of the stream of events, in seconds.
_SILENCE_S = 5.0
_MAX_LOGIN_BYTES = 8192


def add_routes(app: web.Application, tokens: Tokens, tries: TokenTries) -> None:
    """Add ``/``, its script and style, and ``/login``."""
    for name, kind in _KINDS.items():
        body = (files("fabric.lighthouse.http") / "page" / name).read_bytes()
        app.router.add_get("/" if name == "index.html" else f"/{name}", partial(_file, body, kind))
    app.router.add_post(LOGIN, partial(_login, tokens, tries))


def scope_of_login(request: web.Request, tokens: Tokens) -> Scope | bool:
    """Return the scope that the request's login opens; False without a valid one."""
    scheme, _, login = request.headers.get("Authorization", "").partition(" ")
    expires, _, rest = login.partition(".")
    proof, _, job = rest.partition(".")
    if scheme.lower() != "page" or request.path.endswith(_FOR_PROCESSES):
        return False
    # A login that expires later than a new one would expire was made while a clock was wrong.
    now = time.time()
    if not expires.isdecimal() or len(expires) > 12 or not now <= int(expires) <= now + LOGIN_S + _CLOCK_S:
        return False
    if not any([is_same(proof, _proof(expires, job, token)) for token in tokens.keys(job)]):  # noqa: C419
        return False
    return frozenset((job,)) if job else None


def _proof(expires: str, job: str, token: str) -> str:
    """Return the login's HMAC, which no longer fits when the token is replaced."""
    return hmac.new(token.encode(), f"page {expires} {job}".encode(), hashlib.sha256).hexdigest()


async def _file(body: bytes, kind: str, request: web.Request) -> web.Response:
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)


async def _login(tokens: Tokens, tries: TokenTries, request: web.Request) -> web.Response:
    """Exchange ``{"token": ...}`` for a login of the page."""
    if tokens.is_open:
        return web.json_response({"ok": True})
    # No page of another site can send a body of this type.
    if request.content_type != "application/json" or (request.content_length or 0) > _MAX_LOGIN_BYTES:
        raise ProtocolError("a login is a small JSON object: send Content-Type: application/json")
    try:
        given = json.loads(await read_body(request))["token"]
    except (ValueError, KeyError, TypeError, RecursionError):
        given = None
    if not isinstance(given, str):
        raise ProtocolError('send a JSON object such as {"token": "..."}')
    await tries.pause(request.remote or "")
    await tokens.refresh()
    scope = scope_of(tokens, tries, request, given := given.strip())
    job = min(scope) if scope is not None else ""
    expires = str(int(time.time()) + LOGIN_S)
    page = f"{expires}.{_proof(expires, job, given)}.{job}"
    return web.json_response({"ok": True, "page": page}, headers={"Cache-Control": "no-store"})


async def stream(
    request: web.Request, job: Job, looks: StatusCache, leads: Callable[[], bool]
) -> web.StreamResponse:
    """Send server-sent events about one job: ``job`` (its view), ``events`` and ``recoveries``.

    The stream ends when ``leads`` says that this lighthouse no longer leads."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    last_event, sent, sent_at = 0, {"job": "", "recoveries": ""}, time.monotonic()
    while leads() and job.is_running:
        events, news = job.events.after(last_event), list[tuple[str, str]]()
        if events:
            last_event = events[-1].id
            news.append(("events", json.dumps(to_builtins(events[-200:]))))
        look = await looks.look(job)
        for kind, body in (("recoveries", look.recoveries), ("job", look.view)):
            if body != sent[kind]:
                sent[kind] = body
                news.append((kind, body))
        if not news and time.monotonic() - sent_at > _SILENCE_S:
            news.append(("still", "{}"))
        for kind, body in news:
            sent_at = time.monotonic()
            await response.write(f"event: {kind}\ndata: {body}\n\n".encode())
        await asyncio.sleep(looks.period_s(job))
    return response
