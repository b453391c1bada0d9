"""The header in front of every chunk, and the other messages between members: fixed size, checked, pure.

A header names the epoch, step and exchange of a chunk, its number and its content. So a member recognises
bytes of an old round and never adds them, and members that disagree about a buffer notice it before they sum.
A header carries a digest of its own. The payload's digest stands in the header too, or behind the payload
where the ring in host memory sends bytes. It covers the payload alone. So a result that travels on unchanged
keeps the digest of the member that computed it, and corruption on the way is noticed.

Rings in host memory and device rings send the same headers, with kinds of their own for chunks.
"""

import json
import struct

import msgspec
import xxhash

from fabric.errors import Mismatch, ProtocolError
from fabric.model import printable, shortened

_LAYOUT = struct.Struct("<4sBBHHHIIQQQIQ")
_DIGEST = struct.Struct("<Q")
_MAGIC = b"FTR7"
HEADER_BYTES = _LAYOUT.size + _DIGEST.size

# Chunks that go forward: REDUCE has a partial result, GATHER a result, SEGMENT announces memory of later
# chunks. Chunks that go backward: ABORT, and READ ("all memory was read").
REDUCE, GATHER, ABORT, SEGMENT, READ = 1, 2, 3, 4, 5
# A NOTE goes in front of a GATHER chunk, and goes on with it.
NOTE = 6
# The chunks of a device ring go in another order; over TCP each connection of a link carries its part. Two
# more messages go backward: ANSWER says whether the member can read the offered memory, CREDIT says how many
# slots it has read.
ANSWER, CREDIT, DEVICE_REDUCE, DEVICE_GATHER = 8, 9, 10, 11
_PAYLOAD_DIGESTED, _RESULT_IS_STABLE, _DIGEST_FOLLOWS = 1, 2, 4
_FORM_SHIFT, _FORM_MASK = 4, 7
FOLLOWS = -1  # in place of a payload's digest: it stands behind the payload
MAX_NOTICE_BYTES = 2048
_MAX_WHY_CHARACTERS = 300

Payload = bytes | bytearray | memoryview


class ExchangeSpec(msgspec.Struct, frozen=True, gc=False):
    """One exchange; all its members must agree on every field."""

    epoch: int
    step: int
    exchange: int  # number of the exchange within its step
    world: int  # number of members
    dtype: int  # a code of ``ring_schedule.DTYPE_CODES``
    length: int  # elements of the buffer
    operation: int = 0  # a code of ``reduce_ops.OPERATION_CODES``
    result_is_stable: bool = False  # as in ``DataPlane.all_reduce``
    form: int = 0  # a code of ``reduce_ops.EXCHANGE_FORMS``

    @property
    def order(self) -> tuple[int, int, int]:
        """The key by which the exchanges of one ring are ordered."""
        return (self.epoch, self.step, self.exchange)


class ChunkHeader(msgspec.Struct, frozen=True, gc=False):
    """The header of one chunk."""

    spec: ExchangeSpec
    kind: int  # the chunk's kind, such as REDUCE
    source: int  # the sender's position
    sequence: int  # number of the chunk in its exchange
    size: int  # number of bytes of the payload


def digest(payload: Payload) -> int:
    """Return xxh3_64 of a payload."""
    return xxhash.xxh3_64_intdigest(payload)


def pack(header: ChunkHeader, payload_digest: int | None = None) -> bytes:
    """Return the bytes in front of the payload; without ``payload_digest`` only the header is checked."""
    r, follows = header.spec, payload_digest == FOLLOWS
    fields = _LAYOUT.pack(
        _MAGIC,
        header.kind,
        r.dtype,
        header.source,
        r.world,
        (_DIGEST_FOLLOWS if follows else _PAYLOAD_DIGESTED * (payload_digest is not None))
        | _RESULT_IS_STABLE * r.result_is_stable
        | r.form << _FORM_SHIFT
        | r.operation << 8,
        r.exchange,
        header.sequence,
        r.epoch,
        r.step,
        r.length,
        header.size,
        0 if follows else payload_digest or 0,
    )
    return fields + _DIGEST.pack(digest(fields))


def unpack(data: Payload) -> tuple[ChunkHeader, int | None]:
    """Return the header in ``data`` (HEADER_BYTES) and its payload's digest: FOLLOWS, or None for none.

    Raises ProtocolError for other bytes, or an altered header.
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
        epoch,
        step,
        exchange,
        world,
        dtype,
        length,
        flags >> 8,
        bool(flags & _RESULT_IS_STABLE),
        flags >> _FORM_SHIFT & _FORM_MASK,
    )
    payload_digest = expected if flags & _PAYLOAD_DIGESTED else FOLLOWS if flags & _DIGEST_FOLLOWS else None
    return ChunkHeader(spec, kind, source, sequence, size), payload_digest


def check_expected(got: ChunkHeader, expected: ChunkHeader) -> None:
    """Raise ProtocolError, which says how they differ, unless ``got`` is the expected header."""
    if got == expected:
        return
    if got.spec.order != expected.spec.order:
        raise ProtocolError(
            f"it is in exchange {got.spec.exchange} of step {got.spec.step} of epoch {got.spec.epoch}, "
            f"we are in exchange {expected.spec.exchange} of step {expected.spec.step} of epoch "
            f"{expected.spec.epoch}"
        )
    ours, theirs = expected.spec, got.spec
    if (theirs.length, theirs.dtype, theirs.operation) != (ours.length, ours.dtype, ours.operation):
        raise Mismatch(
            f"it reduces {theirs.length} elements of type {theirs.dtype} by operation {theirs.operation}, we "
            f"{ours.length} of type {ours.dtype} by operation {ours.operation}: the replicas' models differ"
        )
    if theirs.form != ours.form:
        raise Mismatch(
            f"its elements travel in form {theirs.form}, ours in form {ours.form}: FABRIC_EXCHANGE differs"
        )
    raise Mismatch(
        f"its chunk {got.sequence} of {got.size} bytes (position {got.source} of {got.spec.world}) "
        f"came where chunk {expected.sequence} of {expected.size} bytes (position {expected.source} "
        f"of {expected.spec.world}) was due: chunk sizes or rings differ"
    )


def notice(epoch: int, source: int, why: str, about: str) -> bytes:
    """Return the bytes that tell the previous member of an abort, its reason and the peer it is about."""
    text = json.dumps([about, shortened(why, _MAX_WHY_CHARACTERS)]).encode()
    if len(text) > MAX_NOTICE_BYTES:
        text = json.dumps(["", why[:20]]).encode()
    header = ChunkHeader(ExchangeSpec(epoch, 0, 0, 0, 0, 0), ABORT, source, 0, len(text))
    return pack(header, digest(text)) + text


def all_read(spec: ExchangeSpec, source: int, end: bool) -> bytes:
    """Return the bytes by which the member at ``source`` says that it has read all memory of this exchange.

    The bytes go to the members before it. ``end``: no member after it can read that memory.
    """
    return pack(ChunkHeader(spec, READ, source, int(end), 0))


def to_previous(kind: int, value: int) -> bytes:
    """Return the bytes of an ANSWER (1 or 0) or a CREDIT (slots) to the previous member."""
    return pack(ChunkHeader(ExchangeSpec(0, 0, 0, 0, 0, 0), kind, 0, value, 0))


def take_back(data: bytearray, *kinds: int) -> tuple[str, str] | ChunkHeader | None:
    """Take one complete message off the front of the bytes that came back from the next member.

    Returns (why, about) of an abort, the header of a message of one of ``kinds``, or None while more must
    come. Raises ProtocolError for any other bytes.
    """
    if len(data) < HEADER_BYTES:
        return None
    header, expected = unpack(data)
    if header.kind not in (ABORT, *kinds) or header.size > MAX_NOTICE_BYTES:
        raise ProtocolError("the bytes on the ring's way back are no notice")
    end = HEADER_BYTES + header.size
    if len(data) < end:
        return None
    text = bytes(data[HEADER_BYTES:end])
    del data[:end]
    if header.kind != ABORT:
        return header
    if expected != digest(text):
        raise ProtocolError("a notice on the ring's way back is corrupt")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a notice on the ring's way back is not JSON") from error
    match value:
        case [str(about), str(why)]:
            return printable(why[:_MAX_WHY_CHARACTERS]), about
    raise ProtocolError("a notice on the ring's way back does not name its cause")
