"""The header in front of every chunk, and what a member says besides: fixed size, checked, pure.

A header says to which exchange of which step of which epoch a chunk belongs, which chunk it is and what it
holds, so bytes of an old round are recognised and never added, and members that disagree about a buffer
find out before they sum. It carries the digest of its payload and is covered by a digest of its own. The
digest of a payload depends on nothing else, so a result that travels on unchanged keeps the one that its
author made: memory that goes bad on the way is noticed, and nobody digests it again.
"""

import json
import struct
from dataclasses import dataclass

import xxhash

from fabric.errors import ProtocolError

_LAYOUT = struct.Struct("<4sBBHHHIIQQQIQ")
_DIGEST = struct.Struct("<Q")
_MAGIC = b"FTR4"
HEADER_BYTES = _LAYOUT.size + _DIGEST.size

# Forward: a partial result, a result, memory that later chunks lie in. Backward: an abort, all was read.
REDUCE, GATHER, ABORT, SEGMENT, READ = 1, 2, 3, 4, 5
_PAYLOAD_DIGESTED, _RESULT_IS_STABLE = 1, 2
MAX_NOTICE_BYTES = 2048
_MAX_WHY_CHARACTERS = 300

Payload = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ExchangeSpec:
    """One exchange, as all its members must see it; ``exchange`` counts the calls within a step.

    ``dtype`` is a code of ``reduce.DTYPE_CODES``, ``length`` the number of elements, ``operation`` a code of
    ``reduction.OPERATION_CODES``. ``result_is_stable`` is what ``DataPlane.all_reduce`` was told.
    """

    epoch: int
    step: int
    exchange: int
    world: int
    dtype: int
    length: int
    operation: int = 0
    result_is_stable: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """Rounds of one ring happen in this order."""
        return (self.epoch, self.step, self.exchange)


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What is said of one chunk; ``source`` is the sender's position, ``size`` the payload's bytes."""

    spec: ExchangeSpec
    kind: int
    source: int
    sequence: int
    size: int


def digest(payload: Payload) -> int:
    """xxh3_64 of a payload."""
    return xxhash.xxh3_64_intdigest(payload)


def pack(header: ChunkHeader, payload_digest: int | None = None) -> bytes:
    """The bytes that go in front of the payload; without its digest they cover the header alone."""
    r = header.spec
    fields = _LAYOUT.pack(
        _MAGIC,
        header.kind,
        r.dtype,
        header.source,
        r.world,
        _PAYLOAD_DIGESTED * (payload_digest is not None)
        | _RESULT_IS_STABLE * r.result_is_stable
        | r.operation << 8,
        r.exchange,
        header.sequence,
        r.epoch,
        r.step,
        r.length,
        header.size,
        payload_digest or 0,
    )
    return fields + _DIGEST.pack(digest(fields))


def unpack(data: Payload) -> tuple[ChunkHeader, int | None]:
    """The header in ``data`` (HEADER_BYTES) and its payload's digest, None where the sender made none.

    Raises ProtocolError if it is no header, or an altered one.
    """
    magic, kind, dtype, source, world, flags, exchange, sequence, epoch, step, length, size, expected = (
        _LAYOUT.unpack_from(data)
    )
    (own,) = _DIGEST.unpack_from(data, _LAYOUT.size)
    if magic != _MAGIC or own != digest(bytes(data[: _LAYOUT.size])):
        raise ProtocolError(
            "the bytes on the ring are no chunk header: the stream is corrupt or of another release"
        )
    spec = ExchangeSpec(
        epoch, step, exchange, world, dtype, length, flags >> 8, bool(flags & _RESULT_IS_STABLE)
    )
    return ChunkHeader(spec, kind, source, sequence, size), expected if flags & _PAYLOAD_DIGESTED else None


def notice(epoch: int, source: int, why: str, about: str) -> bytes:
    """The bytes that tell the previous member that ``epoch`` is aborted, why, and about whom."""
    text = json.dumps([about, why[:_MAX_WHY_CHARACTERS]]).encode()
    if len(text) > MAX_NOTICE_BYTES:
        text = json.dumps(["", why[:20]]).encode()
    header = ChunkHeader(ExchangeSpec(epoch, 0, 0, 0, 0, 0), ABORT, source, 0, len(text))
    return pack(header, digest(text)) + text


def all_read(spec: ExchangeSpec, source: int, end: bool) -> bytes:
    """The bytes that tell those before it that the member at position ``source`` reads their memory no more
    in this exchange; ``end`` says that no member behind it can see that memory."""
    return pack(ChunkHeader(spec, READ, source, int(end), 0))


def take_back(data: bytearray) -> tuple[str, str] | ChunkHeader | None:
    """Take one whole message off the front of what came back from the next member.

    Returns (why, about) of an abort, the Header of the word that somebody has read everything, or None while
    more must come. Raises ProtocolError for anything else.
    """
    if len(data) < HEADER_BYTES:
        return None
    header, expected = unpack(data)
    if header.kind not in (ABORT, READ) or header.size > MAX_NOTICE_BYTES:
        raise ProtocolError("the bytes on the ring's way back are no notice")
    end = HEADER_BYTES + header.size
    if len(data) < end:
        return None
    text = bytes(data[HEADER_BYTES:end])
    del data[:end]
    if header.kind == READ:
        return header
    if expected != digest(text):
        raise ProtocolError("a notice on the ring's way back is corrupt")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a notice on the ring's way back is not JSON") from error
    match value:
        case [str(about), str(why)]:
            return "".join(c if c.isprintable() else "?" for c in why[:_MAX_WHY_CHARACTERS]), about
    raise ProtocolError("a notice on the ring's way back does not name its cause")
