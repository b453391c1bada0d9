"""A socket in the run folder, for processes of the same user on this host that send one line each."""

import socket
from pathlib import Path

from fabric.ckpt_server.wire.channel_protocol import LineBuffer
from fabric.runtime.private_folder import socket_path


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


def receive_line(asking: socket.socket, most_bytes: int) -> bytes | None:
    """Return the first line, or None where the connection ends before it. Raises ProtocolError, OSError."""
    lines = LineBuffer(most_bytes)
    while (line := lines.next_line()) is None:
        received = asking.recv(most_bytes)
        if not received:
            return None
        lines.feed(received)
    return line
