"""Messages as bytes: one JSON object per message, decoded strictly by the types of their fields.

``{"kind": "CommitVote", "version": 3, ...fields}``. msgspec reads each class's annotations: unknown fields
are ignored, a missing field takes its default, any other deviation raises ProtocolError with the path of the
wrong field. Non-finite numbers raise it too. The same codec serves the stored record. A long record is
compressed, because stores limit the size of a value. Long messages to members that understand compression
are compressed too.
"""

import json
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar, cast, get_args

import msgspec

from fabric.errors import ProtocolError
from fabric.model import PROTOCOL_VERSION, Record, printable, shortened
from fabric.protocol.messages import network

# The most bytes of JSON in a decoded message, so that no peer can flood memory. The lighthouse takes fewer.
MAX_BYTES = 16 * 1024 * 1024
# Longer messages and records are compressed. Shorter records can be read with the store's own tools.
PLAIN_BYTES = 64 * 1024
# The longest kind or version that is decoded.
_HEAD_BYTES = 64
# A zlib stream begins with this byte, which no JSON text does.
_ZLIB = b"\x78"

# The names in our errors of the types that msgspec names.
_WORDS = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false"}
_WORDS |= {"array": "a list", "object": "an object"}
_TYPE = re.compile(r"`([^`]*)`")

T = TypeVar("T")
_decoder = cache(msgspec.json.Decoder)

_KINDS: dict[str, type[network.Message]] = {kind.__name__: kind for kind in get_args(network.Message)}
_HEADS = {kind: f'{{"kind":"{name}","version":{PROTOCOL_VERSION},'.encode() for name, kind in _KINDS.items()}
# A text that begins with such a head is decoded in one pass.
_USUAL_HEADS: dict[str | bytes, type[network.Message]] = {head[:-1]: kind for kind, head in _HEADS.items()}
_USUAL_HEADS |= {head[:-1].decode(): kind for kind, head in _HEADS.items()}


class MessageHead(msgspec.Struct):
    """The fields that say how to read the others."""

    kind: msgspec.Raw = msgspec.Raw(b"null")
    version: msgspec.Raw = msgspec.Raw(b"null")


class _SessionHead(msgspec.Struct):
    replica: str = ""


def encode(message: network.Message) -> bytes:
    return _HEADS[type(message)] + encode_value(message)[1:]


def packed(data: bytes) -> bytes:
    """``data`` compressed where it is long; ``decode`` takes both."""
    return data if len(data) <= PLAIN_BYTES else zlib.compress(data)


def decode(data: bytes | str, most: Callable[[type], int] | None = None) -> network.Message:
    """The message in ``data``, packed or not; raises ProtocolError for anything that is not exactly one.

    ``most`` gives the longest message of a kind. A longer one is refused before its fields are decoded.
    """
    data = _plain(data)
    head, comma = data[:_HEAD_BYTES], cast(Any, "," if isinstance(data, str) else b",")
    cls = _USUAL_HEADS.get(head[: head.find(comma, head.find(comma) + 1)])
    if cls is None:
        unusual = decode_value(MessageHead, data, "message")
        kind = _of_head(unusual.kind)
        cls = _KINDS.get(kind) if isinstance(kind, str) else None
        if cls is None:
            raise ProtocolError(f"unknown kind of message {_short(kind)}: upgrade the older side")
        if cls is not network.Rejected:  # a refusal must reach a side of any version
            check_version(_of_head(unusual.version))
    if most is not None and len(data) > most(cls):
        raise ProtocolError(
            f"a {cls.__name__} of {len(data)} characters is over the limit of {most(cls)}: send a shorter one"
        )
    return decode_value(cls, data, cls.__name__)


def sender_of(data: str) -> str:
    """The replica that a session of any version names; empty where none can be read."""
    with suppress(ProtocolError):
        return decode_value(_SessionHead, data, "session").replica
    return ""


def _of_head(raw: msgspec.Raw) -> object:
    """The value of a field of the head. A long one is not decoded, because no head has one."""
    text = memoryview(raw)
    if len(text) > _HEAD_BYTES:
        return bytes(text[:_HEAD_BYTES]).decode(errors="replace")
    return decode_value(object, bytes(text), "message")


def check_version(version: object) -> None:
    """Accept our protocol version, the one before and the one after; refuse others with what to do.

    The newer one is accepted too, because two sides that are one version apart each receive from the other.
    """
    neighbours = (PROTOCOL_VERSION - 1, PROTOCOL_VERSION, PROTOCOL_VERSION + 1)
    if isinstance(version, bool) or not isinstance(version, int) or version not in neighbours:
        raise ProtocolError(
            f"protocol version {_short(version)} cannot talk to version {PROTOCOL_VERSION}: "
            "upgrade one step at a time, the lighthouse first"
        )


def encode_record(record: Record) -> bytes:
    """The bytes of the membership record as it lies in the store: JSON, compressed when it is long."""
    return packed(b'{"version":%d,%b' % (PROTOCOL_VERSION, encode_value(record)[1:]))


def decode_record(data: bytes) -> Record:
    """The membership record; raises ProtocolError when the store holds something else."""
    text = _plain(data)
    check_version(_of_head(decode_value(MessageHead, text, "record").version))
    return decode_value(Record, text, "Record")


def encode_value(value: object) -> bytes:
    """A value as JSON. Raises ProtocolError for a number that is not finite."""
    cls = type(value)
    try:
        data = msgspec.json.encode(value)
    except UnicodeEncodeError:  # text with half of a character, for instance from a file name
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
        return encode_value(decode_value(cls, text.encode(errors="replace"), cls.__name__))
    if b"null" in data:  # msgspec writes null also for a number that is not finite
        decode_value(cls, data, cls.__name__)
    return data


def decode_value(cls: type[T], data: bytes | str, path: str) -> T:
    """Decode the JSON in ``data`` as ``cls``. A ProtocolError names ``path`` and the wrong field."""
    decoder: msgspec.json.Decoder[T] = _decoder(cls)  # type: ignore[arg-type]
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise ProtocolError(_sentence(path, str(error))) from None
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a JSON message: {error}") from error


def decode_as(cls: type[T], value: object, path: str = "value") -> T:
    """``value`` (parsed JSON) as ``cls``, by the same strict rules."""
    try:
        return decode_value(cls, msgspec.json.encode(value), path)
    except (UnicodeEncodeError, RecursionError) as error:
        raise ProtocolError(f"{path} has text that cannot be sent: {error}") from error


def decode_line(line: bytes, advice: str = "send one JSON object per line") -> dict[str, Any]:
    """Return the JSON object in ``line``. Raises ProtocolError, with ``advice``, for any other line."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"this line is not JSON ({error}): {advice}") from error
    if not isinstance(body, dict):
        raise ProtocolError(f"this line is not a JSON object: {advice}")
    return body


def _plain(data: bytes | str) -> bytes | str:
    """Inflate ``data`` if it is compressed; refuse more than MAX_BYTES, which would fill our memory."""
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is over the limit of {MAX_BYTES}")
    if isinstance(data, str) or data[:1] != _ZLIB:
        return data
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise ProtocolError(f"the compressed data cannot be unpacked: {error}") from error
    if not stream.eof:
        raise ProtocolError(f"the compressed data is cut off, or over the limit of {MAX_BYTES} bytes")
    return plain


def _sentence(path: str, offence: str) -> str:
    """Put a sentence of msgspec into the words of our errors: "Expected `int`, got `str` - at `$.step`"."""
    expected, _, where = offence.rpartition(" - at ") if " - at " in offence else (offence, "", "")
    expected = shortened(printable(expected), 200)  # it may repeat a value
    place = path + where[where.find("$") + 1 :].rstrip("`") if where else path
    if expected.startswith("Object missing"):
        return f"{place}.{expected.split('`')[1]} is missing"
    wanted = expected.replace("Expected", "must be").replace(", got", ", not")
    if expected.endswith("out of range"):
        wanted = "must be a number of 64 bits"
    return f"{place} {_TYPE.sub(lambda name: _WORDS.get(name[1], name[1]), wanted)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
