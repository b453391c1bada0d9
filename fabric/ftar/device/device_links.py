"""The two sockets of one epoch's device ring, the messages that come back on them, and shared device memory.

The link of neighbours on one host is a unix socket. There the sender shares device memory, and the receiver
reads the chunks from it if it can open it. Then the socket carries the chunks' headers, and the receiver
returns a credit for every slot that it has read. All other links carry the chunks' bytes.
"""

import base64
import json
import socket
import struct
from dataclasses import fields

import torch

from fabric.errors import ProtocolError, RoundAborted
from fabric.ftar.chunk_headers import ANSWER, CREDIT, to_previous
from fabric.ftar.device.device_api import Device, SharedMemoryHandle
from fabric.ftar.epochs import EpochLinks, is_shared, lost
from fabric.ftar.plane import Ring

_OFFER = struct.Struct("<4sI")
_OFFER_MAGIC = b"FDO1"
OFFER_HEAD_BYTES = _OFFER.size
# A handle has some hundred bytes, more where the allocator's memory can grow.
MAX_OFFER_BYTES = 8192

Bytes = bytes | bytearray | memoryview


def offer(handle: SharedMemoryHandle | None) -> bytes:
    """Return the bytes that offer shared memory to the next member, or say that there is none.

    With shared device memory the next member reads the chunks there. Over TCP their bytes follow the headers.
    """
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


class DeviceLinks(EpochLinks):
    """Links of one epoch; ``shares`` says whether device memory may be shared where that is possible."""

    def __init__(
        self,
        ring: Ring,
        next_socket: socket.socket | None,
        previous_socket: socket.socket | None,
        shares: bool = False,
    ) -> None:
        super().__init__(ring, next_socket, previous_socket)
        self.offers = shares and is_shared(next_socket)
        self.expects_offer = shares and is_shared(previous_socket)
        # ``outbox``: memory for the next member to read, None for TCP. ``accepted``: whether the next member
        # can read this memory, None before its answer.
        self.outbox: torch.Tensor | None = None
        self.accepted: bool | None = None if self.offers else False
        self.inbox: torch.Tensor | None = None
        self.credits = 0

    def make_offer(self, device: Device, nbytes: int) -> bytes:
        """Allocate the outbox; return the bytes that offer it."""
        self.offers = False
        shared = device.share(nbytes)
        if shared is None:
            return offer(None)
        self.outbox, handle = shared
        return offer(handle)

    def take_offer(self, body: bytes | bytearray, device: Device) -> None:
        """Open the memory of an offer, and tell the previous member whether that worked. Raises
        ProtocolError."""
        self.expects_offer = False
        handle = read_offer(body)
        self.inbox = None if handle is None else device.open(handle)
        self.send_back(to_previous(ANSWER, int(self.inbox is not None)))

    def send_back(self, frame: bytes) -> None:
        """Send a small frame to the previous member. Raises RoundAborted where not all of it can be sent."""
        with self._lock:
            self.check()
            assert self.previous is not None
            try:
                # Slots bound the credits, so the socket's buffer has room while the link works.
                sent = self.previous.send(frame)
            except OSError as error:
                raise lost(self.ring.previous, error) from error
            if sent != len(frame):
                raise RoundAborted(f"the ring link to {self.ring.previous} does not take answers", "")

    def hear_back(self) -> None:
        """Read answers and credits from the next member. Raises RoundAborted at a notice or the end."""
        with self.reading_back() as back:
            while (message := self.take_back(back, ANSWER, CREDIT)) is not None:
                if message.kind == CREDIT:
                    self.credits += message.sequence
                    continue
                self.accepted = bool(message.sequence) and self.outbox is not None
                if not self.accepted:
                    self.outbox = None
