"""The drill's end of a trainer's drill socket: one order, and the trainer's reports."""

import contextlib
import os
import select
import socket
from pathlib import Path

from fabric.errors import ProtocolError, Refused
from fabric.runtime.drill_orders import DRILL_SOCKET_NAME, PointOrder, read_line

_ANSWER_S = 10.0
_MAX_BYTES = 1 << 16


class SentOrder:
    """An order that a trainer has taken. Close it to end the order."""

    def __init__(self, run_dir: Path, order: PointOrder) -> None:
        self._data = b""
        self.hit_step = -1  # the step at which the trainer obeyed; -1: not yet
        self.hits = 0  # how often the trainer obeyed
        self.about = ""  # what the trainer changed at its first hit
        self.is_over = False  # the trainer goes on
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(_ANSWER_S)
            _connect(self._socket, run_dir)
            self._socket.sendall(order.line())
            while b"\n" not in self._data:
                received = self._socket.recv(_MAX_BYTES)
                if not received:
                    raise OSError("the connection ended")
                self._data += received
        except OSError as error:
            self._socket.close()
            raise Refused(
                f"no trainer takes orders of a drill in {run_dir} ({error}): start it with FABRIC_DRILL=1"
            ) from error
        answer, _, self._data = self._data.partition(b"\n")
        body = read_line(answer)
        if body.get("ok") is not True:
            self._socket.close()
            raise Refused(str(body.get("error"))[:300])

    def look(self) -> None:
        """Read the reports that have come. Raises ProtocolError for a malformed report."""
        with contextlib.suppress(OSError):
            while select.select([self._socket], [], [], 0)[0]:
                received = self._socket.recv(_MAX_BYTES)
                if not received:
                    break
                self._data += received
                if len(self._data) > _MAX_BYTES:
                    raise ProtocolError("the trainer's reports are too long: use a trainer of this version")
        *lines, self._data = self._data.split(b"\n")
        for body in map(read_line, lines):
            if "hit" in body:
                self.hit_step, self.hits = int(body.get("step") or 0), self.hits + 1
                self.about = self.about or str(body.get("about") or "")[:200]
            self.is_over = self.is_over or "over" in body

    def close(self) -> None:
        self._socket.close()

    def end(self) -> None:
        """End the order, and go on reading the reports."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


def _connect(sock: socket.socket, run_dir: Path) -> None:
    """Connect by the folder's descriptor, because the path of a unix socket may have 107 bytes only."""
    folder = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.connect(f"/proc/self/fd/{folder}/{DRILL_SOCKET_NAME}")
    finally:
        os.close(folder)
