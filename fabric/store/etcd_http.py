"""HTTP to the endpoints of one etcd, and the JSON of its requests and answers.

An error says whether the request was sent.

A request whose connection could not be made was never sent, so a write may be tried elsewhere
(``StoreUnavailable``). Once a byte was sent, a lost answer leaves the outcome unknown (``StoreIndefinite``).
So each write gets a new connection: on a kept connection, a server that restarted before the write looks like
one that died during it.

Where a user is set, the first request fetches a token, and every request carries it. A token becomes invalid
when it expires, an etcd server restarts or rights change. etcd refuses a request with an invalid token before
it applies anything. So the request, also a write, is repeated once with a new token.

The size of an answer is checked before memory is taken. No exception of aiohttp leaves this module.
"""

import io
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import aiohttp
import msgspec

from fabric.errors import ConfigError, StoreError, StoreIndefinite, StoreUnavailable
from fabric.model import Value
from fabric.runtime.http.tls import RenewedContext
from fabric.store.base import (
    STORE_ID_KEY,
    Compare,
    KeyValue,
    Operation,
    Put,
    key_bytes,
    key_text,
)

# The JSON of etcd's v3 gateway, both ways, without any I/O.
#
# It is protobuf's JSON mapping: bytes are base64, 64-bit integers are decimal strings, and a field that is
# zero, empty or false is left out. Errors are an object with a gRPC ``code``, or plain text when they come
# from the HTTP layer.


Json = dict[str, object]
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Header(msgspec.Struct):
    cluster_id: str = ""
    revision: _Int64 = 0


class _Entry(msgspec.Struct):
    key: bytes = b""
    value: bytes = b""
    create_revision: _Int64 = 0
    mod_revision: _Int64 = 0
    lease: _Int64 = 0


class _KeyRange(msgspec.Struct):
    kvs: list[_Entry] = []


class _Response(msgspec.Struct):
    response_range: _KeyRange = msgspec.field(default_factory=_KeyRange)


class _Renewal(msgspec.Struct):
    TTL: _Int64 = 0


class Answer(msgspec.Struct):
    """The fields that we read of the answers to all requests."""

    header: _Header = msgspec.field(default_factory=_Header)
    kvs: list[_Entry] = []
    more: bool = False  # of a list
    succeeded: bool = False  # of a transaction
    responses: list[_Response] = []  # of a transaction whose guards failed
    ID: _Int64 = 0  # of a new lease
    TTL: _Int64 = 0
    result: _Renewal = msgspec.field(default_factory=_Renewal)  # of a renewal
    token: str = ""
    version: object = None
    error: object = None  # a streaming call sends errors so, with status 200

    @property
    def key_values(self) -> list[KeyValue]:
        return [
            KeyValue(key_text(x.key), x.value, x.create_revision, x.mod_revision, x.lease) for x in self.kvs
        ]

    @property
    def failed_store_id(self) -> bytes | None:
        """The id that a failed transaction found in the store; None where the store has no id."""
        return next((x.value for response in self.responses for x in response.response_range.kvs), None)


# gRPC status codes that mean that nothing was applied: invalid argument, not found, already exists,
# permission denied, resource exhausted (too many requests, no space), failed precondition, out of range,
# unimplemented, unauthenticated.
DEFINITE_CODES = frozenset({3, 5, 6, 7, 8, 9, 11, 12, 16})
NOT_FOUND = 5
UNAUTHENTICATED = 16
# Some releases refuse a token from before a change of users or roles with this text, not with a code.
OLD_AUTH = "revision of auth store is old"
NO_LEADER = "etcdserver: no leader"

# Releases of etcd that need a warning to the operator, as (from, below, sentence).
_BAD_RELEASES = (
    ((0, 0), (3, 4), "is too old for this store, which needs 3.4 or newer: upgrade it"),
    ((3, 4), (3, 5), "no longer gets fixes from its project: plan an upgrade"),
    ((3, 5, 0), (3, 5, 3), "can lose committed data after a crash: upgrade to 3.5.3 or newer now"),
)


class GatewayFailure(Value):
    """An answer that is an error: ``code`` is gRPC's, or None where the answer has none."""

    code: int | None
    text: str

    @property
    def is_no_leader(self) -> bool:
        return NO_LEADER in self.text

    @property
    def is_old_token(self) -> bool:
        return self.code == UNAUTHENTICATED or OLD_AUTH in self.text

    @property
    def is_definite(self) -> bool:
        """Whether it is certain that nothing was applied."""
        return self.code in DEFINITE_CODES or self.is_no_leader


def list_request(start: bytes, end: bytes, revision: int, limit: int) -> Json:
    """Ask for the keys in [start, end) at a revision (0: the newest), at most ``limit`` of them."""
    request: Json = {"key": start, "range_end": end, "limit": str(limit)}
    return request | ({"revision": str(revision)} if revision else {})


def transaction_request(compares: Sequence[Compare], operations: Sequence[Operation], store_id: str) -> Json:
    """Return the guarded transaction; where ``store_id`` is given, it also guards the store's id."""
    guards: list[Json] = []
    for compare in compares:
        for target, revision in (("CREATE", compare.create_revision), ("MOD", compare.mod_revision)):
            if revision is not None:
                guard: Json = {"key": key_bytes(compare.key), "target": target, "result": "EQUAL"}
                guards.append(guard | {f"{target.lower()}_revision": str(revision)})
    success: list[Json] = []
    for operation in operations:
        target_key: Json = {"key": key_bytes(operation.key)}
        if isinstance(operation, Put):
            put = target_key | {"value": operation.value, "lease": str(operation.lease)}
            success.append({"request_put": put})
        else:
            success.append({"request_delete_range": target_key})
    request: Json = {"compare": guards, "success": success}
    if store_id:
        key = STORE_ID_KEY.encode()
        guards.append({"key": key, "target": "VALUE", "result": "EQUAL", "value": store_id.encode()})
        request["failure"] = [{"request_range": {"key": key}}]
    return request


def parse(body: bytes) -> Answer:
    """Return the answer in a body. Raises StoreError for any other body."""
    try:
        return msgspec.json.decode(body, type=Answer, strict=False)
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"The etcd endpoint sent something else than an answer ({error}): make sure that the address is "
            "an etcd of version 3.4 or newer."
        ) from error


def failure(status: int, body: bytes) -> GatewayFailure:
    """Read a non-200 answer; never raises, since a proxy may send any bytes."""
    try:
        answer = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        return GatewayFailure(None, f"HTTP {status}: {body[:300].decode('utf-8', 'replace').strip()}")
    return _failure(answer, status)


def _failure(answer: Json, status: int) -> GatewayFailure:
    code = answer.get("code", answer.get("grpc_code"))
    message = answer.get("message") or answer.get("error") or f"HTTP {status}"
    return GatewayFailure(
        code if isinstance(code, int) and not isinstance(code, bool) else None, str(message)[:300]
    )


def version_warning(version: object) -> str | None:
    """Return the warning for the operator about a release, from its status."""
    release = version[:40] if isinstance(version, str) else ""
    parts = release.split("-")[0].split(".")[:3]
    numbers = tuple(int(part) for part in parts if part.isdecimal() and part.isascii())
    if len(numbers) < 2:
        return "An etcd does not say which version it is: make sure that it is 3.4 or newer."
    for first, below, sentence in _BAD_RELEASES:
        if first <= numbers < below:
            return f"etcd {release} {sentence}."
    return None


_MAX_PASSWORD_BYTES = 4096


class EtcdAccess(Value):
    """``tls``: speak TLS, trusting ``ca_file`` (PEM; None: the system's). ``cert_file`` and ``key_file``: our
    own certificate, where the etcd asks for one (mTLS). ``user`` and ``password_file``: etcd's own users.

    Passwords and keys are files, never arguments: arguments show in process lists.
    """

    tls: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    user: str = ""
    password_file: Path | None = None

    def check(self) -> None:
        """Raise ConfigError for options that do not fit together, or files that cannot be read."""
        if not self.tls and (self.ca_file or self.cert_file or self.key_file):
            raise ConfigError("Certificates are given for a store without TLS: write its URL as etcds://...")
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError(
                "A certificate for the store needs its key, and a key its certificate: give both."
            )
        if bool(self.user) != (self.password_file is not None):
            raise ConfigError("The store's user needs a password file, and the other way round: give both.")
        if self.password_file is not None:
            self.password()
        self.context()

    def context(self) -> ssl.SSLContext | bool:
        """Return the ``ssl`` argument of aiohttp. Raises ConfigError where a file cannot be used."""
        if not self.tls:
            return True
        try:
            context = RenewedContext(ssl.PROTOCOL_TLS_CLIENT)
            if self.ca_file is None:
                context.load_default_certs()
            context.read(self.cert_file, self.key_file, self.ca_file)
        except (OSError, ssl.SSLError) as error:
            names = ", ".join(str(f) for f in (self.ca_file, self.cert_file, self.key_file) if f is not None)
            raise ConfigError(
                f"The store's certificates cannot be used ({error.strerror or error}): check {names}."
            ) from error
        return context

    def password(self) -> str:
        """Read the password file, at each call, so that a change takes effect. Raises ConfigError."""
        assert self.password_file is not None
        try:
            with self.password_file.open("rb") as file:
                text = file.read(_MAX_PASSWORD_BYTES + 1).decode().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The store's password file {self.password_file} cannot be read: {error}"
            ) from error
        if not text or len(text) > _MAX_PASSWORD_BYTES:
            raise ConfigError(f"The store's password file {self.password_file} is empty or too long.")
        return text


MAX_ANSWER_BYTES = 32 << 20

_HEADERS = {
    "Content-Type": "application/json",
    "Accept-Encoding": "identity",
    # With this header an etcd server without a leader refuses a request at once, not after its own long
    # timeout.
    "Grpc-Metadata-hasleader": "true",
}


class Gateway:
    """Sessions to all endpoints (base URLs). Create it inside a running event loop.

    Raises ConfigError where ``access`` names files that cannot be used.
    """

    def __init__(self, endpoints: tuple[str, ...], *, attempt_timeout_s: float, access: EtcdAccess) -> None:
        self.endpoints = endpoints
        self._access = access
        self._tls = access.context()
        self._token = ""
        self._closed = False
        self._attempt_timeout_s = attempt_timeout_s
        self._preferred = 0
        self._kept = self._session(force_close=False)
        self._fresh = self._session(force_close=True)

    def in_order(self) -> tuple[str, ...]:
        """Return all endpoints, the one that worked last first."""
        return self.endpoints[self._preferred :] + self.endpoints[: self._preferred]

    def avoid(self, endpoint: str) -> None:
        """Begin later requests at the next endpoint, if they now begin at ``endpoint``."""
        if self.endpoints[self._preferred] == endpoint:
            self._preferred = (self._preferred + 1) % len(self.endpoints)

    async def post(
        self, endpoint: str, path: str, request: Json, *, fresh: bool = False
    ) -> Answer | GatewayFailure:
        """Send one request; return its answer.

        Raises StoreUnavailable when it was not sent, StoreIndefinite when the answer was lost or cannot
        be understood, StoreError when the user is refused.
        """
        used = await self._authorise(endpoint)
        answer = await self._post(endpoint, path, request, fresh=fresh)
        if self._access.user and isinstance(answer, GatewayFailure) and answer.is_old_token:
            if self._token == used:
                self._token = ""
            await self._authorise(endpoint)
            answer = await self._post(endpoint, path, request, fresh=fresh)
        return answer

    async def _authorise(self, endpoint: str) -> str:
        """Return the token, asked for where there is none; empty without a user."""
        if self._access.user and not self._token:
            try:
                request: Json = {"name": self._access.user, "password": self._access.password()}
            except ConfigError as error:
                raise StoreError(str(error)) from error
            answer = await self._post(endpoint, "/v3/auth/authenticate", request)
            if isinstance(answer, GatewayFailure):
                if not answer.is_definite:
                    raise StoreUnavailable(f"The etcd endpoint {endpoint} gives no token ({answer.text}).")
                raise StoreError(
                    f"The etcd endpoint {endpoint} refused the user {self._access.user!r}: {answer.text}; "
                    "check the store's user and password file, and that authentication is enabled there."
                )
            self._token = answer.token if answer.token.isprintable() else ""
        return self._token

    async def _post(
        self, endpoint: str, path: str, request: Json, *, fresh: bool = False
    ) -> Answer | GatewayFailure:
        if self._closed:
            raise StoreUnavailable(f"Nothing was sent to {endpoint}, since the store was closed meanwhile.")
        headers = {"Authorization": self._token} if self._token else {}
        session = self._fresh if fresh else self._kept
        # A file object, because aiohttp writes it in pieces: a large body does not block the event loop.
        body = io.BytesIO(msgspec.json.encode(request))
        try:
            # Follow no redirects: etcd sends none, and a body must not be sent twice.
            async with session.post(
                endpoint + path, data=body, headers=headers, allow_redirects=False
            ) as response:
                data = await _bounded(response)
                if response.status != 200:
                    return failure(response.status, data)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            # A failed TLS handshake is among these errors: nothing was sent.
            raise StoreUnavailable(f"The etcd endpoint {endpoint} cannot be reached ({error}).") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise StoreIndefinite(
                f"The etcd endpoint {endpoint} did not answer ({str(error) or type(error).__name__}): what "
                "was asked may or may not have been done, read again before going on."
            ) from error
        try:
            answer = parse(data)
        except StoreError as error:
            raise StoreIndefinite(f"{error} What was asked of {endpoint} may or may not be done.") from error
        if answer.error is None:
            return answer
        return _failure(answer.error if isinstance(answer.error, dict) else {"error": answer.error}, 200)

    async def close(self) -> None:
        self._closed = True
        await self._kept.close()
        await self._fresh.close()

    def _session(self, *, force_close: bool) -> aiohttp.ClientSession:
        timeout_s = self._attempt_timeout_s
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=force_close, limit=0, ttl_dns_cache=5, ssl=self._tls),
            # The connect phase has the shorter timeout: when that timeout passes, nothing was sent.
            timeout=aiohttp.ClientTimeout(total=timeout_s, connect=timeout_s * 0.9),
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    while chunk := await response.content.readany():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise StoreIndefinite(
                f"The etcd endpoint {response.url.origin()} sent more than {MAX_ANSWER_BYTES} bytes: store "
                "and list less."
            )
    return bytes(body)
