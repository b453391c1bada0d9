"""A socket in the run folder, for processes of the same user on this host that send one line each."""

import os
import socket
import struct
from pathlib import Path

from fabric.ckpt_server.wire.channel_protocol import LineBuffer, socket_path

_PEER_CREDENTIALS = struct.Struct("iII")


def listen(run_dir: Path, name: str) -> socket.socket:
    """Return a listening socket ``name`` in ``run_dir``, in place of an older one. Raises OSError."""
    path = run_dir / name
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket_path(run_dir, name) as short_path:
        listener.bind(short_path)
    path.chmod(0o600)
    listener.listen(8)
    return listener


def is_own_user(asking: socket.socket) -> bool:
    """Whether the process at the other end runs as this process's user."""
    data = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return bool(_PEER_CREDENTIALS.unpack(data)[1] == os.geteuid())


def receive_line(asking: socket.socket, most_bytes: int) -> bytes | None:
    """Return the first line, or None where the connection ends before it. Raises ProtocolError, OSError."""
    lines = LineBuffer(most_bytes)
    while (line := lines.next_line()) is None:
        received = asking.recv(most_bytes)
        if not received:
            return None
        lines.feed(received)
    return line
