"""Access to jobs: the lighthouse's own token opens all jobs, a job's token opens that job.

A job's token lies in a file with the job's name, in one folder. Requests reread the folder, at most once a
second. So the operator adds or removes a job's token without a restart. Files with other names are ignored,
so a mounted Kubernetes secret works as it is.

While a folder or file cannot be read (no free descriptors, hanging storage) the tokens read before stay
valid. An unknown token is then answered with 503 instead of 401. A thread reads the folder, so that hanging
storage does not stop the event loop."""

import asyncio
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from fabric.errors import ConfigError, ProtocolError, StoreUnavailable, Unauthorized
from fabric.lighthouse.connections.validation import check_name
from fabric.model import Value
from fabric.runtime.drill_orders import SIGNED, order_key, request_proof
from fabric.runtime.http.http_service import Handler, bearer_of, read_body
from fabric.runtime.http.token_file import LOOK_S, TokenFile, is_same, read_tokens

# Slows down an address that has shown many wrong tokens, so that nobody can guess a short token.
#
# The address may still show a right token, because trainers and operators share addresses with others.
# Its tokens are checked after a pause, and only a few of them wait at a time.


MOST_FAILURES = 20
WITHIN_S = 60.0
PAUSE_S = 1.0
# The most tokens of one address that wait for their check.
MOST_WAITING = 16
# The most addresses kept; the limit first forgets the address that failed longest ago.
_MOST_ADDRESSES = 4096


class TokenTries:
    """Wrong tokens by address: await ``pause`` before a check, and call ``failed`` after a wrong token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, pause_s: float = PAUSE_S) -> None:
        self._clock = clock
        self._pause_s = pause_s
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()
        self._waiting: Counter[str] = Counter()

    async def pause(self, address: str) -> None:
        """Wait where many wrong tokens came from the address. Answers 429 where many wait."""
        failures = self._failures.get(address)
        if failures is None or len(failures) < MOST_FAILURES or failures[0] + WITHIN_S <= self._clock():
            return
        if self._waiting[address] >= MOST_WAITING:
            why = f"{MOST_FAILURES} wrong tokens came from {address} in {WITHIN_S:g} s: try again in a moment"
            raise web.HTTPTooManyRequests(text=why, headers={"Retry-After": "1"})
        self._waiting[address] += 1
        try:
            await asyncio.sleep(self._pause_s)
        finally:
            self._waiting[address] -= 1
            if not self._waiting[address]:
                del self._waiting[address]

    def failed(self, address: str) -> None:
        """Count a wrong token from ``address``. The log has a line for every MOST_FAILURES of them."""
        failures = self._failures.setdefault(address, deque(maxlen=MOST_FAILURES))
        now = self._clock()
        if not failures or failures[-1] + WITHIN_S <= now:
            log.warning("a wrong token came from %s", address)
        elif len(failures) == MOST_FAILURES - 1:
            log.warning("%d wrong tokens came from %s: its tokens wait from now on", MOST_FAILURES, address)
        failures.append(now)
        self._failures.move_to_end(address)
        if len(self._failures) > _MOST_ADDRESSES:
            self._failures.popitem(last=False)


log = logging.getLogger(__name__)

# The longest time that requests wait for the folder; then they use the tokens read before.
HANG_S = 1.0
Scope = frozenset[str] | None
# A signed request of a drill counts for so long before and after its time.
SIGNED_S = 300.0
NO_RIGHT = "this token has no right to drill: use the token of the lighthouse's --drill-token-file"
DRILL_PATH = "/v1/jobs/{job}/drill"
_READ_BY_DRILLS = frozenset(
    {"/v1/jobs", "/v1/jobs/{job}", DRILL_PATH}
    | {f"/v1/jobs/{{job}}/{name}" for name in ("events", "recoveries", "slowdowns", "hosts")}
)


class _TokenEntry(Value):
    stamp: tuple[int, int, int]
    tokens: tuple[str, ...]  # the file's tokens; empty where the file cannot be used


class _FolderScan(Value):
    """The result of one reading of the folder."""

    entries: dict[str, _TokenEntry]
    blind: str = ""  # the file or folder that could not be read


class Tokens:
    """``own`` opens every job, and each file in ``folder`` opens one job. Without both, every job is open."""

    def __init__(
        self, own: TokenFile | str | None, folder: Path | None = None, drill: TokenFile | str | None = None
    ) -> None:
        """``drill``: the token of operators who may drill every job; it opens nothing else but reading."""
        self._own = TokenFile.of(own)
        self._drill = TokenFile.of(drill)
        self._signed: dict[str, float] = {}  # the proofs of requests, with the times at which they came
        self._folder = folder
        self._look = _FolderScan({}, "has not been read yet") if folder is not None else _FolderScan({})
        self._looked = float("-inf")
        self._looking: asyncio.Future[_FolderScan] | None = None

    @property
    def is_open(self) -> bool:
        """Whether requests need no token."""
        return self._own.is_open and self._folder is None

    def may_reach_servers(self, scope: Scope) -> bool:
        """Whether a person may send a token of this scope to checkpoint servers: the token opens only their
        job, or no job has a token of its own."""
        return scope is not None or self._folder is None

    def scope(self, given: str) -> Scope:
        """Return the scope of this token. Raises Unauthorized for an unknown token, and StoreUnavailable
        where the tokens cannot be read now."""
        if self._own.accepts(given):
            return None
        entries = self._look.entries
        jobs = frozenset(name for name, x in entries.items() if any([is_same(given, t) for t in x.tokens]))  # noqa: C419
        if jobs:
            return jobs
        if self._look.blind:
            raise StoreUnavailable(
                f"the folder of job tokens {self._look.blind}, so this token cannot be checked: try again"
            )
        raise Unauthorized("the token does not match this job's: use the token file that the job was given")

    async def may_drill(self, request: web.Request) -> bool:
        """Whether the request shows the token for drills, or proves it. A proof counts for one request.

        Without a token for drills no request may drill. Raises Unauthorized.
        """
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme != SIGNED:
            return scheme.lower() == "bearer" and self._drill.accepts(given.strip())
        stamp, _, proof = given.rpartition(".")
        asked = request.method, request.rel_url.raw_path_qs, await read_body(request)
        proofs = [request_proof(token, stamp, *asked) for token in self._drill.accepted()]
        if not any([is_same(proof, x) for x in proofs]):  # noqa: C419
            raise Unauthorized(NO_RIGHT)
        sent, now = stamp.partition(".")[0], time.time()
        if not sent.isdecimal() or abs(float(sent) - now) > SIGNED_S:
            raise Unauthorized("the clocks of this drill and this lighthouse differ: set both clocks")
        self._signed = {x: at for x, at in self._signed.items() if now - at <= 2 * SIGNED_S}
        if given in self._signed and "signed" not in request:
            raise Unauthorized("this request of a drill has come before, and counts once: drill again")
        self._signed[given], request["signed"] = now, True
        return True

    def order_keys(self, job: str) -> list[str]:
        """Return the keys that prove an order of a drill to the trainers of ``job``."""
        return [order_key(token, job) for token in self._drill.accepted()]

    def keys(self, job: str) -> tuple[str, ...]:
        """Return the tokens of ``job`` (empty: of the lighthouse); requests should carry the first."""
        if not job:
            return self._own.accepted()
        entry = self._look.entries.get(job)
        return entry.tokens if entry is not None else ()

    def shown_to_servers(self, job: str, *, is_trusted: bool) -> str | None:
        """Return the token for the checkpoint servers of ``job``: the job's own.

        The lighthouse's token opens every job. So the lighthouse sends it only where jobs have no tokens, or
        to members that have sent it themselves (``is_trusted``).
        """
        if keys := self.keys(job):
            return keys[0]
        return (self._own.shown() or None) if self._folder is None or is_trusted else None

    async def refresh(self) -> None:
        """Read the folder again if the last reading is over a second old; wait at most HANG_S for it."""
        if self._folder is None:
            return
        if self._looking is None:
            if time.monotonic() - self._looked < LOOK_S:
                return
            self._looking = _look_at(self._folder, self._look.entries)
            self._looking.add_done_callback(self._take)
        elif self._look.blind == _HANGS:
            return
        await asyncio.wait({self._looking}, timeout=HANG_S)
        await asyncio.sleep(0)  # a finished reading delivers its result in the next turn of the loop
        if self._looking is not None:
            self._see(_FolderScan(self._look.entries, _HANGS))

    def _take(self, looking: "asyncio.Future[_FolderScan]") -> None:
        self._looking, self._looked = None, time.monotonic()
        self._see(looking.result())

    def _see(self, look: _FolderScan) -> None:
        before, self._look = self._look.blind, look
        if look.blind and look.blind != before:
            log.error("the folder of job tokens %s %s", self._folder, look.blind)


_HANGS = f"does not answer within {HANG_S:g} s"


def _look_at(folder: Path, before: dict[str, _TokenEntry]) -> "asyncio.Future[_FolderScan]":
    """Read the folder in a thread that may still run when the process ends."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_FolderScan] = loop.create_future()

    def tell(look: _FolderScan) -> None:
        if not outcome.done():
            outcome.set_result(look)

    def run() -> None:
        look = _scan(folder, before)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, look)

    try:
        threading.Thread(target=run, name="fabric-tokens", daemon=True).start()
    except RuntimeError as error:
        outcome.set_result(_FolderScan(before, f"cannot be read ({error})"))
    return outcome


def _scan(folder: Path, before: dict[str, _TokenEntry]) -> _FolderScan:
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        return _FolderScan(before, f"cannot be read ({error.strerror})")
    entries: dict[str, _TokenEntry] = {}
    blind = ""
    for file in files:
        try:
            check_name("job", file.name)
            there = file.stat()
            if not file.is_file():
                continue
            stamp = (there.st_mtime_ns, there.st_ino, there.st_size)
            old = before.get(file.name)
            entries[file.name] = old if old and old.stamp == stamp else _read(file, stamp)
        except (ProtocolError, FileNotFoundError):
            continue
        except OSError as error:
            blind = f"has a file {file.name} that cannot be read ({error.strerror})"
            if file.name in before:
                entries[file.name] = before[file.name]
    return _FolderScan(entries, blind)


def _read(file: Path, stamp: tuple[int, int, int]) -> _TokenEntry:
    """Read a token. Raises OSError where the file cannot be read now; a file without a token is ignored."""
    try:
        return _TokenEntry(stamp, read_tokens(file))
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from error
        log.warning("%s", error)
        return _TokenEntry(stamp, ())


def token_required(
    tokens: Tokens,
    open_paths: frozenset[str],
    login: Callable[[web.Request, Tokens], Scope | bool],
    tries: TokenTries,
    refused: Callable[[str, str], None] = lambda _job, _address: None,
) -> Middleware:
    """Make a middleware that admits a request whose token or ``login`` opens the job of its path.

    ``login`` returns False where it is not valid. ``refused`` gets the job and the client's address where a
    token does not open the job. For a path without a job the handler calls ``is_in_scope``.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        await tokens.refresh()
        if tokens.is_open or request.path in open_paths:
            return await handler(request)
        await tries.pause(request.remote or "")
        scope, job = login(request, tokens), request.match_info.get("job")
        try:
            if isinstance(scope, bool):
                if is_of_drills(request) and await tokens.may_drill(request):
                    request["scope"], request["may_reach_servers"] = None, False
                    return await handler(request)
                given = bearer_of(request.headers.get("Authorization", ""))
                scope = scope_of(tokens, tries, request, given)
            if scope is not None and job is not None and job not in scope:
                raise Unauthorized(
                    f"this token is not that of job {job[:64]}: use the token file that the job was given"
                )
        except Unauthorized:
            if request.headers.get("Authorization", "").startswith(SIGNED):
                tries.failed(request.remote or "")
            refused(job or "", request.remote or "")
            raise
        request["scope"] = scope
        request["may_reach_servers"] = tokens.may_reach_servers(scope)
        return await handler(request)

    return check


def scope_of(tokens: Tokens, tries: TokenTries, request: web.Request, given: str) -> Scope:
    """Return the scope of the token that the request shows, and count a wrong one."""
    try:
        return tokens.scope(given)
    except Unauthorized:
        tries.failed(request.remote or "")
        raise


def is_of_drills(request: web.Request) -> bool:
    """Whether a token for drills may open the request: to read of jobs, but no WebSocket, and to drill."""
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None else ""
    return path in _READ_BY_DRILLS if request.method == "GET" else path.startswith(DRILL_PATH)


def is_in_scope(request: web.Request, job: str) -> bool:
    """Whether the request may learn of ``job``."""
    scope: Scope = request.get("scope")
    return scope is None or job in scope


def opened_with_own(request: web.Request) -> bool:
    """Whether the request showed the lighthouse's own token."""
    return "scope" in request and request["scope"] is None
