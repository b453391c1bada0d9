"""A snapshot read out of the memory of a checkpoint server on this host, not over the network.

The reader connects to the server's unix socket, and checks with the kernel that the server runs as the same
user. It sends the job's token and the name of the state. It gets a read-only descriptor of the memory, and
reads it as a file. The server ends the connection when it withdraws the slot; bytes read later may be of
another state. So the reader verifies all bytes by the manifest's digests.
"""

import logging
import os
import socket

from fabric.ckpt_server.wire.channel_protocol import (
    LOCAL_ASK_S,
    MAX_FIRST_LINE_BYTES,
    LineBuffer,
    decode_line,
    encode_line,
    local_socket_name,
)
from fabric.errors import FabricError, Refused
from fabric.model import SnapshotRef
from fabric.runtime.private_folder import peer_of

log = logging.getLogger(__name__)

_SIGN = b"."  # the byte that the reader sends while it reads


class HostMemory:
    """The reader's side: one snapshot in the memory of a server on this host. Any thread may read."""

    def __init__(self, connection: socket.socket, descriptor: int) -> None:
        self._connection = connection
        self._descriptor = descriptor

    @classmethod
    def find(cls, place: str, state: SnapshotRef, token: str, nbytes: int) -> "HostMemory | None":
        """Return the memory of the server at ``place`` (host:port) if it holds ``state`` of ``nbytes``, or
        None.

        The digest in ``state`` is that of the file."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(LOCAL_ASK_S)
            connection.connect(local_socket_name(place))
            if peer_of(connection)[1] != os.geteuid():
                raise Refused("another user's process listens there")
            look = {
                "generation": state.generation,
                "step": state.step,
                "digest": state.digest,
                "token": token,
            }
            connection.sendall(encode_line(look))
            descriptor = _receive(connection)
            memory = cls(connection, descriptor)
            if os.fstat(descriptor).st_size < nbytes:
                memory.close()
                return None
            return memory
        except (OSError, FabricError) as error:
            log.debug("%s is not read from its memory: %s", place, error)
            connection.close()
            return None

    def body(self, begin: int) -> "MemoryBody":
        """Return the bytes from ``begin`` on."""
        return MemoryBody(self._descriptor, begin)

    def still_there(self) -> bool:
        """Whether the bytes read so far are of the wanted state; tell the server that we still read."""
        try:
            self._connection.send(_SIGN, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:  # the server is too busy to read, so it has not withdrawn the slot
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Let the server use the slot again. No thread may be reading."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._connection.close()


class MemoryBody:
    """Reads a snapshot's bytes in order, with the interface of ``HttpBody``."""

    def __init__(self, descriptor: int, begin: int) -> None:
        self._descriptor = descriptor
        self._at = begin

    def read(self, into: memoryview) -> None:
        """Fill ``into``. Raises ConnectionError where the memory ends too early."""
        while len(into):
            # Read the memory and do not map it: the kernel copies as fast, without page tables.
            count = os.preadv(self._descriptor, [into], self._at)
            if not count:
                raise ConnectionError(f"its memory ends {len(into)} bytes too early")
            self._at, into = self._at + count, into[count:]


def _receive(connection: socket.socket) -> int:
    """Return the descriptor that was sent. Raises OSError or FabricError where there is none."""
    lines, descriptors = LineBuffer(MAX_FIRST_LINE_BYTES), list[int]()
    try:
        while (line := lines.next_line()) is None:
            data, received, _, _ = socket.recv_fds(connection, 4096, 4)
            descriptors += received
            if not data:
                raise ConnectionResetError("it has closed the connection")
            lines.feed(data)
        if decode_line(line).get("ok") is not True or len(descriptors) != 1:
            raise Refused("it shows nothing")
        return descriptors.pop()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
