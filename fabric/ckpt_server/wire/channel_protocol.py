"""The channel between a trainer and its checkpoint server: JSON lines over a Unix socket.

Each side sends one JSON object per line; a request gets exactly one response, and a file descriptor may
travel with a response. Both sides live on one machine under one user. Still, every line's length is checked
before the line is kept.
"""

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from fabric.errors import ProtocolError
from fabric.model import Int64

SOCKET_NAME = "ckpt.sock"
# How long a reader on the same host and the server wait for each other's first line.
LOCAL_ASK_S = 5.0
LOCK_NAME = "ckpt.lock"
LOG_NAME = "ckpt-server.log"
# For the server's /debug paths: the trainer's socket, and the file for its stacks when the trainer is stuck.
DEBUG_SOCKET_NAME = "trainer.sock"
STACKS_NAME = "trainer.stacks"
# A signal that no library known to us uses, and that the kernel never sends.
STACKS_SIGNAL = signal.SIGRTMIN + 7

MAX_LINE_BYTES = 64 * 1024 * 1024
# Lines that the server reads before the trainer has attached are short.
MAX_FIRST_LINE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class DurableJob:
    """A durable checkpoint to write, as the trainer orders it and as its writer gets it.

    The server adds ``job`` and ``replica``, and ``made``: an earlier try has made the job's folder, which
    must still be there.
    """

    url: str  # the storage that all jobs share
    job: str
    replica: str
    incarnation: Int64
    keep: Int64 = 3  # complete checkpoints to keep
    patience_s: float = 600.0  # how long rank 0 waits for the other ranks' parts
    required: bool = False  # the job's folder must hold an earlier checkpoint
    made: bool = False
    urgent: bool = False  # the trainer will be killed soon: end an earlier writer, at full priority
    generation: Int64 = 0  # with ``step``: the held snapshot to write
    step: Int64 = -1


class LineBuffer:
    """Splits bytes into lines; keeps at most ``limit_bytes`` of a line that has not ended."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._data = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._data += data

    def next_line(self) -> bytes | None:
        """Return the next line without its newline, or None. Raises ProtocolError for a line over the
        limit."""
        end = self._data.find(b"\n", self._searched)
        self._searched = len(self._data) if end < 0 else 0
        if (len(self._data) if end < 0 else end) > self.limit_bytes:
            raise ProtocolError(f"a line is over the limit of {self.limit_bytes} bytes: send less at once")
        if end < 0:
            return None
        line = bytes(memoryview(self._data)[:end])
        del self._data[: end + 1]
        return line


def encode_line(body: Mapping[str, object]) -> bytes:
    """Encode a JSON object as a line. Raises ProtocolError for values that JSON lacks or a long line."""
    try:
        line = json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"this cannot be sent as JSON ({error}): use plain finite values") from error
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(f"a line of {len(line)} bytes is over the limit of {MAX_LINE_BYTES}: send less")
    return line


def local_socket_name(place: str) -> str:
    """Return the name of the server's abstract unix socket for local readers; ``place``: its host:port."""
    return f"\0fabric-ckpt-{xxhash.xxh3_128_hexdigest(place.encode())}"
