"""The trainer's end of the channel to its checkpoint server: one request at a time, one answer each.

A stopped server has not ended, so it may still answer. When an answer does not come in time, the server
*owes* it. Until the owed answer arrives, the channel refuses every other request at once, so that the trainer
waits for a stopped server only once. The channel discards the late answer and takes requests again.
"""

import contextlib
import os
import select
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabric.ckpt_server.wire.channel_protocol import (
    MAX_LINE_BYTES,
    LineBuffer,
    decode_line,
    encode_line,
    socket_path,
)
from fabric.errors import ProtocolError, Refused, ServerLost
from fabric.runtime.private_folder import check_peer

_RECEIVE_BYTES = 65536
_MOST_DESCRIPTORS = 4


class RequestChannel:
    """A connected channel to ``name``. One thread at a time may call it; any thread may read ``hangs``."""

    def __init__(self, run_dir: Path, name: str, timeout_s: float) -> None:
        self._name = name
        self._lines = LineBuffer(MAX_LINE_BYTES)
        self._owed: tuple[str, float] | None = None  # the unanswered operation, and the time of its request
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout_s)
            with socket_path(run_dir) as path:
                self._socket.connect(path)
            # Check before the first request: another user may have made the folder, and listen in it.
            check_peer(self._socket, f"the socket of {name} in {run_dir}")
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
            self._send(request, timeout_s)
            answer = self._receive(descriptors, began + timeout_s)
        except TimeoutError as error:
            _close_all(descriptors)
            if self.is_open:
                self._owed = operation, began
            raise self._lost(operation, f"no answer within {timeout_s:g} s") from error
        except (OSError, ProtocolError) as error:
            _close_all(descriptors)
            self.close()
            raise self._lost(operation, str(error)) from error
        if answer.get("ok") is not True:
            _close_all(descriptors)
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
            _close_all(descriptors)

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

    def _send(self, request: bytes, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(request)
        except TimeoutError:
            self.close()  # the sender cannot know how much of the request has arrived
            raise

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


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    descriptors.clear()
