"""The channel between a trainer and its checkpoint server: JSON lines over a Unix socket.

Each side sends one JSON object per line; a request gets exactly one response, and a file descriptor may
travel with a response. Both sides live on one machine under one user. Still, every line's length is checked
before the line is kept.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

import xxhash

from fabric.errors import ProtocolError, Refused, ServerLost
from fabric.model import Int64, Value
from fabric.protocol.messages.wire import decode_line
from fabric.runtime.private_folder import check_peer

SOCKET_NAME = "ckpt.sock"
# How long a reader on the same host and the server wait for each other's first line.
LOCAL_ASK_S = 5.0
LOCK_NAME = "ckpt.lock"
START_LOCK_NAME = "ckpt-start.lock"
LOG_NAME = "ckpt-server.log"
# For the server's /debug paths: the trainer's socket, and the file for its stacks when the trainer is stuck.
DEBUG_SOCKET_NAME = "trainer.sock"
STACKS_NAME = "trainer.stacks"
# A signal that no library known to us uses, and that the kernel never sends.
STACKS_SIGNAL = signal.SIGRTMIN + 7

MAX_LINE_BYTES = 64 * 1024 * 1024
# Lines that the server reads before the trainer has attached are short.
MAX_FIRST_LINE_BYTES = 64 * 1024


class DurableJob(Value):
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


# A client's end of a socket of the checkpoint server: one request at a time, one answer each.
#
# A stopped server has not ended, so it may still answer. When an answer does not come in time, the server
# *owes* it. Until the owed answer arrives, the channel refuses every other request at once, so that the
# trainer waits for a stopped server only once. The channel discards the late answer and takes requests
# again.


_RECEIVE_BYTES = 65536
_MOST_DESCRIPTORS = 4
_SIGN = b"."


class RequestChannel:
    """A connected channel to ``name``. One thread at a time may call it; any thread may read ``hangs``."""

    def __init__(self, address: str, name: str, timeout_s: float) -> None:
        self._name = name
        self._lines = LineBuffer(MAX_LINE_BYTES)
        self._owed: tuple[str, float] | None = None  # the unanswered operation, and the time of its request
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(address)
            # Check before the first request: another user may listen there.
            check_peer(self._socket, f"the socket of {name}")
        except BaseException:
            self._socket.close()
            raise

    @property
    def hangs(self) -> bool:
        """Whether the server has a request that it did not answer in time."""
        return self._owed is not None

    def ask(self, body: Mapping[str, object], timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        """Return the answer and the descriptors sent with it. Raises Refused with the server's sentence, and
        ServerLost without an answer; ``is_open`` then tells whether the channel can still be used."""
        operation = str(body.get("op"))
        self.settle()
        if self._owed is not None:
            owed, since = self._owed
            raise ServerLost(
                f"{self._name} has not answered {owed!r} for {time.monotonic() - since:.0f} s: look whether"
                " it is stopped and continue it, or end it, so that another one is started"
            )
        request, began = encode_line(body), time.monotonic()
        descriptors: list[int] = []
        try:
            self._socket.settimeout(timeout_s)
            try:
                self._socket.sendall(request)
            except TimeoutError:
                self.close()  # the sender cannot know how much of the request has arrived
                raise
            answer = self._receive(descriptors, began + timeout_s)
        except TimeoutError as error:
            close_all(descriptors)
            if self.is_open:
                self._owed = operation, began
            raise self._lost(operation, f"no answer within {timeout_s:g} s") from error
        except (OSError, ProtocolError) as error:
            close_all(descriptors)
            self.close()
            raise self._lost(operation, str(error)) from error
        if answer.get("ok") is not True:
            close_all(descriptors)
            raise Refused(str(answer.get("error", f"{self._name} refused without a reason")))
        return answer, descriptors

    def settle(self) -> None:
        """Read the owed answer if it has arrived; never wait."""
        if self._owed is None:
            return
        descriptors: list[int] = []
        try:
            while self._lines.next_line() is None:
                self._socket.setblocking(False)
                self._read(descriptors)
            self._owed = None
        except BlockingIOError:
            pass
        except (OSError, ProtocolError):
            self.close()
        finally:
            close_all(descriptors)

    def send_sign(self) -> bool:
        """Send a byte that asks for nothing; return whether the server still has its end."""
        try:
            self._socket.send(_SIGN, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:  # the server is too busy to read, so it has not ended the connection
            return True
        except OSError:
            return False
        return True

    @property
    def is_open(self) -> bool:
        """Whether the kernel still has the server's end of the channel."""
        if self._socket.fileno() < 0:
            return False
        poll = select.poll()
        # The server sends only answers: unrequested input is the channel's end, or an earlier answer.
        poll.register(self._socket, select.POLLHUP | (0 if self.hangs else select.POLLIN))
        return not poll.poll(0)

    def close(self) -> None:
        """Close the channel and forget the owed answer."""
        self._owed = None
        self._socket.close()

    def _receive(self, descriptors: list[int], deadline: float) -> dict[str, Any]:
        while (line := self._lines.next_line()) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            self._read(descriptors)
        return decode_line(line)

    def _read(self, descriptors: list[int]) -> None:
        data, received, _, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, _MOST_DESCRIPTORS)
        descriptors += received
        if not data:
            raise ConnectionResetError("it has closed the channel")
        self._lines.feed(data)

    def _lost(self, operation: str, why: str) -> ServerLost:
        return ServerLost(f"{self._name} did not answer {operation!r} ({why}): attach again, or see its log")


def close_all(descriptors: list[int]) -> None:
    """Close the descriptors, and empty the list."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    descriptors.clear()
