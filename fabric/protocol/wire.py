"""Messages as bytes: one JSON object per message, decoded strictly by the dataclasses themselves.

``{"kind": "Bar", "version": 1, ...fields}``. A decoder is derived once from each class's annotations:
unknown fields are ignored, a missing field takes its default, anything else raises ProtocolError with the
path of the offending field. Non-finite numbers never pass. The same codec serves the stored record.
"""

import json
import math
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from fabric.errors import ProtocolError
from fabric.model import PROTOCOL_VERSION, Record
from fabric.protocol import messages

# A decoded message may hold at most this many bytes of JSON: a report that lists a million micro-batches
# fits, a peer that floods memory does not.
MAX_BYTES = 16 * 1024 * 1024
# Nothing we send nests deeper than record -> roster -> member -> field.
MAX_INTEGER = 2**63 - 1

T = TypeVar("T")
Decoder = Callable[[Any, str], Any]

_KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(messages.Message)}


def encode(message: messages.Message) -> bytes:
    """The bytes of one message."""
    body = {"kind": type(message).__name__, "version": PROTOCOL_VERSION, **asdict(message)}
    return _dump(body)


def decode(data: bytes | str) -> messages.Message:
    """The message in ``data``; raises ProtocolError for anything that is not exactly one."""
    body = _load(data)
    kind = body.get("kind")
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolError(f"unknown kind of message {_short(kind)}: upgrade the older side")
    check_version(body.get("version"))
    message: messages.Message = _decoder(cls)(body, cls.__name__)
    return message


def check_version(version: object) -> None:
    """Accept our own protocol version and the one before; refuse others with what to do."""
    known = (PROTOCOL_VERSION - 1, PROTOCOL_VERSION)
    if isinstance(version, bool) or not isinstance(version, int) or version not in known:
        raise ProtocolError(
            f"protocol version {_short(version)} cannot talk to version {PROTOCOL_VERSION}: "
            "upgrade one step at a time, the lighthouse first"
        )


def encode_record(record: Record) -> bytes:
    """The bytes of the membership record as it lies in the store."""
    return _dump({"version": PROTOCOL_VERSION, **asdict(record)})


def decode_record(data: bytes) -> Record:
    """The membership record; raises ProtocolError when the store holds something else."""
    body = _load(data)
    check_version(body.get("version"))
    record: Record = _decoder(Record)(body, "Record")
    return record


def decode_as(cls: type[T], value: object, path: str = "value") -> T:
    """``value`` (parsed JSON) as dataclass ``cls``, by the same strict rules."""
    result: T = _decoder(cls)(value, path)
    return result


def _dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def _load(data: bytes | str) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is over the limit of {MAX_BYTES}")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a JSON message: {error}") from error
    if not isinstance(body, dict):
        raise ProtocolError(f"a message is a JSON object, not {type(body).__name__}")
    return body


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _fail(path: str, wanted: str, value: object) -> ProtocolError:
    return ProtocolError(f"{path} must be {wanted}, not {_short(value)}")


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise _fail(path, "a string", value)
    return value


def _integer(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_INTEGER:
        raise _fail(path, "an integer of 64 bits", value)
    return value


def _number(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _fail(path, "a number", value)
    try:
        number = float(value)
    except OverflowError:
        raise _fail(path, "a finite number", value) from None
    if not math.isfinite(number):
        raise _fail(path, "a finite number", value)
    return number


def _boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise _fail(path, "true or false", value)
    return value


_SCALARS: dict[Any, Decoder] = {
    str: _string,
    int: _integer,
    float: _number,
    bool: _boolean,
}


def _decoder(annotation: Any) -> Decoder:
    return _build_decoder(annotation)


@cache
def _build_decoder(annotation: Any) -> Decoder:
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if is_dataclass(annotation) and isinstance(annotation, type):
        return _object_decoder(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        return _tuple_decoder(arguments)
    if origin is dict:
        return _map_decoder(*arguments)
    if origin in (Union, UnionType):
        return _optional_decoder(arguments)
    raise TypeError(f"no decoder for {annotation}")


def _object_decoder(cls: type) -> Decoder:
    hints = get_type_hints(cls)
    plan = [
        (f.name, _decoder(hints[f.name]), f.default is MISSING and f.default_factory is MISSING)
        for f in fields(cls)
    ]

    def decode_object(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise _fail(path, "an object", value)
        found = {}
        for name, decoder, required in plan:
            if name in value:
                found[name] = decoder(value[name], f"{path}.{name}")
            elif required:
                raise ProtocolError(f"{path}.{name} is missing")
        return cls(**found)

    return decode_object


def _tuple_decoder(arguments: tuple[Any, ...]) -> Decoder:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        item = _decoder(arguments[0])

        def decode_list(value: Any, path: str) -> Any:
            if not isinstance(value, list):
                raise _fail(path, "a list", value)
            return tuple(item(v, f"{path}[{i}]") for i, v in enumerate(value))

        return decode_list
    items = [_decoder(a) for a in arguments]

    def decode_tuple(value: Any, path: str) -> Any:
        if not isinstance(value, list) or len(value) != len(items):
            raise _fail(path, f"a list of {len(items)}", value)
        return tuple(d(v, f"{path}[{i}]") for i, (d, v) in enumerate(zip(items, value, strict=True)))

    return decode_tuple


def _map_decoder(key: Any, item: Any) -> Decoder:
    decode_item = _decoder(item)

    def decode_map(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise _fail(path, "an object", value)
        return {_key(k, key, path): decode_item(v, f"{path}.{_short(k)}") for k, v in value.items()}

    return decode_map


def _key(text: str, key: Any, path: str) -> Any:
    if key is str:
        return text
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 19 or int(digits) > MAX_INTEGER:
        raise _fail(path, "an object with integer keys", text)
    return int(text)


def _optional_decoder(arguments: tuple[Any, ...]) -> Decoder:
    present = [a for a in arguments if a is not NoneType]
    if len(present) != 1:
        raise TypeError(f"only optional unions are decoded, not {arguments}")
    inner = _decoder(present[0])

    def decode_optional(value: Any, path: str) -> Any:
        return None if value is None else inner(value, path)

    return decode_optional
