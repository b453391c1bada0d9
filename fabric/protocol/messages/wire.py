"""Messages as bytes: one JSON object per message, decoded strictly by the dataclasses themselves.

``{"kind": "CommitVote", "version": 3, ...fields}``. A codec is derived once from each class's annotations:
unknown fields are ignored, a missing field takes its default, anything else raises ProtocolError with the
path of the offending field. Non-finite numbers never pass. The same codec serves the stored record, which
is compressed when it is long: a value of a store is bounded, and a roster of thousands is repetitive. Long
messages to members that understand it are compressed likewise.
"""

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache, lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from fabric.errors import ProtocolError
from fabric.model import PROTOCOL_VERSION, Member, Record, StepTimes
from fabric.protocol.messages import network

# A decoded message may hold at most this many bytes of JSON: a report that lists a million micro-batches
# fits, a peer that floods memory does not.
MAX_BYTES = 16 * 1024 * 1024
# Nothing we send nests deeper than record -> roster -> member -> field.
MAX_INTEGER = 2**63 - 1
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
# What is longer than this is compressed: shorter records can be read with the store's own tools.
PLAIN_BYTES = 64 * 1024
# A zlib stream begins with this byte, which no JSON text does.
_ZLIB = b"\x78"

T = TypeVar("T")
Decoder = Callable[[Any], Any]
# None: the value is JSON's already.
Encoder = Callable[[Any], Any] | None

_KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(network.Message)}


def encode(message: network.Message) -> bytes:
    """The bytes of one message."""
    cls: type = type(message)
    if isinstance(message, network.HeartbeatAck):
        # One for every beat of every replica: a number, and words that are the same for all.
        words = _words(message.waiting_for) if message.waiting_for else b""
        head = b'{"kind":"HeartbeatAck","version":%d,' % PROTOCOL_VERSION
        return head + b'"number":%d%b}' % (message.number, words)
    return _dump({"kind": cls.__name__, "version": PROTOCOL_VERSION, **_fields(cls)(message)})


@lru_cache(16)
def _words(waiting_for: str) -> bytes:
    return b',"waiting_for":' + _JSON.encode(waiting_for).encode()


def packed(data: bytes) -> bytes:
    """``data`` compressed where it is long; ``decode`` takes both."""
    return data if len(data) <= PLAIN_BYTES else zlib.compress(data)


def decode(data: bytes | str) -> network.Message:
    """The message in ``data``, packed or not; raises ProtocolError for anything that is not exactly one."""
    body = _load(data)
    kind = body.get("kind")
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolError(f"unknown kind of message {_short(kind)}: upgrade the older side")
    if cls is not network.Rejected:  # a refusal is for whoever cannot be talked to
        check_version(body.get("version"))
    if cls is network.Heartbeat and (beat := _usual_beat(body)) is not None:
        return beat
    message: network.Message = _decoded(cls, body, cls.__name__)
    return message


def _usual_beat(body: dict[str, Any]) -> network.Heartbeat | None:
    """A beat as we write them, of which there are very many. None for every other: the strict way takes it,
    or says what is wrong with it."""
    get = body.get
    number, epoch, generation, step = get("number"), get("epoch"), get("generation"), get("step")
    digest, phase, busy, busy_s = get("digest"), get("phase"), get("busy"), get("busy_s")
    waiting_for, times = get("waiting_for"), get("times")
    empty, unreachable = get("empty", -1), get("unreachable", [])
    if not (
        type(number) is type(epoch) is type(generation) is type(step) is type(empty) is int
        and type(digest) is type(phase) is type(busy) is str
        and type(busy_s) is float
        and type(waiting_for) is type(unreachable) is list
        and math.isfinite(busy_s)
        and min(number, epoch, generation, step, empty) >= -MAX_INTEGER
        and max(number, epoch, generation, step, empty) <= MAX_INTEGER
    ):
        return None
    try:
        whom = tuple(map(_string, waiting_for)) if waiting_for else ()
        away = tuple(map(_string, unreachable)) if unreachable else ()
        taken = None if times is None else _decoder(StepTimes)(times)
    except _Offence:
        return None
    told = (number, epoch, generation, step, digest, phase, whom, busy, taken, busy_s, empty, away)
    return network.Heartbeat(*told)


def check_version(version: object) -> None:
    """Accept our own protocol version and its neighbours; refuse others with what to do.

    The one after too: of two sides that are one version apart, each receives what the other sends.
    """
    known = (PROTOCOL_VERSION - 1, PROTOCOL_VERSION, PROTOCOL_VERSION + 1)
    if isinstance(version, bool) or not isinstance(version, int) or version not in known:
        raise ProtocolError(
            f"protocol version {_short(version)} cannot talk to version {PROTOCOL_VERSION}: "
            "upgrade one step at a time, the lighthouse first"
        )


def encode_record(record: Record) -> bytes:
    """The bytes of the membership record as it lies in the store: JSON, compressed when it is long."""
    body = {"version": PROTOCOL_VERSION, **_fields(Record)(replace(record, roster=()))}
    del body["roster"]
    roster = ",".join(map(_entry, record.roster))
    return packed(b'{"roster":[%b],%b' % (roster.encode(), _dump(body)[1:]))


@lru_cache(1 << 15)  # from one epoch to the next nearly every entry stays, and there are thousands
def _entry(member: Member) -> str:
    return _JSON.encode(_fields(Member)(member))


def decode_record(data: bytes) -> Record:
    """The membership record; raises ProtocolError when the store holds something else."""
    body = _load(data)
    check_version(body.get("version"))
    record: Record = _decoded(Record, body, "Record")
    return record


def _inflate(data: bytes) -> bytes:
    """At most MAX_BYTES of it: what others hold or send is not to be trusted with our memory."""
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise ProtocolError(f"what is compressed cannot be inflated: {error}") from error
    if not stream.eof:
        raise ProtocolError(f"what is compressed is cut off, or over the limit of {MAX_BYTES} bytes")
    return plain


def decode_as(cls: type[T], value: object, path: str = "value") -> T:
    """``value`` (parsed JSON) as dataclass ``cls``, by the same strict rules."""
    result: T = _decoded(cls, value, path)
    return result


def _dump(body: dict[str, Any]) -> bytes:
    return _JSON.encode(body).encode()


def _load(data: bytes | str) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is over the limit of {MAX_BYTES}")
    if isinstance(data, bytes) and data[:1] == _ZLIB:
        data = _inflate(data)
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


# --- encoders -------------------------------------------------------------------------------------------


@cache
def _fields(cls: type) -> Callable[[Any], dict[str, Any]]:
    """An object of ``cls`` as a dictionary that JSON can hold."""
    hints = get_type_hints(cls)
    plan = [(f.name, _encoder(hints[f.name])) for f in fields(cls)]

    def encode_object(value: Any) -> dict[str, Any]:
        return {
            name: getattr(value, name) if encoder is None else encoder(getattr(value, name))
            for name, encoder in plan
        }

    return encode_object


def _encoder(annotation: Any) -> Encoder:
    if is_dataclass(annotation) and isinstance(annotation, type):
        return _fields(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        item = _encoder(arguments[0])
        return None if item is None else lambda value: [item(v) for v in value]
    if origin in (Union, UnionType):
        inner = _encoder(_present(arguments))
        return None if inner is None else lambda value: None if value is None else inner(value)
    return None


# --- decoders -------------------------------------------------------------------------------------------


class _Offence(Exception):
    """What a value must be and is not; the path to it grows on the way out."""

    def __init__(self, must: str) -> None:
        super().__init__(must)
        self.must = must
        self.path = ""


def _decoded(cls: type, value: object, path: str) -> Any:
    try:
        return _decoder(cls)(value)
    except _Offence as offence:
        raise ProtocolError(f"{path}{offence.path} {offence.must}") from None


def _wrong(wanted: str, value: object) -> _Offence:
    return _Offence(f"must be {wanted}, not {_short(value)}")


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong("a string", value)
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_INTEGER:
        raise _wrong("an integer of 64 bits", value)
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong("a number", value)
    try:
        number = float(value)
    except OverflowError:
        raise _wrong("a finite number", value) from None
    if not math.isfinite(number):
        raise _wrong("a finite number", value)
    return number


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong("true or false", value)
    return value


_SCALARS: dict[Any, Decoder] = {
    str: _string,
    int: _integer,
    float: _number,
    bool: _boolean,
}


@cache
def _decoder(annotation: Any) -> Decoder:
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

    def decode_object(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong("an object", value)
        found, name = {}, ""
        try:
            for name, decoder, required in plan:
                each = value.get(name, MISSING)
                if each is not MISSING:
                    found[name] = decoder(each)
                elif required:
                    raise _Offence("is missing")
        except _Offence as offence:
            offence.path = f".{name}{offence.path}"
            raise
        return cls(**found)

    return decode_object


def _tuple_decoder(arguments: tuple[Any, ...]) -> Decoder:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        item = _decoder(arguments[0])

        def decode_list(value: Any) -> Any:
            if not isinstance(value, list):
                raise _wrong("a list", value)
            return tuple(_each(value, [item] * len(value)))

        return decode_list
    items = [_decoder(a) for a in arguments]

    def decode_tuple(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(items):
            raise _wrong(f"a list of {len(items)}", value)
        return tuple(_each(value, items))

    return decode_tuple


def _each(values: list[Any], decoders: list[Decoder]) -> list[Any]:
    found: list[Any] = []
    try:
        for value, decoder in zip(values, decoders, strict=True):
            found.append(decoder(value))
    except _Offence as offence:
        offence.path = f"[{len(found)}]{offence.path}"
        raise
    return found


def _map_decoder(key: Any, item: Any) -> Decoder:
    decode_item = _decoder(item)

    def decode_map(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong("an object", value)
        found, text = {}, ""
        for text, each in value.items():
            name = _key(text, key)
            try:
                found[name] = decode_item(each)
            except _Offence as offence:
                offence.path = f".{_short(text)}{offence.path}"
                raise
        return found

    return decode_map


def _key(text: str, key: Any) -> Any:
    if key is str:
        return text
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 19 or int(digits) > MAX_INTEGER:
        raise _wrong("an object with integer keys", text)
    return int(text)


def _optional_decoder(arguments: tuple[Any, ...]) -> Decoder:
    inner = _decoder(_present(arguments))
    return lambda value: None if value is None else inner(value)


def _present(arguments: tuple[Any, ...]) -> Any:
    present = [a for a in arguments if a is not NoneType]
    if len(present) != 1:
        raise TypeError(f"only optional unions are carried, not {arguments}")
    return present[0]
