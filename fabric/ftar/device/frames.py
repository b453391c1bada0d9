"""The frames that members of a device ring send to each other: fixed, checked, pure.

One ``ChunkFrame`` goes forward per piece. Over TCP the piece's bytes follow it; with shared device memory the
next member reads them there. Before the first chunk of an epoch, neighbours on one host exchange an offer of
shared memory and the answer to it. Three kinds of frame go backward: answers, credits (the number of slots
that were read) and the notice of an abort.
"""

import base64
import json
import struct
from dataclasses import dataclass, fields, replace

import xxhash

from fabric.errors import ProtocolError
from fabric.ftar.device.device_api import SharedMemoryHandle

_CHUNK = struct.Struct("<4sBBBBHHIIQQQIQ")
_DIGEST = struct.Struct("<Q")
_CHUNK_MAGIC = b"FDC1"
CHUNK_BYTES = _CHUNK.size + _DIGEST.size

_OFFER = struct.Struct("<4sI")
_OFFER_MAGIC = b"FDO1"
OFFER_HEAD_BYTES = _OFFER.size
# A handle has some hundred bytes, more where the allocator's memory can grow.
MAX_OFFER_BYTES = 8192

_BACK = struct.Struct("<4sBI")
_BACK_MAGIC = b"FDB1"
BACK_BYTES = _BACK.size + _DIGEST.size
ANSWER, CREDIT, ABORT = 1, 2, 3
MAX_REASON_BYTES = 2048
_MAX_WHY_CHARACTERS = 300

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """The header of one piece of one exchange; both ends of a link must agree on it.

    ``source`` is the sender's position, ``dtype`` and ``operation`` are codes, ``length`` the elements of the
    whole buffer, ``size`` the bytes of this piece, ``digest`` that of those bytes (0 where there is none).
    """

    epoch: int
    step: int
    exchange: int
    world: int
    source: int
    dtype: int
    operation: int
    length: int
    gather: bool
    sequence: int
    size: int
    digested: bool = False
    digest: int = 0

    @property
    def identity(self) -> tuple[int | bool, ...]:
        """Everything but the digest."""
        return tuple(getattr(self, f.name) for f in fields(self)[:-2])


def digest(payload: Bytes) -> int:
    """xxh3_64."""
    return xxhash.xxh3_64_intdigest(payload)


def with_digest(chunk: ChunkFrame, payload: Bytes) -> ChunkFrame:
    """Return ``chunk`` with the digest of its bytes."""
    return replace(chunk, digested=True, digest=digest(payload))


def pack(chunk: ChunkFrame) -> bytes:
    """Return the CHUNK_BYTES in front of a piece."""
    c = chunk
    packed = _CHUNK.pack(
        _CHUNK_MAGIC, c.gather, c.dtype, c.operation, c.digested, c.source, c.world, c.exchange, c.sequence,
        c.epoch, c.step, c.length, c.size, c.digest,
    )  # fmt: skip
    return packed + _DIGEST.pack(digest(packed))


def unpack(data: Bytes) -> ChunkFrame:
    """Return the chunk's frame in ``data`` (CHUNK_BYTES); raises ProtocolError if it is none, or was
    altered."""
    (
        magic,
        gather,
        dtype,
        operation,
        digested,
        source,
        world,
        exchange,
        sequence,
        epoch,
        step,
        length,
        size,
        own,
    ) = _CHUNK.unpack_from(data)
    if magic != _CHUNK_MAGIC or _DIGEST.unpack_from(data, _CHUNK.size)[0] != digest(
        bytes(data[: _CHUNK.size])
    ):
        raise ProtocolError(
            "the bytes on the ring are no chunk of a device ring: the stream is corrupt, of another release, "
            "or that member's parameters are not on a GPU"
        )
    return ChunkFrame(
        epoch, step, exchange, world, source, dtype, operation, length, bool(gather), sequence, size,
        bool(digested), own,
    )  # fmt: skip


def offer(handle: SharedMemoryHandle | None) -> bytes:
    """Return the bytes that offer shared memory to the next member, or say that there is none."""
    body = b"" if handle is None else _encode(handle)
    if len(body) > MAX_OFFER_BYTES:
        body = b""
    return _OFFER.pack(_OFFER_MAGIC, len(body)) + body


def offer_size(head: Bytes) -> int:
    """Return how many bytes follow the OFFER_HEAD_BYTES in ``head``; raises ProtocolError."""
    magic, size = _OFFER.unpack_from(head)
    if magic != _OFFER_MAGIC or size > MAX_OFFER_BYTES:
        raise ProtocolError(
            "the bytes on the ring are no offer of device memory: do all members run on a GPU?"
        )
    return int(size)


def read_offer(body: Bytes) -> SharedMemoryHandle | None:
    """Return the handle in an offer's body; raises ProtocolError."""
    if not body:
        return None
    try:
        offered = json.loads(bytes(body))
        values = {}
        for field in fields(SharedMemoryHandle):
            value = offered.pop(field.name)
            if field.type is bytes:
                value = base64.b64decode(value, validate=True)
            if type(value) is not field.type or (type(value) is int and not 0 <= value < 2**62):
                raise ValueError(field.name)
            values[field.name] = value
        if offered:
            raise ValueError(min(offered))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError("an offer of device memory has not the fields that it must have") from error
    return SharedMemoryHandle(**values)


def back(kind: int, value: int) -> bytes:
    """Return the bytes of an answer (1 or 0) or a credit (slots) to the previous member."""
    packed = _BACK.pack(_BACK_MAGIC, kind, value)
    return packed + _DIGEST.pack(digest(packed))


def notice(why: str, about: str) -> bytes:
    """Return the bytes that tell the previous member of an abort, its reason and the peer it is about."""
    text = json.dumps([about, why[:_MAX_WHY_CHARACTERS]]).encode()
    if len(text) > MAX_REASON_BYTES:
        text = json.dumps(["", why[:20]]).encode()
    return back(ABORT, len(text)) + text


@dataclass(frozen=True, slots=True)
class BackwardFrame:
    """One frame from the next member: a ``value`` of ``kind``, or the reason and the peer of an abort."""

    kind: int
    value: int
    why: str = ""
    about: str = ""


def take_back(data: bytearray) -> BackwardFrame | None:
    """Take one complete frame off the front of the bytes that came back.

    None while more must come. Raises ProtocolError.
    """
    if len(data) < BACK_BYTES:
        return None
    magic, kind, value = _BACK.unpack_from(data)
    if magic != _BACK_MAGIC or _DIGEST.unpack_from(data, _BACK.size)[0] != digest(bytes(data[: _BACK.size])):
        raise ProtocolError("the bytes on the ring's way back are of no device ring")
    if kind not in (ANSWER, CREDIT, ABORT) or (kind == ABORT and value > MAX_REASON_BYTES):
        raise ProtocolError("a frame on the ring's way back is of no known kind")
    end = BACK_BYTES + (value if kind == ABORT else 0)
    if len(data) < end:
        return None
    text = bytes(data[BACK_BYTES:end])
    del data[:end]
    if kind != ABORT:
        return BackwardFrame(int(kind), int(value))
    try:
        notice_body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a notice on the ring's way back is not JSON") from error
    match notice_body:
        case [str(about), str(why)]:
            printable = "".join(c if c.isprintable() else "?" for c in why[:_MAX_WHY_CHARACTERS])
            return BackwardFrame(ABORT, 0, printable, about)
    raise ProtocolError("a notice on the ring's way back does not name its cause")


def _encode(handle: SharedMemoryHandle) -> bytes:
    values = {f.name: getattr(handle, f.name) for f in fields(SharedMemoryHandle)}
    return json.dumps(
        {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in values.items()}
    ).encode()
