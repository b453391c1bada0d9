"""The JSON of etcd's v3 gateway, both ways, without any I/O.

It is protobuf's JSON mapping: bytes are base64, 64-bit integers are decimal strings, and a field that is
zero, empty or false is left out. Errors are an object with a gRPC ``code``, or plain text when they come
from the HTTP layer. Every field of an answer is checked here; no type is assumed.
"""

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass

from fabric.errors import StoreError
from fabric.store.base import (
    STORE_ID_KEY,
    Compare,
    KeyValue,
    Operation,
    Put,
    WatchEvent,
    key_bytes,
    key_range,
    key_text,
)

Json = dict[str, object]

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


@dataclass(frozen=True, slots=True)
class GatewayFailure:
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


@dataclass(frozen=True, slots=True)
class WatchAnswer:
    """One line of a watch. ``revision`` is the store's; 0 where the line has none."""

    events: tuple[WatchEvent, ...]
    revision: int
    created: bool
    canceled: bool
    compact_revision: int
    reason: str


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def get_request(key: str) -> Json:
    return {"key": encode(key_bytes(key))}


def list_request(start: bytes, end: bytes, revision: int, limit: int) -> Json:
    """Ask for the keys in [start, end) at a revision (0: the newest), at most ``limit`` of them."""
    request: Json = {"key": encode(start), "range_end": encode(end), "limit": str(limit)}
    if revision:
        request["revision"] = str(revision)
    return request


def watch_request(prefix: str, from_revision: int) -> Json:
    start, end = key_range(prefix)
    create: Json = {
        "key": encode(start),
        "range_end": encode(end),
        "start_revision": str(from_revision),
        "progress_notify": True,
    }
    return {"create_request": create}


def transaction_request(compares: Sequence[Compare], operations: Sequence[Operation], store_id: str) -> Json:
    """Return the guarded transaction; where ``store_id`` is given, it also guards the store's id."""
    guards: list[Json] = []
    for compare in compares:
        key = encode(key_bytes(compare.key))
        for target, revision in (("CREATE", compare.create_revision), ("MOD", compare.mod_revision)):
            if revision is not None:
                field = f"{target.lower()}_revision"
                guards.append({"key": key, "target": target, "result": "EQUAL", field: str(revision)})
    request: Json = {"compare": guards, "success": [_operation(operation) for operation in operations]}
    if store_id:
        key = encode(STORE_ID_KEY.encode())
        value = encode(store_id.encode())
        guards.append({"key": key, "target": "VALUE", "result": "EQUAL", "value": value})
        request["failure"] = [{"request_range": {"key": key}}]
    return request


def _operation(operation: Operation) -> Json:
    key = encode(key_bytes(operation.key))
    if isinstance(operation, Put):
        put: Json = {"key": key, "value": encode(operation.value), "lease": str(operation.lease)}
        return {"request_put": put}
    return {"request_delete_range": {"key": key}}


def parse(body: bytes) -> Json:
    """Return the JSON object in a body. Raises StoreError for any other body."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise StoreError(_strange("an answer that is not JSON")) from error
    return _object(answer)


def failure(status: int, body: bytes) -> GatewayFailure:
    """Read a non-200 answer; never raises, since a proxy may send any bytes."""
    text = body[:300].decode("utf-8", "replace").strip()
    try:
        answer = parse(body)
    except StoreError:
        return GatewayFailure(None, f"HTTP {status}: {text}")
    return _failure(answer, status)


def _failure(answer: Json, status: int) -> GatewayFailure:
    code = answer.get("code", answer.get("grpc_code"))
    message = answer.get("message") or answer.get("error") or f"HTTP {status}"
    return GatewayFailure(
        code if isinstance(code, int) and not isinstance(code, bool) else None, str(message)[:300]
    )


def unary_result(answer: Json) -> Json | GatewayFailure:
    """Return ``answer`` (of status 200), or the error in it: a streaming call sends errors so."""
    return stream_result(answer) if "error" in answer else answer


def stream_result(answer: Json) -> Json | GatewayFailure:
    """Unwrap one line of a streaming call."""
    if "error" in answer:
        error = answer["error"]
        return _failure(error, 200) if isinstance(error, dict) else GatewayFailure(None, str(error)[:300])
    return _object(answer.get("result"))


def revision_of(answer: Json) -> int:
    """Return the store's revision in an answer's header, 0 without one."""
    return integer(_object(answer.get("header", {})), "revision")


def key_values(answer: Json) -> list[KeyValue]:
    return [_key_value(_object(item)) for item in _array(answer, "kvs")]


def failed_store_id(answer: Json) -> bytes | None:
    """Return the id that a failed transaction found in the store; None where the store has no id."""
    for response in _array(answer, "responses"):
        entries = key_values(_object(_object(response).get("response_range", {})))
        if entries:
            return entries[0].value
    return None


def watch_answer(result: Json) -> WatchAnswer:
    events = []
    for item in _array(result, "events"):
        event = _object(item)
        key_value = _key_value(_object(event.get("kv", {})))
        kind = event.get("type", "PUT")
        if kind not in ("PUT", "DELETE"):
            raise StoreError(_strange(f"a watch event of the unknown type {str(kind)[:40]!r}"))
        events.append(WatchEvent("put" if kind == "PUT" else "delete", key_value, key_value.mod_revision))
    return WatchAnswer(
        events=tuple(events),
        revision=revision_of(result),
        created=bool(result.get("created", False)),
        canceled=bool(result.get("canceled", False)),
        compact_revision=integer(result, "compact_revision"),
        reason=str(result.get("cancel_reason", ""))[:300],
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


def integer(answer: Json, field: str) -> int:
    """Return a 64-bit field, 0 when left out. Raises StoreError for anything else."""
    value = answer.get(field, 0)
    if isinstance(value, str) and len(value) <= 20:
        try:
            value = int(value)
        except ValueError:
            value = None
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 63:
        raise StoreError(_strange(f"a field {field!r} that is no integer"))
    return value


def _key_value(item: Json) -> KeyValue:
    return KeyValue(
        key=key_text(_data(item, "key")),
        value=_data(item, "value"),
        create_revision=integer(item, "create_revision"),
        mod_revision=integer(item, "mod_revision"),
        lease=integer(item, "lease"),
    )


def _data(item: Json, field: str) -> bytes:
    value = item.get(field, "")
    try:
        if isinstance(value, str):
            return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise StoreError(_strange(f"a field {field!r} that is not base64"))


def _object(value: object) -> Json:
    if not isinstance(value, dict):
        raise StoreError(_strange("something else than an object"))
    return value


def _array(answer: Json, field: str) -> Sequence[object]:
    value = answer.get(field, [])
    if not isinstance(value, list):
        raise StoreError(_strange(f"a field {field!r} that is no list"))
    return value


def _strange(what: str) -> str:
    return f"The etcd endpoint sent {what}: make sure that the address is an etcd of version 3.4 or newer."
