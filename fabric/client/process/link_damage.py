"""A drill's damage to this process's TCP links: the kernel drops packets that reach them.

A filter on each link's socket drops them before TCP sees them, so nothing is acknowledged, and TCP sends
again. A process may filter its own sockets without any right. Links inside a host do not use TCP.
"""

import contextlib
import ctypes
import socket
import struct
import threading
from collections.abc import Callable

from fabric.errors import Refused
from fabric.runtime.drill_orders import LINKS
from fabric.transport.tcp import open_links

# Linux: options of SOL_SOCKET, and the place of the counter of dropped packets in SO_MEMINFO.
_ATTACH_FILTER, _DETACH_FILTER, _MEMINFO = 26, 27, 55
_MEMINFO_FORMAT, _DROPS = "9I", 8
# Classic BPF: load a random number, jump where it is at least k, return k (the bytes of the packet to keep).
_LOAD, _JUMP_AT_LEAST, _RETURN = 0x20, 0x35, 0x06
_RANDOM = 0xFFFFF000 + 56
_KEEP_ALL = 0xFFFFFFFF
_POLL_S = 0.02


class LinkDamage:
    """Packets to the TCP links of this process are lost, from now to ``end``, on new links too.

    ``lost``: the share of the packets. Raises Refused where this process has no TCP link.
    """

    def __init__(self, lost: float) -> None:
        self._program = _program(lost)
        self._damaged: dict[socket.socket, int] = {}  # socket -> the packets that it had dropped before
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._damage_links()
        if not self._damaged:
            raise Refused(
                "this trainer has no TCP link to a peer, and a link inside its host cannot be cut: drill a "
                "replica whose peers are on other hosts"
            )

    def tell(self, report: Callable[..., None]) -> None:
        """Go on with new links, and report the evidence once the kernel has dropped packets."""
        self._thread = threading.Thread(
            target=self._run, args=(report,), name="fabric-drill-links", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Let all packets pass again."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for link in self._damaged:
            with contextlib.suppress(OSError):
                link.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)

    def _run(self, report: Callable[..., None]) -> None:
        is_told = False
        while not self._over.wait(_POLL_S):
            self._damage_links()
            dropped = sum(max(0, _drops(link) - before) for link, before in self._damaged.items())
            if dropped and not is_told:
                is_told = True
                about = f"the kernel has dropped packets to its {len(self._damaged)} links"
                report(hit=LINKS, step=0, about=about)

    def _damage_links(self) -> None:
        for link in open_links():
            if link in self._damaged:
                continue
            with contextlib.suppress(OSError):  # the link has just ended
                before = _drops(link)
                _attach(link, self._program)
                self._damaged[link] = before


def _program(lost: float) -> list[tuple[int, int, int, int]]:
    """Return the filter that drops this share of the packets."""
    if lost >= 1.0:
        return [(_RETURN, 0, 0, 0)]
    return [
        (_LOAD, 0, 0, _RANDOM),
        (_JUMP_AT_LEAST, 0, 1, int(lost * 2**32)),
        (_RETURN, 0, 0, _KEEP_ALL),
        (_RETURN, 0, 0, 0),
    ]


def _attach(link: socket.socket, program: list[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    link.setsockopt(
        socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code))
    )


def _drops(link: socket.socket) -> int:
    """Return how many packets to this socket the kernel has dropped; 0 for a closed socket."""
    with contextlib.suppress(OSError):
        size = struct.calcsize(_MEMINFO_FORMAT)
        info = link.getsockopt(socket.SOL_SOCKET, _MEMINFO, size)
        return int(struct.unpack(_MEMINFO_FORMAT, info)[_DROPS])
    return 0
