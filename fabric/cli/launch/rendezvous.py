"""A fresh rendezvous for each attempt: a TCP port of this host that no other attempt uses.

During the attempt the launcher keeps the port bound without listening on it. So the kernel does not give the
port to a process that asks for any free port. Rank 0 may still listen there: both sockets allow reuse.
"""

import contextlib
import socket
from collections import deque

from fabric.errors import FabricError

_TRIES = 64


class RendezvousPort:
    """The ports of a launcher's attempts, one at a time."""

    def __init__(self, address: str) -> None:
        self._address = address  # to bind; empty: all addresses of this host
        self._held: socket.socket | None = None
        self._used: deque[int] = deque(maxlen=4096)

    def renew(self) -> int:
        """Reserve a port that no attempt of this launcher has had, and release the last attempt's port."""
        rejected: list[socket.socket] = []
        try:
            for _ in range(_TRIES):
                reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                reserved.bind((self._address, 0))
                port = int(reserved.getsockname()[1])
                if port in self._used:
                    rejected.append(reserved)  # stays bound, so that the kernel offers another port next
                    continue
                # Set after the bind: with reuse, the kernel might offer a port that another launcher holds.
                reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.close()
                self._held = reserved if _can_be_listened_on(port) else None
                if self._held is None:
                    reserved.close()  # without such reuse the kernel rarely gives this port away
                self._used.append(port)
                return port
        except OSError as error:
            raise FabricError(f"no port of this host can be reserved for the ranks ({error})") from error
        finally:
            for reserved in rejected:
                reserved.close()
        raise FabricError(
            "no fresh port of this host was found for the ranks: wait, and start the replica again"
        )

    def close(self) -> None:
        """Release the port."""
        if self._held is not None:
            self._held.close()
            self._held = None


def _can_be_listened_on(port: int) -> bool:
    """Whether another socket may listen on a port that is bound here, as rank 0 will."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
            return True
    return False
