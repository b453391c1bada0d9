"""The offer of shared device memory to the next member, before the first chunk of an epoch: checked, pure.

With shared device memory the next member reads the chunks there. Over TCP their bytes follow the headers.
"""

import base64
import json
import struct
from dataclasses import fields

from fabric.errors import ProtocolError
from fabric.ftar.device.device_api import SharedMemoryHandle

_OFFER = struct.Struct("<4sI")
_OFFER_MAGIC = b"FDO1"
OFFER_HEAD_BYTES = _OFFER.size
# A handle has some hundred bytes, more where the allocator's memory can grow.
MAX_OFFER_BYTES = 8192

Bytes = bytes | bytearray | memoryview


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


def _encode(handle: SharedMemoryHandle) -> bytes:
    values = {f.name: getattr(handle, f.name) for f in fields(SharedMemoryHandle)}
    return json.dumps(
        {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in values.items()}
    ).encode()
