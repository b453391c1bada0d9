"""The header in front of every chunk, and the notice of an abort: fixed size, checked, pure.

A header says to which exchange of which step of which epoch a chunk belongs, which chunk it is and what it
holds, so bytes of an old round are recognised and never added, and members that disagree about a buffer
find out before they sum. The digest covers the payload and, as its seed, every field of the header.
"""

import json
import struct
from dataclasses import dataclass

import xxhash

from fabric.errors import ProtocolError

_LAYOUT = struct.Struct("<4sBBHHHIIQQQI")
_DIGEST = struct.Struct("<Q")
_MAGIC = b"FTR1"
HEADER_BYTES = _LAYOUT.size + _DIGEST.size

REDUCE, GATHER, ABORT = 1, 2, 3
_PAYLOAD_DIGESTED = 1
MAX_NOTICE_BYTES = 2048
_MAX_WHY_CHARACTERS = 300

Payload = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange, as all its members must see it; ``exchange`` counts the calls within a step.

    ``dtype`` is a code of ``reduce.DTYPE_CODES``, ``length`` the number of elements.
    """

    epoch: int
    step: int
    exchange: int
    world: int
    dtype: int
    length: int

    @property
    def order(self) -> tuple[int, int, int]:
        """Rounds of one ring happen in this order."""
        return (self.epoch, self.step, self.exchange)


@dataclass(frozen=True, slots=True)
class Header:
    """What is said of one chunk; ``source`` is the sender's position, ``size`` the payload's bytes."""

    round: Round
    kind: int
    source: int
    sequence: int
    size: int


def pack(header: Header, payload: Payload, checksum: bool = True) -> bytes:
    """The bytes that go in front of ``payload``; without ``checksum`` they cover the header alone."""
    r = header.round
    fields = _LAYOUT.pack(
        _MAGIC,
        header.kind,
        r.dtype,
        header.source,
        r.world,
        _PAYLOAD_DIGESTED if checksum else 0,
        r.exchange,
        header.sequence,
        r.epoch,
        r.step,
        r.length,
        header.size,
    )
    return fields + _DIGEST.pack(_digest(fields, payload if checksum else b""))


def unpack(data: Payload) -> Header:
    """The header in ``data`` (HEADER_BYTES), not yet verified; raises ProtocolError if it is none."""
    magic, kind, dtype, source, world, flags, exchange, sequence, epoch, step, length, size = (
        _LAYOUT.unpack_from(data)
    )
    if magic != _MAGIC or kind not in (REDUCE, GATHER, ABORT) or flags not in (0, 1):
        raise ProtocolError(
            "the bytes on the ring are no chunk header: the stream is corrupt or of another release"
        )
    return Header(Round(epoch, step, exchange, world, dtype, length), kind, source, sequence, size)


def intact(data: Payload, payload: Payload) -> bool:
    """Whether the header in ``data`` and its ``payload`` are what the sender digested."""
    fields = bytes(data[: _LAYOUT.size])
    digested = _LAYOUT.unpack(fields)[5] == _PAYLOAD_DIGESTED
    (digest,) = _DIGEST.unpack_from(data, _LAYOUT.size)
    return bool(digest == _digest(fields, payload if digested else b""))


def notice(epoch: int, source: int, why: str, about: str) -> bytes:
    """The bytes that tell the previous member that ``epoch`` is aborted, why, and about whom."""
    text = json.dumps([about, why[:_MAX_WHY_CHARACTERS]]).encode()
    if len(text) > MAX_NOTICE_BYTES:
        text = json.dumps(["", why[:20]]).encode()
    header = Header(Round(epoch, 0, 0, 0, 0, 0), ABORT, source, 0, len(text))
    return pack(header, text) + text


def read_notice(data: Payload) -> tuple[str, str] | None:
    """(why, about) once ``data`` holds a whole notice, None while it may become one.

    Raises ProtocolError for anything else.
    """
    if len(data) < HEADER_BYTES:
        return None
    header = unpack(data)
    if header.kind != ABORT or header.size > MAX_NOTICE_BYTES:
        raise ProtocolError("the bytes on the ring's way back are no notice")
    text = bytes(data[HEADER_BYTES : HEADER_BYTES + header.size])
    if len(text) < header.size:
        return None
    if not intact(data, text):
        raise ProtocolError("a notice on the ring's way back is corrupt")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a notice on the ring's way back is not JSON") from error
    match value:
        case [str(about), str(why)]:
            return "".join(c if c.isprintable() else "?" for c in why[:_MAX_WHY_CHARACTERS]), about
    raise ProtocolError("a notice on the ring's way back does not name its cause")


def _digest(fields: bytes, payload: Payload) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(fields))
