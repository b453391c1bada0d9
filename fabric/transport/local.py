"""Links between processes on one host: a unix socket beside the TCP socket.

The name has the TCP port and the listener's job, replica and rank, because hosts often use equal ports. The
name is abstract, so it exists only in the port's network namespace. Two containers on one machine can have
two namespaces. Both ends run the handshake of any link, so a process that took the name cannot pass for a
member. Both ends ask the kernel for the other's user: these links share memory, and a job without a token
must not share memory with another user.
"""

import hashlib
import os
import socket
import struct

from fabric.errors import Refused

_BACKLOG = 64


def local_name(job: str, replica: str, rank: int, port: int) -> bytes:
    """Return the name of the unix socket on which this rank listens beside ``port``."""
    # A hash, because a socket's name has at most 107 bytes.
    whose = hashlib.blake2b(f"{job}\n{replica}\n{rank}".encode(), digest_size=16).hexdigest()
    return b"\0fabric-link-%d-%s" % (port, whose.encode())


def listen_locally(name: bytes) -> socket.socket | None:
    """Return a non-blocking listener for this host's members. None where the name is taken: they use TCP."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.bind(name)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        return None
    return sock


def connect_locally(name: bytes) -> socket.socket | None:
    """Return a non-blocking connection to this host's listener of this name, None if there is none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect(name)
        check_user(sock)
    except (OSError, Refused):
        sock.close()
        return None
    return sock


def check_user(sock: socket.socket) -> None:
    """Raise Refused if the process at the other end is another user's."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid != os.geteuid():
        raise Refused(f"the other end on this host belongs to user {uid}, not to {os.geteuid()}: use TCP")
